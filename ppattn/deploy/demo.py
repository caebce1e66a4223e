"""A page that classifies pictures in the browser: one HTML file, an ONNX program and ONNX Runtime Web.

The program gives the probabilities and, for every layer that has one, the attention map of all queries (mean over the
heads). The page (`demo.html`) repeats `Preprocess` in JavaScript, but for the filters: the browser resizes.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppattn import cost
from ppattn.analysis.maps import Call, attention_calls
from ppattn.attention import ATTENTIONS
from ppattn.data import Preprocess
from ppattn.deploy.checks import TOLERANCE, output_difference
from ppattn.deploy.exporter import check_runtimes, save_program, to_onnx
from ppattn.deploy.folder import ONNX
from ppattn.errors import UserError, optional_package, reading_untrusted
from ppattn.files.atomic import atomic_folder
from ppattn.files.cache import download_folder, locked
from ppattn.files.download import fetch
from ppattn.layers import evaluating

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
SHA512 = "ab4cbe26baedba45d2cec05610c71c55fa97db92d19a8b171c5f8269126683ca"
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")  # 14 MB
PAGE = "index.html"
LARGEST = 2**20  # numbers in the map of a layer; the page gets no larger ones


class WithMaps(nn.Layer):
    """Images -> probabilities [B, K], then the map [B * G, N, M] of each of `layers`, by active `attention_calls`."""

    def __init__(self, model: nn.Layer, calls: list[Call], layers: list[str], sigmoid: bool = False):
        super().__init__()
        self.model, self.calls, self.layers = model, calls, layers
        self.last = nn.Sigmoid() if sigmoid else nn.Softmax()

    def forward(self, images: paddle.Tensor) -> list[paddle.Tensor]:
        self.calls.clear()
        probabilities = self.last(self.model(images))
        return [probabilities, *(call.weights().mean(axis=1) for call in self.calls if call.name in self.layers)]


def write_demo(
    model: nn.Layer,
    folder: str | Path,
    *,
    preprocess: Preprocess,
    classes: list[str],
    title: str,
    sigmoid: bool = False,
    runtime: str | Path | None = None,
) -> None:
    """Write the page's folder, for any web server; it appears only if ONNX Runtime gives the model's own answers.

    Args:
        model: a classifier; `preprocess` and `classes` are its own, as from `ppattn.load_run`, and `title` its name.
        folder: where it goes; an earlier page there is replaced.
        runtime: the package `onnxruntime-web`, as the file of `npm pack` or as a folder; default: downloaded once.
    """
    model.check_images()
    folder = Path(os.path.realpath(folder))
    check_runtimes("onnx", "fp32", "probabilities")
    if not model.num_classes or model.in_chans > 3:
        raise UserError("The page shows the classes of pictures: give a model with a classifier, of 1 or 3 channels.")
    files = runtime_files(runtime)
    image = np.random.default_rng(0).standard_normal((1, model.in_chans, *preprocess.img_size), np.float32)
    with evaluating(model), atomic_folder(folder, {PAGE, ONNX, *RUNTIME}, "demo") as work:
        with attention_calls(model) as calls:
            layers, remark = describe_layers(model, calls, image)
            program = WithMaps(model, calls, [layer["name"] for layer in layers], sigmoid)
            program.eval()
            save_program(program, work, image.shape[1:])
            to_onnx(work)
            check_answers(work / ONNX, image, program)
        about = {"title": title, "params": cost.params(model), "classes": classes, "program": ONNX, "layers": layers}
        about |= {"preprocess": preprocess.to_dict(), "remark": remark, "runtime": f"ONNX Runtime Web {VERSION}"}
        for name, data in files.items():
            (work / name).write_bytes(data)
        text = json.dumps(about, ensure_ascii=False).replace("<", "\\u003c")
        page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        (work / PAGE).write_text(page.replace("ABOUT", text), encoding="utf-8")


def describe_layers(model: nn.Layer, calls: list[Call], image: np.ndarray) -> tuple[list[dict[str, Any]], str]:
    """What the page needs to draw the map of each layer, and sentences about layers without one: number, name and
    attention, the grids of queries and keys, tokens in front, the grid token (-1: none) at each place of windows."""
    layers, remarks = [], {}
    with paddle.no_grad():
        model(paddle.to_tensor(image))
        for number, call in enumerate(calls, 1):
            kind = ATTENTIONS.name_of(type(call.block.attn))
            try:
                found = call.layer_map()
                keys = found.key_hw
            except UserError as error:
                remarks[str(error)] = number
                continue
            if found.weights[:, 0].size > LARGEST:
                remarks[f"Attention maps of more than {LARGEST:,} numbers are left out."] = number
            else:
                layer = {"number": number, "name": found.name, "attention": kind, "prefix": found.prefix}
                layer |= {"queries": found.hw, "keys": keys}
                layers.append(layer | {"windows": None if found.window is None else found.place.tolist()})
    return layers, " ".join(remarks)


def check_answers(path: Path, image: np.ndarray, program: nn.Layer) -> None:
    """Compare every output of the ONNX program with the layer's; raises `UserError` where one differs."""
    with optional_package("onnx"):
        import onnxruntime
    with reading_untrusted("The program for the browser", "one that ONNX Runtime opens"):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: image})
    with paddle.no_grad():
        expected = [output.numpy() for output in program(paddle.to_tensor(image))]
    worst = max(map(output_difference, found, expected, ["probabilities", *["weights"] * (len(expected) - 1)]))
    if not worst <= TOLERANCE["fp32"]:
        raise UserError(f"ONNX Runtime does not give the model's own answers: they differ by {worst:.1e}.")


def runtime_files(given: str | Path | None) -> dict[str, bytes]:
    """The files of ONNX Runtime Web by name; without `given` from NPM_CONFIG_REGISTRY, kept for the next page."""
    if given is None:
        registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
        name = f"{PACKAGE}-{VERSION}.tgz"
        advice = f"Run `npm pack {PACKAGE}@{VERSION}` where there is npm, and give the file: --runtime {name}."
        cache = download_folder()
        with locked(cache):
            given = fetch([f"{registry}/{PACKAGE}/-/{name}"], cache / name, name, ("sha512", SHA512), advice)
    if Path(given).is_dir():
        for inside in ("", "dist", f"node_modules/{PACKAGE}/dist"):
            place = Path(given, inside)
            if all((place / name).is_file() for name in RUNTIME):
                return {name: (place / name).read_bytes() for name in RUNTIME}
        raise UserError(f"{given} does not hold {' and '.join(RUNTIME)} of the npm package {PACKAGE}.")
    with reading_untrusted(given, f"the npm package {PACKAGE}"), tarfile.open(given) as tar:
        return {name: tar.extractfile(f"package/dist/{name}").read() for name in RUNTIME}  # type: ignore[union-attr]
