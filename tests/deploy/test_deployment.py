"""Exports in other programs: preprocessing without ppattn, a FastAPI service, PaddleX."""

import base64
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ppattn
from ppattn.data import Preprocess, decode, read_image
from ppattn.deploy.folder import paddlex_config
from ppattn.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PADDLEX = ROOT / ".venv-paddlex/bin/python"
NAMES = [f"class {i}" for i in range(7)]


def photos() -> dict[str, Path]:
    """Two photographs that scikit-learn brings."""
    import sklearn

    return {path.stem: path for path in (Path(sklearn.__file__).parent / "datasets/images").glob("*.jpg")}


def picture(mode: str, width: int, height: int) -> Image.Image:
    photo = Image.open(photos()["china"]).resize((width, height))
    if mode == "RGBA":
        photo.putalpha(Image.linear_gradient("L").resize((width, height)))
    return photo.convert(mode)


def encoded(image: Image.Image, kind: str, **settings) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned by 90 degrees
PICTURES = {
    "odd": encoded(picture("RGB", 53, 37), "png"), "tall": encoded(picture("RGB", 31, 211), "png"),
    "grey": encoded(picture("L", 97, 60), "png"), "alpha": encoded(picture("RGBA", 45, 77), "png"),
    "palette": encoded(picture("P", 45, 77), "png"),
    "grey, 16 bits": encoded(Image.fromarray((np.arange(48 * 61).reshape(48, 61) * 22).astype(np.uint16)), "png"),
    "turned": encoded(picture("RGB", 80, 41), "png", exif=EXIF),
}  # fmt: skip


def preprocess_of_the_example():
    scope: dict = {}
    exec((ROOT / "examples/serve/preprocess.py").read_text(), scope)
    return scope["preprocess"]


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize(
    "settings",
    [{"img_size": (33, 33), "crop_ratio": 0.875, "crop_keep_aspect": True},
     {"img_size": (32, 47), "crop_ratio": 0.9, "crop_keep_aspect": True, "interpolation": "bilinear"},
     {"img_size": (32, 47), "interpolation": "area"},
     {"img_size": (64, 30), "crop_ratio": 0.7, "interpolation": "nearest"}],
)  # fmt: skip
def test_the_preprocessing_of_the_example_is_ours(name, settings):
    ours = Preprocess(**settings)
    found = preprocess_of_the_example()(Image.open(io.BytesIO(PICTURES[name])), **ours.to_dict())
    expected = ours.batch([decode(PICTURES[name], name)])
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5  # a level is 0.017


def test_what_paddlex_cannot_prepare_is_said():
    assert paddlex_config("m", Preprocess((32, 32)), NAMES)[1] is None
    for preprocess in (Preprocess((32, 32), in_chans=1), Preprocess((32, 47), crop_keep_aspect=True)):
        text, reason = paddlex_config("m", preprocess, NAMES)
        assert text == "" and reason


@pytest.fixture(scope="module")
def folder(_runtime, tmp_path_factory):
    """An export whose scores depend strongly on the image."""
    model = ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)
    model.head.weight.set_value(20 * model.head.weight)
    path = tmp_path_factory.mktemp("export") / "served"
    preprocess = Preprocess((32, 32), crop_ratio=0.875, crop_keep_aspect=True)
    format = "both" if importlib.util.find_spec("paddle2onnx") else "paddle"
    ppattn.export(model, path, format=format, preprocess=preprocess, classes=NAMES)
    return path


@pytest.mark.slow
def test_images_of_every_kind_are_predicted_alike(folder, tmp_path):
    predictor = ppattn.Predictor(folder)
    for name, data in PICTURES.items():
        (tmp_path / f"{name}.png").write_bytes(data)
        given = [tmp_path / f"{name}.png", data, Image.open(io.BytesIO(data)), decode(data, name)]
        answers = [predictor.predict(one)[0] for one in given] + predictor.predict(given)
        for answer in answers:  # a batch may differ in the last bits
            assert np.allclose([score for _, score in answer], [score for _, score in answers[0]], atol=1e-6), name
    grey = decode(PICTURES["grey"], "grey")[..., 0]
    deep = Image.fromarray(grey.astype("uint16") * 257)
    for one in (grey, grey[..., None], Image.fromarray(grey), deep):
        assert predictor.predict([one]) == predictor.predict(PICTURES["grey"])
    assert predictor.predict(iter([grey])) == predictor.predict(grey)
    cases = [(5, "a int"), (grey[0], r"uint8 \[97\]"), (grey / 255, "float64"), (b"x", "not a readable image")]
    for wrong, words in [*cases, (Image.new("F", (4, 4)), "32 bits"), (None, "a NoneType"), ([1], "a list")]:
        with pytest.raises(UserError, match=f"Image 2.*{words}"):
            predictor.predict([grey, wrong])
    with pytest.raises(UserError, match=r"Image 1.*a int"):
        predictor.predict(5)


