"""Published weights from a server on the loopback address: broken transfers, wrong files, mirrors, the cache.

The addresses in models.yaml lead out of this machine and are not tried.
"""

import hashlib
import http.server
import json
import re
import threading
import zlib
from pathlib import Path

import cv2
import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights, zoo
from ppattn.cli import main
from ppattn.config import make_config
from ppattn.data import Preprocess
from ppattn.errors import UserError
from ppattn.files.download import fetch
from ppattn.trained import open_weights

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "foreign"
FILE = (FOLDER / "timm_deit.pth").read_bytes()
DIGEST = hashlib.sha256(FILE).hexdigest()
PIECE = 40_000  # bytes after which a broken transfer breaks


class Handler(http.server.BaseHTTPRequestHandler):
    """/whole.pth; /broken.pth breaks off; /stubborn.pth does, and knows no ranges; /page.pth is HTML; /half.pth;

    /changing.pth breaks off and is another file at every request; /odd.pth has text for a length.
    """

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        name = self.path.strip("/").split("?")[0]
        if name == "page.pth":
            return self.answer(200, b"<html>sign in</html>", "text/html; charset=utf-8")
        if name == "odd.pth":
            return self.answer(200, FILE, length="many")
        if name == "changing.pth":
            version = f'"{min(len(self.server.asked), 2)}"'
            body = FILE if version == '"2"' else bytes(len(FILE))
            if self.headers.get("Range") and self.headers.get("If-Range") == version:
                return self.answer(206, body[PIECE:], version=version)
            return self.answer(200, body[: PIECE if version == '"1"' else None], length=len(body), version=version)
        if name == "half.pth":
            return self.answer(200, FILE[: len(FILE) // 2])
        if name not in ("whole.pth", "broken.pth", "stubborn.pth", "file"):
            return self.send_error(404)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and name != "stubborn.pth" else 0
        if start >= len(FILE):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(FILE)}")
            return self.end_headers()
        piece = FILE[start : start + PIECE] if name in ("broken.pth", "stubborn.pth") else FILE[start:]
        return self.answer(206 if start else 200, piece, length=len(FILE) - start)

    def answer(self, code, body, kind="application/octet-stream", length=None, version=None):
        self.send_response(code)
        if version:
            self.send_header("ETag", version)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.asked = []
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        httpd.address = f"http://127.0.0.1:{httpd.server_port}/"
        yield httpd
        httpd.shutdown()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PPATTN_MIRROR", raising=False)
    return tmp_path / "cache"


def publish(monkeypatch, **weights) -> dict:
    """A model of the zoo whose weights are the fixture's; returns what its library says about it."""
    about = json.loads((FOLDER / "timm_deit.json").read_text())
    entry = zoo.Entry("deit_test", "deit", about["arguments"], 50.0, "nowhere", weights=weights, variant=True)
    monkeypatch.setitem(zoo.entries(), "deit_test", entry)
    return about


def close(model, about) -> bool:
    model.eval()
    images = np.random.RandomState(32).standard_normal((2, 3, 32, 32)).astype("float32")
    expected = np.array(about["logits"])
    with paddle.no_grad():
        return np.abs(model(paddle.to_tensor(images)).numpy() - expected).max() < 1e-5 * np.abs(expected).max()


def test_weights_are_downloaded_converted_and_kept(server, cache, monkeypatch, capsys):
    about = publish(monkeypatch, url=f"{server.address}whole.pth", sha256=DIGEST[:8])
    assert close(ppattn.create_model("deit_test", pretrained=True), about)
    assert "deit_test: whole.pth" in capsys.readouterr().err  # the progress bar
    assert [path.name for path in cache.iterdir()] == ["deit_test.safetensors"]
    server.shutdown()
    assert close(ppattn.create_model("deit_test", pretrained=True), about), "the second time there is no transfer"
    assert len(server.asked) == 1 and "deit_test" in ppattn.list_models(pretrained=True)


def test_other_classes_get_a_new_head_and_other_sizes_a_resized_table(server, cache, monkeypatch):
    about = publish(monkeypatch, url=f"{server.address}whole.pth")
    model = ppattn.create_model("deit_test", pretrained=True, num_classes=3, img_size=48)
    whole = ppattn.create_model("deit_test", pretrained=True)
    assert model.head.weight.shape == [24, 3] and model.pos_embed.shape == [1, 37, 24]
    assert np.array_equal(model.blocks[0].mlp.fc1.weight.numpy(), whole.blocks[0].mlp.fc1.weight.numpy())
    bare = ppattn.create_model("deit_test", pretrained=True, num_classes=0)
    assert close(whole, about) and "head.weight" not in bare.state_dict()
    with pytest.raises(UserError, match="exclude each other"):
        ppattn.create_model("deit_test", pretrained=True, weights=cache / "deit_test")


def test_a_broken_transfer_is_resumed(server, cache, monkeypatch):
    about = publish(monkeypatch, url=f"{server.address}broken.pth", sha256=DIGEST)
    assert close(ppattn.create_model("deit_test", pretrained=True), about)
    assert [asked for _, asked in server.asked] == [None, f"bytes={PIECE}-", f"bytes={2 * PIECE}-"]


def test_a_transfer_that_never_ends_well_leaves_nothing_under_the_name(server, cache, monkeypatch):
    publish(monkeypatch, url=f"{server.address}stubborn.pth")
    with pytest.raises(UserError, match="broke off 5 times.*convert it: `ppattn convert --model deit_test"):
        ppattn.create_model("deit_test", pretrained=True)
    assert all(path.suffix == ".part" for path in cache.iterdir())


def test_the_next_call_goes_on_where_the_last_one_ended(server, tmp_path):
    url, known = f"{server.address}broken.pth", ("sha256", DIGEST)
    (whole := fetch([url], tmp_path / "a.pth", "it", known)).rename(tmp_path / "b.pth")
    part = f".a.pth.{zlib.crc32(url.encode()):08x}.part"
    (tmp_path / part).write_bytes(FILE[:70_001])
    server.asked.clear()
    assert fetch([url], tmp_path / "a.pth", "it", known) == whole and whole.read_bytes() == FILE
    assert server.asked[0][1] == "bytes=70001-"
    for rest in (b"", b"x"):  # all of it, under its temporary name, or more than the file has now
        (tmp_path / part).write_bytes(FILE + rest)
        whole.unlink()
        assert fetch([url], tmp_path / "a.pth", "it", known).read_bytes() == FILE


@pytest.mark.parametrize(("name", "ranges"), [("changing.pth", [None, f"bytes={PIECE}-"]), ("odd.pth", [None])])
def test_a_file_that_changes_during_the_transfer_or_has_no_length_is_fetched_whole(server, tmp_path, name, ranges):
    assert fetch([f"{server.address}{name}"], tmp_path / "a.pth", "it").read_bytes() == FILE
    assert [asked for _, asked in server.asked] == ranges


def test_without_a_digest_an_old_part_is_not_resumed(server, tmp_path):
    url = f"{server.address}whole.pth"
    (tmp_path / f".a.pth.{zlib.crc32(url.encode()):08x}.part").write_bytes(bytes(PIECE))
    assert fetch([url], tmp_path / "a.pth", "it").read_bytes() == FILE


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:port/w.pth", "nowhere/w.pth", "http://127.0.0.1:9/wäß.pth", "http://", "http://[bad/w.pth"],
)
def test_an_address_that_is_none_is_an_error(url, tmp_path):
    with pytest.raises(UserError, match="it cannot be downloaded"):
        fetch([url], tmp_path / "a.pth", "it")


