"""The figures of gpu_check.py, one a process: python -m scripts.studies.gpu_figures NAME DEVICE ... prints JSON."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import ppattn
from ppattn.runtime.memory import peak_allocated
from ppattn.weights import files


def versions(device: str) -> Any:
    gpu = paddle.is_compiled_with_cuda()
    facts = {"paddle": paddle.__version__, "cuda": paddle.version.cuda(), "cudnn": paddle.version.cudnn()}
    facts |= {"device": paddle.device.get_device(), "gpus": paddle.device.cuda.device_count() if gpu else 0}
    return facts | {"cinn": paddle.is_compiled_with_cinn()}


def half(device: str, dtype: str) -> Any:
    """Distance of a trained model's logits from float32 on this device, by attention."""
    images, found = paddle.randn([8, 3, 32, 32]), {}
    for name in ppattn.list_models(pretrained=True):
        if "deit_nano" in name:
            model = ppattn.create_model(name, pretrained=True)
            model.eval()
            with paddle.no_grad():
                wanted = model(images).numpy()
                with paddle.amp.auto_cast(dtype=dtype):
                    got = model(images).astype("float32").numpy()
            found[name] = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    return found


def state(device: str, folder: str) -> Any:
    """Checksums of all tensors of the last checkpoint, and what goes with them."""
    tensors, metadata = files.read(Path(folder, "checkpoints", "latest"))
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(name.encode() + array.tobytes())
    return {"sha256": digest.hexdigest(), "scaler": metadata["scaler"]}


def memory(device: str) -> Any:
    """Peak megabytes of forward and backward of softmax attention at 3,136 tokens."""
    layer = ppattn.attention_layer("softmax", 384, 6, (56, 56))
    with paddle.amp.auto_cast(dtype="bfloat16"):
        layer(paddle.randn([4, 3136, 384])).sum().backward()
    return peak_allocated()


def to_static(device: str) -> Any:
    """Milliseconds of a forward pass: dynamic, traced, and compiled by CINN where Paddle has it."""
    name, batch = ("deit_tiny", 64) if device.startswith("gpu") else ("deit_nano", 1)
    found = {}
    for attention in ("softmax", "inline"):
        model = ppattn.create_model(name, attention=attention)
        model.eval()
        images = paddle.randn([batch, 3, *model.img_size])
        found[f"{attention} dynamic"] = milliseconds(model, images)
        traced = paddle.jit.to_static(model, full_graph=True, backend=None)
        found[f"{attention} traced"] = milliseconds(traced, images)
        if paddle.is_compiled_with_cinn():
            compiled = paddle.jit.to_static(model, full_graph=True, backend="CINN")
            found[f"{attention} CINN"] = milliseconds(compiled, images)
    return found


def milliseconds(model, images) -> float:
    with paddle.no_grad():
        model(images).numpy()
        start = time.perf_counter()
        for _ in range(10):
            model(images).numpy()
    return round(100 * (time.perf_counter() - start), 3)


def exports(device: str, output: str) -> Any:
    """Differences of logits that `ppattn.export` measures, and on the CUDA provider where there is one."""
    import onnxruntime

    ppattn.setup(device="cpu", seed=0)
    model = ppattn.create_model("inline_deit_nano_cifar10", pretrained=True)
    found: dict[str, Any] = {"providers": onnxruntime.get_available_providers()}
    for precision in ("fp32", "fp16"):
        folder = Path(output) / f"export_{precision}"
        found[precision] = ppattn.export(model, folder, format="onnx", precision=precision)["differences"]
        ppattn.Predictor(folder)
    return found


FIGURES = {f.__name__: f for f in (versions, half, state, memory, to_static, exports)}

if __name__ == "__main__":
    _, name, device, *arguments = sys.argv
    ppattn.setup(device=device, seed=0)
    print(json.dumps(FIGURES[name](device, *arguments)))
