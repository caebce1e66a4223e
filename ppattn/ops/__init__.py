"""Operators of the models, each in a plain Paddle form and in a compiled form for float32 on the CPU.

The plain form works on any device and dtype, in static graphs and in exported programs. The compiled form is used for
float32 tensors on the CPU in dynamic mode after `enable()`, which `ppattn.setup()` calls, if the kernels can be built.
Both agree to float32 accuracy. `status()` says which one is in use and why. `tensors.py` has plain forms only.
"""

from ppattn.ops import native
from ppattn.ops.attention import (
    combine_by_window,
    full_precision,
    inline_attention,
    keep_float32,
    merge_heads,
    softmax,
    softmax_attention,
    split_heads,
    split_tensor,
)
from ppattn.ops.convolution import HALF, conv2d, correlation3x3, depthwise_conv, dynamic_conv3x3, grid_map, grid_tokens
from ppattn.ops.dense import gelu, layer_norm, linear, mlp, residual_mlp, silu, softplus, token_mean
from ppattn.ops.dispatch import as_dtype_of, as_float32, constant, eager, enable, is_half, marking_float32, status
from ppattn.ops.kernel_attention import (
    clipped,
    direction_power,
    focused_power,
    gated_unit,
    gaussian_attention,
    gaussian_kernel,
    gaussian_nystrom,
    head_product,
    linear_attention,
    newton_inverse,
    rotate,
    signed_power,
)
from ppattn.ops.tensors import (
    as_dtype,
    drop_path,
    dropout,
    exact_dtype,
    interpolation_matrix,
    is_dynamic,
    keep_factors,
    merge_windows,
    pad_end,
    pad_to_multiple,
    partition_windows,
    tracing,
)