def test_a_kept_file_is_compared_with_its_digest(server, tmp_path):
    url, known = f"{server.address}whole.pth", ("sha256", DIGEST)
    for content in (b"cut by a power failure", FILE):
        (tmp_path / "a.pth").write_bytes(content)
        assert fetch([url], tmp_path / "a.pth", "it", known).read_bytes() == FILE
    assert len(server.asked) == 1, "the second one was as it should be"


def test_a_file_of_a_mirror_must_have_the_published_digest(cache, monkeypatch, tmp_path):
    publish(monkeypatch, url="http://127.0.0.1:9/releases/whole.pth", sha256=DIGEST[:8])
    (tmp_path / "whole.pth").write_bytes(FILE + b"x")
    monkeypatch.setenv("PPATTN_MIRROR", str(tmp_path))
    with pytest.raises(UserError, match="wrong checksum"):
        ppattn.create_model("deit_test", pretrained=True)
    (tmp_path / "whole.pth").write_bytes(FILE)
    assert ppattn.create_model("deit_test", pretrained=True).name == "deit_test"


@pytest.mark.parametrize(
    ("file", "digest", "words"),
    [("whole.pth", "0123", "wrong checksum, sha256 should begin with 0123"), ("nothing.pth", "", "Not Found"),
     ("page.pth", "", "a web page, not the file"),
     ("half.pth", "", "half.pth is damaged or not a complete weights file")],
)  # fmt: skip
def test_what_is_not_the_file_is_refused_and_not_kept(server, cache, monkeypatch, file, digest, words):
    publish(monkeypatch, url=f"{server.address}{file}", **({"sha256": digest} if digest else {}))
    with pytest.raises(UserError, match=words):
        ppattn.create_model("deit_test", pretrained=True)
    assert not list(cache.iterdir())


def test_weights_of_another_model_are_not_kept(server, cache, monkeypatch):
    publish(monkeypatch, url=f"{server.address}whole.pth")
    entry = zoo.entry("deit_test")
    entry.arguments["depth"] = 3
    with pytest.raises(UserError, match="looks like a DeiT of the authors or timm with 24 channels and 2 blocks, but"):
        ppattn.create_model("deit_test", pretrained=True)
    assert not list(cache.iterdir())


