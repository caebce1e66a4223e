"""The operators that an opened Paddle program may hold: they compute. Others write files (save) or run code."""

from __future__ import annotations

import json
from pathlib import Path

from ppattn.errors import UserError, reading

OF_MODELS = """
abs acos acosh add add_n addcmul addmm all any arange argmax argmin argsort asin asinh assign assign_out assign_value
atan atan2 atanh baddbmm batch_norm bicubic_interp bilinear_interp bitwise_and bitwise_not bitwise_or bitwise_xor bmm
broadcast_tensors cast ceil celu channel_shuffle clip concat conv2d conv2d_transpose conv3d cos cosh crop cross cumsum
data depthwise_conv2d depthwise_conv2d_transpose diag diag_embed diagonal divide dot dropout einsum elementwise_pow
elu embedding equal erf exp expand expand_as expm1 eye feed fetch fill_diagonal flash_attn flatten flip floor
floor_divide fold full full_batch_size_like full_int_array full_like full_with_tensor gather gather_nd gelu
greater_equal greater_than grid_sample group_norm hardshrink hardsigmoid hardswish hardtanh imag increment index_add
index_sample index_select instance_norm inverse isfinite isinf isnan kron layer_norm leaky_relu lerp less_equal
less_than linear_interp linspace log log10 log1p log2 log_softmax logical_and logical_not logical_or logit logsigmoid
logsumexp masked_fill masked_select matmul max max_pool2d_with_index maximum mean mean_all meshgrid min minimum mish
multiply mv nearest_interp nonzero norm not_equal numel one_hot p_norm pad pad3d pixel_shuffle pixel_unshuffle pool2d
pow prelu prod put_along_axis real reciprocal reduce_as relu relu6 remainder repeat_interleave reshape rms_norm roll
rot90 round rsqrt scale scatter scatter_nd_add selu set_value set_value_with_tensor shadow_feed shape shape64
share_data sigmoid sign silu sin sinh slice softmax softplus softshrink softsign sort split split_with_num sqrt square
squared_l2_norm squeeze stack strided_slice subtract sum swish sync_batch_norm take_along_axis tan tanh tanh_shrink
thresholded_relu tile topk transpose tril trilinear_interp triu trunc unbind unfold unsqueeze unstack where
"""
# Paddle 3 writes dialects as numbers: 0 builtin, 1 pd_op; `p` is a parameter. `_` at the end: works in place.
OPERATORS = {"p", "0.combine", "0.constant", "0.slice", "0.split", *(f"1.{name}" for name in OF_MODELS.split())}


def check_operators(program: Path) -> None:
    """Compare every operator of a program with `OPERATORS`.

    Raises:
        UserError: for a file that is no program of Paddle 3, or one with another operator.
    """
    with reading(program, "a program of Paddle 3"):
        waiting, found = [json.loads(program.read_bytes())["program"]], set()
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                found |= {operator["#"].rstrip("_") for operator in item.get("ops", ())}
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
    if others := sorted(found - OPERATORS):
        raise UserError(f"{program} has operators that an export cannot contain ({', '.join(others[:5])}): not opened.")
