"""The operators that an opened Paddle program may hold: they compute. Others write files (save) or run code."""

from __future__ import annotations

import json
from pathlib import Path

from ppattn.errors import UserError, reading

OF_MODELS = """
abs add add_n addmm arange argmax argmin assign assign_out_ assign_value assign_value_ atan2 batch_norm batch_norm_
bilinear_interp bicubic_interp bmm broadcast_tensors cast ceil clip concat conv2d cos cumsum data depthwise_conv2d
divide dropout einsum elementwise_pow elu embedding equal erf exp expand expand_as expm1 fetch flatten flip floor
floor_divide full full_int_array full_like full_with_tensor gather gather_nd gelu greater_equal greater_than
group_norm hardsigmoid hardswish index_select instance_norm layer_norm leaky_relu less_equal less_than linspace log
log1p log_softmax logical_and logical_not logical_or logsumexp masked_fill matmul max maximum mean meshgrid min
minimum multiply nearest_interp norm not_equal one_hot p_norm pad pad3d pool2d pow prod reciprocal relu relu6
remainder reshape roll round rsqrt scale shadow_feed shape shape64 share_data_ sigmoid sign silu sin slice softmax
softplus split split_with_num sqrt square squeeze stack strided_slice subtract sum swish take_along_axis tanh tile
topk transpose tril triu unbind unfold unsqueeze unstack where
"""
# Paddle 3 writes dialects as numbers: 0 builtin, 1 pd_op; `p` is a parameter.
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
                found |= {operator["#"] for operator in item.get("ops", ())}
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
    if others := sorted(map(str, found - OPERATORS)):
        raise UserError(f"{program} has operators that an export cannot contain ({', '.join(others[:5])}): not opened.")