def test_a_mirror_or_a_folder_takes_the_place_of_the_address(server, cache, monkeypatch, tmp_path):
    about = publish(monkeypatch, url="http://127.0.0.1:9/releases/whole.pth")
    with pytest.raises(UserError, match="127.0.0.1:9"):
        ppattn.create_model("deit_test", pretrained=True)
    monkeypatch.setenv("PPATTN_MIRROR", server.address)
    assert close(ppattn.create_model("deit_test", pretrained=True), about)
    (cache / "deit_test.safetensors").unlink()
    monkeypatch.setenv("PPATTN_MIRROR", str(tmp_path / "files"))
    with pytest.raises(UserError, match="No such file or directory"):
        ppattn.create_model("deit_test", pretrained=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/whole.pth").write_bytes(FILE)
    assert close(ppattn.create_model("deit_test", pretrained=True), about)
    assert (tmp_path / "files/whole.pth").exists()


def test_an_address_without_a_file_name_takes_that_of_the_model(server, cache, monkeypatch, capsys):
    about = publish(monkeypatch, url=f"{server.address}file?dl=1")
    assert close(ppattn.create_model("deit_test", pretrained=True), about)
    assert "deit_test: deit_test.pth" in capsys.readouterr().err


def test_training_starts_from_pretrained_weights(server, cache, monkeypatch, tmp_path, capsys):
    publish(monkeypatch, url=f"{server.address}whole.pth")
    yaml = "model: {name: deit_test, img_size: 32, weights: pretrained}\ntrain: {epochs: 1, max_steps: 1}\n"
    (tmp_path / "c.yaml").write_text(f"{yaml}output: {tmp_path}/run\n")
    assert main("train", ["-c", str(tmp_path / "c.yaml")]) == 2  # the digits have ten classes
    assert "-o model.reset_head=true" in capsys.readouterr().err
    assert main("train", ["-c", str(tmp_path / "c.yaml"), "-o", "model.reset_head=true"]) == 0
    log = (tmp_path / "run/log.txt").read_text()
    assert "30 tensors loaded from" in log and "left at initial values: head.weight" in log


def test_a_name_brings_its_preprocessing_and_constants(cache, tmp_path, capsys):
    """The file stands for the published one; the recipe of DeiT evaluates a central crop, by its authors' code."""
    images = paddle.to_tensor(np.random.RandomState(0).standard_normal((2, 3, 64, 64)).astype("float32"))
    model = ppattn.create_model("deit_tiny", img_size=64, norm_eps=1e-3)
    model.eval()
    facts = {"name": "deit_tiny", "img_size": [64, 64], "norm_eps": 1e-3}
    weights.save(cache / "deit_tiny.safetensors", model.state_dict(), {"config": {"model": facts}})
    _, loaded, classes, preprocess = ppattn.load_run("deit_tiny")
    with paddle.no_grad():
        assert np.array_equal(loaded(images).numpy(), model(images).numpy())
    assert preprocess == Preprocess(64, crop_ratio=0.875, crop_keep_aspect=True, interpolation="bicubic")
    assert classes[0] == "tench" and len(classes) == 1000
    cv2.imwrite(str(tmp_path / "picture.png"), np.full((70, 90, 3), 128, np.uint8))
    assert main(["predict", "--model", "deit_tiny", str(tmp_path / "picture.png"), "--topk", "1"]) == 0
    assert re.fullmatch(r"\S+picture.png  [a-z]\D+ 0\.\d{3}\n", capsys.readouterr().out, re.IGNORECASE)


def test_eval_and_export_take_over_the_constants_of_a_converted_file(tmp_path):
    shape = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3}
    model = ppattn.create_model("deit_tiny", **shape, num_classes=10, norm_eps=1e-3)
    model.eval()
    metadata = {"config": {"model": {"name": "deit_tiny", **shape, "num_classes": 10, "norm_eps": 1e-3}}}
    weights.save(tmp_path / "w.safetensors", model.state_dict(), metadata)
    images = paddle.to_tensor(np.random.RandomState(0).standard_normal((2, 3, 8, 8)).astype("float32"))
    told = make_config({"model": {"name": "deit_tiny", **shape}, "data": {"name": "digits"}})
    for loaded in (open_weights(told, tmp_path / "w")[0].model, ppattn.load_run(tmp_path / "w")[1]):
        with paddle.no_grad():
            assert np.array_equal(loaded(images).numpy(), model(images).numpy())


def test_models_without_an_address_say_what_to_do():
    with pytest.raises(UserError, match=r"fudan-zvg/SOFT.*`ppattn convert --model soft_tiny --from FILE"):
        ppattn.create_model("soft_tiny", pretrained=True)
    with pytest.raises(UserError, match="No published weights of lavit_tiny are known"):
        ppattn.create_model("lavit_tiny", pretrained=True)


def test_the_table_of_weights_is_complete_in_its_facts():
    known = set(ppattn.list_models(pretrained=True))
    assert {"deit_tiny", "swin_base", "pvt_large", "pvt_v2_b5", "inline_swin_base"} <= known
    assert "soft_tiny" not in ppattn.list_models(pretrained=True)
    for name, row in zoo.entries().items():
        assert not row.weights or row.weights.keys() <= {"url", "sha256", "licence", "page", "file"}, name
        assert "url" not in row.weights or (row.weights["url"].startswith("https://") and row.weights["licence"]), name
        assert "sha256" not in row.weights or row.weights["sha256"] in row.weights["url"], name
