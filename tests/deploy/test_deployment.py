"""Engines that agree, and exports in other programs: preprocessing without ppattn, a FastAPI service, PaddleX."""

import base64
import importlib.util
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from sklearn.datasets import load_sample_images

import ppattn
from ppattn.data import Preprocess, decode, read_image
from ppattn.deploy import engines
from ppattn.deploy.folder import check_operators, paddlex_config
from ppattn.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PADDLEX = ROOT / ".venv-paddlex/bin/python"
NAMES = [f"class {i}" for i in range(7)]
X = np.random.default_rng(0).standard_normal((3, 3, 32, 32), dtype=np.float32)


def photos() -> dict[str, Path]:
    """Two photographs that scikit-learn brings."""
    return {Path(name).stem: Path(name) for name in load_sample_images().filenames}


def picture(mode: str, width: int, height: int) -> Image.Image:
    photo = Image.open(photos()["china"]).resize((width, height))
    if mode == "RGBA":
        photo.putalpha(Image.linear_gradient("L").resize((width, height)))
    return photo.convert(mode)


def encoded(image: Image.Image, kind: str = "png", **settings) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned by 90 degrees
PICTURES = {
    "odd": encoded(picture("RGB", 53, 37)), "tall": encoded(picture("RGB", 31, 211)),
    "grey": encoded(picture("L", 97, 60)), "alpha": encoded(picture("RGBA", 45, 77)),
    "palette": encoded(picture("P", 45, 77)), "turned": encoded(picture("RGB", 80, 41), exif=EXIF),
    "grey, 16 bits": encoded(Image.fromarray((np.arange(48 * 61).reshape(48, 61) * 22).astype(np.uint16))),
}  # fmt: skip


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
    example = runpy.run_path(ROOT / "examples/serve/preprocess.py")["preprocess"]
    found = example(Image.open(io.BytesIO(PICTURES[name])), **ours.to_dict())
    expected = ours.batch([decode(PICTURES[name], name)])
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5  # a level is 0.017


def test_what_paddlex_cannot_prepare_is_said():
    assert paddlex_config("m", Preprocess((32, 32)), NAMES, "probabilities")[1] is None
    assert paddlex_config("m", Preprocess((32, 32)), NAMES, "logits") == ("", "it has no pipeline for logits")
    for preprocess in (Preprocess((32, 32), in_chans=1), Preprocess((32, 47), crop_keep_aspect=True)):
        text, reason = paddlex_config("m", preprocess, NAMES, "probabilities")
        assert text == "" and reason


@pytest.fixture(scope="module")
def folder(_runtime, tmp_path_factory):
    """An export whose scores depend strongly on the image."""
    model = ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)
    model.head.weight.set_value(20 * model.head.weight)
    path = tmp_path_factory.mktemp("export") / "served"
    preprocess = Preprocess((32, 32), crop_ratio=0.875, crop_keep_aspect=True)
    format = "both" if importlib.util.find_spec("paddle2onnx") else "paddle"
    report = ppattn.export(model, path, format=format, preprocess=preprocess, classes=NAMES)
    assert report["engine"] == "stock" and report["differences"].get("onnxruntime", 0) < 1e-5
    return path


@pytest.fixture
def both(folder):
    pytest.importorskip("paddle2onnx", reason="paddle2onnx has no wheel for this Python")
    return folder


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
    for one in (grey, grey[..., None], Image.fromarray(grey), Image.fromarray(grey.astype("uint16") * 257)):
        assert predictor.predict([one]) == predictor.predict(PICTURES["grey"])
    assert predictor.predict(iter([grey])) == predictor.predict(grey)
    cases = [(5, "a int"), (grey[0], r"uint8 \[97\]"), (grey / 255, "float64"), (b"x", "not a readable image")]
    cases += [(Image.open(io.BytesIO(PICTURES["grey"][:-60])), "not a readable image")]  # read when it is used
    for wrong, words in [*cases, (Image.new("F", (4, 4)), "32 bits"), (None, "a NoneType"), ([1], "a list")]:
        with pytest.raises(UserError, match=f"Image 2.*{words}"):
            predictor.predict([grey, wrong])
    with pytest.raises(UserError, match=r"Image 1.*a int"):
        predictor.predict(5)


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