def test_the_example_keeps_16_bits():
    prepare, settings = preprocess_of_the_example(), Preprocess((32, 32), crop_keep_aspect=True).to_dict()
    deep = Image.fromarray(np.full((40, 40), 0x80FF, "uint16"))
    assert np.array_equal(prepare(deep, **settings), prepare(Image.new("L", (40, 40), 0x80), **settings))


@contextmanager
def serving(command: list, folder: Path, **settings):
    """A server of an example on a free port of the loopback device; the address, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder.parent / f"server_{port}.log"
    with log.open("w") as file:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file, **settings)
    try:
        while True:
            assert server.poll() is None, log.read_text()[-2000:]
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def post(address: str, data: bytes, kind: str = "application/octet-stream"):
    """(status, content) of an answer."""
    request = urllib.request.Request(address, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
def test_the_service_answers_many_at_once_and_rejects_what_is_no_image(folder):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("paddle2onnx", reason="paddle2onnx has no wheel for this Python")
    predictor = ppattn.Predictor(folder)
    expected = {name: predictor.predict([decode(data, name)])[0] for name, data in PICTURES.items()}
    environment = os.environ | {"MODEL": str(folder)}
    command = [sys.executable, "-m", "uvicorn", "serve:app"]
    with serving(command, folder, cwd=ROOT / "examples/serve", env=environment) as address:
        work = [*PICTURES] * 5
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda name: post(f"{address}/predict", PICTURES[name]), work)]
        for name, (status, found) in zip(work, answers, strict=True):
            assert status == 200 and [one["name"] for one in found] == [one for one, _ in expected[name]]
            assert np.allclose([one["score"] for one in found], [score for _, score in expected[name]], atol=1e-5)
        whole = PICTURES["odd"]
        assert post(f"{address}/predict", b"no image")[0] == 400
        assert post(f"{address}/predict", whole[: len(whole) // 2])[0] == 400
        for kind in ("tiff", "ppm", "gif", "bmp", "webp"):
            damaged = bytearray(encoded(picture("RGB", 40, 30), kind))
            damaged[6:30] = bytes(24)
            assert post(f"{address}/predict", bytes(damaged))[0] in (200, 400)
            assert post(f"{address}/predict", bytes(damaged[: len(damaged) // 3]))[0] in (200, 400)
        assert post(f"{address}/predict", encoded(Image.new("L", (1, 60_000)), "png"))[0] == 200
        assert post(f"{address}/predict", bytes(11 * 2**20))[0] == 413
        assert post(f"{address}/predict", whole)[0] == 200


@pytest.mark.slow
@pytest.mark.skipif(not PADDLEX.exists(), reason="bash scripts/setup.sh paddlex makes the environment with PaddleX")
def test_paddlex_gives_the_scores_of_predict(folder, tmp_path):
    files = {name: tmp_path / f"{name}.png" for name in PICTURES} | photos()
    for name, data in PICTURES.items():
        files[name].write_bytes(data)
    script = [PADDLEX, ROOT / "examples/paddlex/classify.py"]
    predictor = ppattn.Predictor(folder)
    expected = {str(path): predictor.predict([read_image(path)])[0] for path in files.values()}
    for engine in ("paddle_static", "onnxruntime") if predictor.format == "both" else ("paddle_static",):
        call = [*script, "predict", "--model", folder, "--engine", engine, *files.values()]
        done = subprocess.run(call, capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [line["input_path"] for line in lines] == [*expected], done.stderr[-2000:]
        for line in lines:
            same(line["label_names"], line["scores"], expected[line["input_path"]])
    with serving([*script, "serve", "--model", folder], folder) as address:
        for path in photos().values():
            body = json.dumps({"image": base64.b64encode(path.read_bytes()).decode(), "topk": 5}).encode()
            status, answer = post(f"{address}/image-classification", body, "application/json")
            assert status == 200, answer
            found = answer["result"]["categories"]
            same([one["name"] for one in found], [one["score"] for one in found], expected[str(path)])


def same(names: list[str], scores: list[float], expected: list[tuple[str, float]]) -> None:
    """PaddleX rounds scores to five decimals; names with equal ones may swap."""
    assert dict(expected).keys() == set(names)
    for name, score in zip(names, scores, strict=True):
        assert abs(score - dict(expected)[name]) < 1e-5
