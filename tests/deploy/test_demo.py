"""The page that classifies in the browser, opened in Chromium: what `predict` says, the model's maps, and mistakes."""

import json
import re
import shutil
import tarfile
from contextlib import contextmanager

import cv2
import numpy as np
import paddle
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

import ppattn
from ppattn.analysis.maps import attention_calls
from ppattn.cli import main
from ppattn.data import Preprocess
from ppattn.deploy.demo import ONNX, PACKAGE, PAGE, RUNTIME, runtime_files, write_demo
from ppattn.errors import UserError
from tests.helpers.browser import browser, needs_browser, served

pytestmark = pytest.mark.slow
MODEL = "long_inline_deit_nano_cifar10"
ANSWER = "[...document.querySelectorAll('#classes li')].map(li => [li.dataset.name, +li.dataset.score])"
MESSAGE = "document.querySelector('#message').textContent"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The two files of ONNX Runtime Web in a folder."""
    pytest.importorskip("paddle2onnx")
    folder = tmp_path_factory.mktemp("runtime")
    try:
        files = runtime_files(None)
    except UserError as error:
        pytest.skip(f"the demo needs the npm package {PACKAGE}: {error}")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def page(runtime, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "page"
    assert main(["demo", "--model", MODEL, "--output", str(folder), "--runtime", str(runtime)]) == 0
    return folder


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium"), 390, 844) as opened:
        yield opened


def photos(folder):
    """Image files of several kinds and formats in the size of the model, so that the browser resizes none of them."""
    paths, turned = [], Image.Exif()
    turned[0x0112] = 6  # by 90 degrees
    for i, kind in enumerate(("png", "png", "jpg", "bmp", "webp")):
        image = Image.fromarray(load_sample_images().images[i % 2][100 + 40 * i :][:32, 200:232])
        paths.append(folder / f"{i}.{kind}")
        image.convert("L" if i == 1 else "RGB").save(paths[-1], **({"exif": turned} if kind == "jpg" else {}))
    return paths


@contextmanager
def opened(page, window):
    """The window with the page of a folder."""
    with served(page) as address:
        window.open(address)
        window.wait("!document.querySelector('main').hidden")
        yield window
        assert window.problems() == []


@needs_browser
def test_the_page_says_what_predict_says(page, window, tmp_path, capsys):
    images = photos(tmp_path)
    capsys.readouterr()
    assert main(["predict", "--model", MODEL, "--json", *map(str, images)]) == 0
    wanted = [json.loads(line)["predictions"] for line in capsys.readouterr().out.splitlines()]
    with opened(page, window):
        before = "[]"
        for file, expected in zip(images, wanted, strict=True):
            window.upload("#file", file)
            window.wait(f"JSON.stringify({ANSWER}) !== arguments[0]", before)
            names, scores = zip(*json.loads(before := window.run(f"return JSON.stringify({ANSWER})")), strict=True)
            assert [*names] == [best["name"] for best in expected], file
            assert [*scores] == pytest.approx([best["score"] for best in expected], abs=1e-4), file
        assert window.run("return document.documentElement.scrollWidth") == 390
        assert window.run("return document.querySelector('#time').textContent").endswith("attention maps included")


@needs_browser
def test_a_file_that_is_no_image_gets_a_sentence(page, window, tmp_path):
    (tmp_path / "notes.png").write_text("nothing to see")
    with opened(page, window):
        window.upload("#file", tmp_path / "notes.png")
        assert window.wait(MESSAGE) == "notes.png is not a picture that this browser can read."
        assert window.run("return document.querySelector('#message').className") == "", "grey is for waiting"
        assert window.run("return document.querySelector('.answer').hidden")


@needs_browser
def test_a_drawing_is_classified(page, window):
    with opened(page, window):
        window.point("#draw", [(0.5, 0.5)])
        window.point("#pad", [(0.2, 0.5), (0.8, 0.5)])
        window.wait(f"{ANSWER}.length")
        pixels = "document.querySelector('#picture').getContext('2d').getImageData(0, 0, 32, 32).data"
        grey = np.reshape(window.run(f"return [...{pixels}]"), (32, 32, 4))[..., 0]
        assert (grey[15:17, 8:24] == 255).all() and not grey[:10].any()


@needs_browser
def test_a_long_picture_of_another_size_is_classified(page, window, tmp_path):
    cv2.imwrite(str(tmp_path / "long.png"), np.full((30_000, 1, 3), 200, np.uint8))
    with opened(page, window):
        window.upload("#file", tmp_path / "long.png")
        window.wait(f"{ANSWER}.length")
        assert "may differ slightly from predict" in window.run("return document.querySelector('#footer').textContent")


MODELS = {
    "windows, shifted and padded, and a layer without a map": dict(name="swin_tiny", img_size=40, patch_size=4,
        attention=["softmax", ["inline", "vittt"]], embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=4),
    "a class token, and keys that lie on no grid": dict(name="deit_tiny", img_size=(16, 24), patch_size=4, depth=3,
        attention=["softmax", "polaformer", "linformer"], embed_dim=12, num_heads=2),
    "fewer keys than queries": dict(name="pvt_tiny", img_size=32, attention=["softmax", "soft"], embed_dims=[8, 12],
        depths=[1, 1], num_heads=[1, 2], mlp_ratios=[2, 2], sr_ratios=[4, 2]),
}  # fmt: skip


@needs_browser
@pytest.mark.parametrize("case", MODELS)
def test_the_map_of_the_clicked_patch_is_that_of_the_model(case, runtime, window, tmp_path):
    arguments = dict(MODELS[case])
    model = ppattn.create_model(arguments.pop("name"), num_classes=3, **arguments)
    model.eval()
    for parameter in model.parameters():  # maps of fresh weights are almost uniform
        parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
    preprocess, classes = Preprocess(model.img_size), ["a", "b", "</script>"]
    write_demo(model, tmp_path / "page", preprocess=preprocess, classes=classes, title="t", runtime=runtime)
    image = np.random.default_rng(0).integers(0, 256, (*model.img_size, 3)).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "image.png"), image[..., ::-1])
    lacking = {"windows": "ViTTTAttention is not linear in its values and has no attention map.",
               "a class": "The keys of linformer attention lie on no grid: there is no map to draw."}  # fmt: skip
    with opened(tmp_path / "page", window), attention_calls(model) as calls:
        model(paddle.to_tensor(preprocess(image)[None]))
        shown = [i for i, call in enumerate(calls) if type(call.block.attn).__name__[:5] not in ("ViTTT", "Linfo")]
        assert window.run("return document.querySelector('#remark').textContent") == lacking.get(case[:7], "")
        window.upload("#file", tmp_path / "image.png")
        window.wait(f"{ANSWER}.length")
        assert window.run("return +document.querySelector('#layers').max") == len(shown) - 1
        for place in ((0.1, 0.1), (0.6, 0.9)):
            window.point("#map", [place])
            for position, i in enumerate(shown):
                window.run(f"const e = document.querySelector('#layers'); e.value = {position}; e.oninput()")
                assert window.run("return document.querySelector('#layer').textContent").startswith(f"Layer {i + 1}:")
                found = calls[i].layer_map()
                wanted = found.query(int(place[1] * found.hw[0]), int(place[0] * found.hw[1]))
                weights = json.loads(window.run("return document.querySelector('#map').dataset.weights"))
                np.testing.assert_allclose(np.reshape(weights, wanted.shape), wanted, atol=1e-5 * abs(wanted).max())
                ends = window.run("return [...document.querySelectorAll('#scale output')].map(end => +end.value)")
                reach = wanted.size * abs(wanted - wanted.mean()).max() * np.array([-1, 1])
                np.testing.assert_allclose(ends, wanted.sum() + reach, rtol=0.06, atol=1e-3)


def test_the_folder_holds_the_page_and_is_replaced(page, runtime, refused):
    assert {path.name for path in page.iterdir()} == {PAGE, ONNX, *RUNTIME}
    assert "http" not in re.sub(r"<code>.*?</code>", "", (page / PAGE).read_text())  # no foreign server
    said = refused("demo", "--model", MODEL, "--output", runtime.parent, "--runtime", runtime)
    assert "holds something that is no demo" in said


def test_several_labels_have_sigmoids_and_four_channels_no_page(runtime, tmp_path):
    facts = {"preprocess": Preprocess((32, 32)), "classes": ["a", "b"], "title": "x", "runtime": runtime}
    model = ppattn.create_model("deit_nano", num_classes=2)
    write_demo(model, tmp_path / "page", **facts, sigmoid=True)
    model.eval()
    images = np.random.default_rng(0).standard_normal((1, 3, 32, 32), "float32")
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "page" / ONNX)
    found, *_ = session.run(None, {session.get_inputs()[0].name: images})
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-model(paddle.to_tensor(images)).numpy())), atol=1e-5)
    with pytest.raises(UserError, match="1 or 3 channels"):
        write_demo(ppattn.create_model("deit_nano", in_chans=4), tmp_path / "four", **facts)


def test_where_the_package_comes_from(runtime, tmp_path, monkeypatch):
    wanted, installed = runtime_files(runtime), tmp_path / "node_modules" / PACKAGE / "dist"
    shutil.copytree(runtime, installed)
    with tarfile.open(tmp_path / "packed.tgz", "w:gz") as tar:
        tar.add(installed, "package/dist")
    assert runtime_files(tmp_path) == runtime_files(tmp_path / "packed.tgz") == wanted
    (tmp_path / "no.tgz").write_text("nothing")
    for given, words in ((tmp_path / "no.tgz", "npm package"), (tmp_path / "node_modules", "does not hold ort.")):
        with pytest.raises(UserError, match=words):
            runtime_files(given)
    monkeypatch.setenv("PPATTN_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9/")
    with pytest.raises(UserError, match=r"127.0.0.1:9/onnxruntime-web/-/.*refused.*npm pack .* --runtime"):
        runtime_files(None)