@pytest.mark.slow
def test_the_service_answers_many_at_once_and_rejects_what_is_no_image(both):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    predictor = ppattn.Predictor(both)
    expected = {name: predictor.predict([decode(data, name)])[0] for name, data in PICTURES.items()}
    environment, command = os.environ | {"MODEL": str(both)}, [sys.executable, "-m", "uvicorn", "serve:app"]
    with serving(command, both, cwd=ROOT / "examples/serve", env=environment) as address:

        def post(data: bytes) -> requests.Response:
            return requests.post(f"{address}/predict", data)

        work = [*PICTURES] * 5
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda name: post(PICTURES[name]).json(), work)]
        for name, found in zip(work, answers, strict=True):
            assert [one["name"] for one in found] == [one for one, _ in expected[name]]
            assert np.allclose([one["score"] for one in found], [score for _, score in expected[name]], atol=1e-5)
        whole = PICTURES["odd"]
        assert post(b"no image").status_code == post(whole[: len(whole) // 2]).status_code == 400
        for kind in ("tiff", "ppm", "gif", "bmp", "webp"):
            damaged = bytearray(encoded(picture("RGB", 40, 30), kind))
            damaged[6:30] = bytes(24)
            for data in (bytes(damaged), bytes(damaged[: len(damaged) // 3])):
                assert post(data).status_code in (200, 400)
        assert post(encoded(Image.new("L", (1, 60_000)))).status_code == 200
        assert post(bytes(11 * 2**20)).status_code == 413 and post(whole).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(not PADDLEX.exists(), reason="bash scripts/setup.sh paddlex makes the environment with PaddleX")
def test_paddlex_gives_the_scores_of_predict(folder, tmp_path):
    files = {name: tmp_path / f"{name}.png" for name in PICTURES} | photos()
    for name, data in PICTURES.items():
        files[name].write_bytes(data)
    script, predictor = [PADDLEX, ROOT / "examples/paddlex/classify.py"], ppattn.Predictor(folder)
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
            body = {"image": base64.b64encode(path.read_bytes()).decode(), "topk": 5}
            found = requests.post(f"{address}/image-classification", json=body).json()["result"]["categories"]
            same([one["name"] for one in found], [one["score"] for one in found], expected[str(path)])


def same(names: list[str], scores: list[float], expected: list[tuple[str, float]]) -> None:
    """PaddleX rounds scores to five decimals; names with equal ones may swap."""
    assert dict(expected).keys() == set(names)
    for name, score in zip(names, scores, strict=True):
        assert abs(score - dict(expected)[name]) < 1e-5


@pytest.mark.slow
def test_engines_agree_and_bfloat16_is_coarser(both):
    paddle = ppattn.Predictor(both)
    assert (paddle.engine, paddle.format) == ("paddle", "both")
    for engine in ("onnxruntime", "openvino"):
        pytest.importorskip(engine)
        assert np.abs(ppattn.Predictor(both, engine=engine).run(X) - paddle.run(X)).max() < 1e-5
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return  # OpenVINO chooses bfloat16 by the processor, and fails where oneDNN may not use it
    assert np.abs(ppattn.Predictor(both, "bf16", engine="openvino").run(X) - paddle.run(X)).max() < 0.05


@pytest.mark.slow
def test_auto_takes_the_fastest_that_gives_the_golden_answer_and_remembers_it(both, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, told = ppattn.Predictor(both, engine="auto"), capsys.readouterr().err
    assert f"engine of {both}: {found.engine} (paddle " in told and "onnxruntime " in told
    assert np.abs(found.run(X) - ppattn.Predictor(both).run(X)).max() < 1e-5
    assert ppattn.Predictor(both, engine="auto").engine == found.engine and capsys.readouterr().err == ""

    def wrong(*arguments):
        run = original(*arguments)
        return lambda images: 0.5 * run(images)

    (tmp_path / "ppattn/engines.json").unlink()
    original = engines._paddle
    monkeypatch.setattr(engines, "_paddle", wrong)
    found = ppattn.Predictor(both, engine="auto")
    assert found.engine != "paddle" and "paddle" not in capsys.readouterr().err.partition("(")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"engine": "tensorrt"}, "Unknown engine"), ({"precision": "bf16"}, "cannot run bf16 with paddle"),
     ({"precision": "int8", "engine": "onnxruntime"}, "cannot run int8 with onnxruntime")],
)  # fmt: skip
def test_what_was_not_exported_does_not_run(both, arguments, words):
    with pytest.raises(UserError, match=words):
        ppattn.Predictor(both, **arguments)


@pytest.mark.slow
def test_a_program_that_writes_files_stays_closed(both, tmp_path):
    check_operators(both / "inference.json")
    program = json.loads((both / "inference.json").read_text())
    operators = program["program"]["regions"][0]["blocks"][0]["ops"]
    inner = {"regions": [{"blocks": [{"ops": [{"#": "1.save_combine"}]}]}]}
    for harmful in ({"#": "1.save_"}, {"#": "1.py_func"}, {"#": "1.while"} | inner, {"#": "1.add"} | inner):
        operators.append(harmful)
        (tmp_path / "inference.json").write_text(json.dumps(program))
        with pytest.raises(UserError, match="runs code .*(save|py_func)"):
            engines.open_engine(tmp_path, "plain")
        operators.pop()
    operators.append({"#": "9.an_operator_of_the_user"})
    (tmp_path / "inference.json").write_text(json.dumps(program))
    check_operators(tmp_path / "inference.json")
    (tmp_path / "inference.json").write_bytes(b"\x0a\x08program of Paddle 2")
    with pytest.raises(UserError, match="not a program of Paddle 3"):
        engines.open_engine(tmp_path, "plain")
