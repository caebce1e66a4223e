"""Parameters and multiply-accumulates (MACs) of a model, counted on the traced program of its real forward pass.

Every matrix product and convolution of the program counts, those between activations included: attention products,
Newton iterations, predicted convolutions (nine MACs per value, however an export computes them). Norms, activations,
additions and position-table resizing do not. One MAC is one multiplication and one addition (the papers' "FLOPs").
"""

import math
from typing import Any

PRODUCTS = {"pd_op.matmul", "pd_op.bmm", "pd_op.mm"}


def params(model: Any) -> int:
    """Parameters, frozen ones too, without running statistics, which Paddle counts among them."""
    parameters = model.named_parameters()
    return sum(math.prod(p.shape) for name, p in parameters if not name.endswith(("._mean", "._variance")))


def macs(model: Any, img_size: tuple[int, int] | None = None) -> int:
    """MACs of one input of `img_size` (H, W), by default as large as the model was built for."""
    import paddle
    from paddle.static import InputSpec

    from ppattn.layers import evaluating
    from ppattn.ops import tracing

    example = model.example(size=img_size)
    spec = InputSpec(example.shape, example.dtype.name)
    with evaluating(model), tracing():
        traced = paddle.jit.to_static(model.forward, input_spec=[spec], full_graph=True).concrete_program
    total = 0
    depends: set[int] = set()  # ids of the values that depend on the images; the others are resized tables
    for op in traced.main_program.global_block().ops:
        inputs = {value.id for value in op.operands_source() if value.initialized()}
        if op.name() == "pd_op.data" or inputs & depends:
            depends.update(value.id for value in op.results())
            total += _macs(op)
    return total


def _macs(op) -> int:
    name = op.name()
    if name in PRODUCTS and op.operand_source(0).get_defining_op().name() == "pd_op.full":
        return 0  # a mean, written as a product
    if name in PRODUCTS or name == "pd_op.addmm":
        left, right = (op.operand_source(i).shape for i in ((1, 2) if name == "pd_op.addmm" else (0, 1)))
        transposed = name == "pd_op.matmul" and op.attrs()["transpose_x"]
        return math.prod(op.result(0).shape) * (left[-2] if transposed else left[-1])
    if "conv" in name:
        image = op.operand_source(0) if "transpose" in name else op.result(0)
        return math.prod(image.shape) * math.prod(op.operand_source(1).shape[1:])
    return 0
