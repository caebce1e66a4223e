"""Logits, gradients and one AdamW step of every attention on a backbone: a device against the CPU.

Usage: python tests/runtime/other_device/compare.py DEVICE BACKBONE [ATTENTION ...] [--plant]. With `--plant`, the
compiled CPU kernels no longer check where a tensor lies, and the process must end with SIGSEGV.
"""

import sys

import numpy as np

import ppattn
from ppattn.ops import dispatch

ppattn.setup(device="cpu", threads=1, seed=0)

import paddle  # noqa: E402
import paddle.nn.functional as F  # noqa: E402

IMAGES = np.random.default_rng(0).standard_normal((2, 3, 32, 32), "float32")


def step(device: str, backbone: str, attention: str, state: dict | None) -> tuple[dict, np.ndarray, dict, dict, set]:
    """Fresh weights, logits, gradients, weights after one step, and the places of all tensors."""
    paddle.set_device(device)
    paddle.seed(0)
    model = ppattn.create_model(backbone, attention=attention, img_size=32, num_classes=10)
    if state is not None:
        model.set_state_dict(state)
    fresh = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    logits = model(paddle.to_tensor(IMAGES))
    F.cross_entropy(logits, paddle.to_tensor([1, 5])).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors = [logits, *model.parameters(), *model.buffers(), *gradients.values()]
    optimizer.step()
    updated = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    gradients = {name: gradient.numpy() for name, gradient in gradients.items()}
    return fresh, logits.numpy(), gradients, updated, {str(tensor.place) for tensor in tensors}


def norm(tensors: dict) -> float:
    return float(sum((tensor.astype("float64") ** 2).sum() for tensor in tensors.values())) ** 0.5


def compare(device: str, backbone: str, attention: str) -> None:
    fresh, logits, gradients, updated, _ = step("cpu", backbone, attention, None)
    _, other_logits, other_gradients, other_updated, places = step(device, backbone, attention, fresh)
    assert places == {f"Place({device}:0)"} or device == "cpu", f"tensors lie on {places}"
    assert np.abs(other_logits - logits).max() < 1e-5 * np.abs(logits).max(), "logits differ"
    assert other_gradients.keys() == gradients.keys()
    difference = {name: other_gradients[name] - gradients[name] for name in gradients}
    assert norm(difference) < 1e-5 * norm(gradients), "gradients differ"
    moved = {name: updated[name] - fresh[name] for name in updated}
    difference = {name: other_updated[name] - updated[name] for name in updated}
    # Adam's first step is the sign of the gradient: where that is nearly zero, rounding decides.
    assert norm(difference) < 2e-2 * norm(moved), "the optimizer's step differs"


if __name__ == "__main__":
    device, backbone, *names = [argument for argument in sys.argv[1:] if argument != "--plant"]
    if "--plant" in sys.argv:
        dispatch.cpu_float32 = lambda *tensors: paddle.in_dynamic_mode()
    for name in names or ppattn.list_attentions():
        print(f"{backbone} {name}", flush=True)
        compare(device, backbone, name)
    print("all equal")
