"""Numbers that are not finite: which weights, and which layer made a loss so."""

from __future__ import annotations

import paddle
from paddle import nn


@paddle.no_grad()
def first_of(tensors: dict[str, paddle.Tensor]) -> str | None:
    """The name of the first tensor that is not finite, with one wait for the device."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    bad = paddle.stack([~paddle.isfinite(tensor).all() for tensor in floats.values()]).numpy() if floats else []
    return next((name for name, is_bad in zip(floats, bad, strict=True) if is_bad), None)


@paddle.no_grad()
def first_layer(model: nn.Layer, images: paddle.Tensor) -> str:
    """Run the model again and say where the first value that is not finite comes up."""
    if first_of({"images": images}):
        return "the images themselves are not finite"
    found: list[str] = []

    def note(name):
        def hook(layer, inputs, outputs):
            tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            if not found and first_of({str(i): t for i, t in enumerate(tensors) if isinstance(t, paddle.Tensor)}):
                found.append(name)

        return hook

    handles = [layer.register_forward_post_hook(note(name)) for name, layer in model.named_sublayers()]
    try:
        model.forward_train(images)
    finally:
        for handle in handles:
            handle.remove()
    return f"the first layer whose output is not finite is {found[0]}" if found else "every layer's output is finite"
