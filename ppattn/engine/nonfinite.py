"""What made a loss non-finite: the first layer with such an output."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn


@paddle.no_grad()
def first_nonfinite(model: nn.Layer, images: paddle.Tensor) -> str:
    """Run the model again and say where the first value that is not finite comes up."""
    if not finite(images):
        return "the images themselves are not finite"
    for name, parameter in model.named_parameters():
        if not parameter.stop_gradient and not finite(parameter):  # running statistics overflow in the step itself
            return f"parameter {name} was no longer finite before this step"
    found: list[str] = []

    def note(name):
        def hook(layer, inputs, outputs):
            tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            floats = [t for t in tensors if isinstance(t, paddle.Tensor) and t.is_floating_point()]
            if not found and not all(finite(t) for t in floats):
                found.append(name)

        return hook

    handles = [layer.register_forward_post_hook(note(name)) for name, layer in model.named_sublayers()]
    try:
        model.forward_train(images)
    finally:
        for handle in handles:
            handle.remove()
    return f"the first layer whose output is not finite is {found[0]}" if found else "every layer's output is finite"


def finite(tensor: paddle.Tensor) -> bool:
    return bool(np.isfinite(tensor.astype("float32").numpy()).all())
