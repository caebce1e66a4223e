"""Published weights from a server on the loopback address: broken transfers, wrong files, mirrors, the cache.

The addresses in models.yaml lead out of this machine and are not tried.
"""

import hashlib
import http.server
import re
import threading
import zlib

import cv2
import numpy as np
import pytest

import ppattn
from ppattn import weights, zoo
from ppattn.cli import main
from ppattn.data import Preprocess
from ppattn.errors import UserError
from ppattn.files.download import fetch
from tests.helpers.foreign import agree, facts, images_of, small_deit, source

pytestmark = pytest.mark.slow

FILE = source("timm_deit").read_bytes()
DIGEST = hashlib.sha256(FILE).hexdigest()
PIECE = 40_000  # bytes after which a broken transfer breaks


class Handler(http.server.BaseHTTPRequestHandler):
    """/whole.pth; /broken.pth breaks off; /stubborn.pth does, and knows no ranges; /page.pth is HTML; /half.pth;

    /changing.pth breaks off and is another file at the next request; /odd.pth has text for a length.
    """

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        name, body, kind = self.path.strip("/").split("?")[0], FILE, "application/octet-stream"
        broken = name in ("broken.pth", "stubborn.pth")
        if name == "page.pth":
            body, kind = b"<html>sign in</html>", "text/html; charset=utf-8"
        elif name == "half.pth":
            body = FILE[: len(FILE) // 2]
        elif name == "changing.pth" and len(self.server.asked) == 1:
            body, broken = bytes(len(FILE)), True
        elif name not in ("whole.pth", "broken.pth", "stubborn.pth", "changing.pth", "odd.pth", "file"):
            return self.send_error(404)
        tag = f'"{zlib.crc32(body)}"'
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and name != "stubborn.pth" and self.headers.get("If-Range", tag) == tag else 0
        if start >= len(body):
            self.send_response(416)
            return self.end_headers()
        self.send_response(206 if start else 200)
        if name == "changing.pth":
            self.send_header("ETag", tag)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", "many" if name == "odd.pth" else str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : start + PIECE] if broken else body[start:])

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


def pretrained(**arguments):
    return ppattn.create_model("small_deit", pretrained=True, **arguments)


def is_the_published_one(model) -> bool:
    model.eval()
    return agree(model(images_of(32, 2, 3, 32, 32)), facts("timm_deit")["logits"])


def test_weights_are_downloaded_converted_and_kept(server, cache, monkeypatch, capsys):
    small_deit(monkeypatch, url=f"{server.address}whole.pth", sha256=DIGEST[:8])
    assert is_the_published_one(pretrained())
    assert "small_deit: whole.pth" in capsys.readouterr().err  # the progress bar
    assert [path.name for path in cache.iterdir()] == ["small_deit.safetensors"]
    server.shutdown()
    assert is_the_published_one(ppattn.create_model("small_deit", weights="pretrained")), "there is no second transfer"
    assert len(server.asked) == 1 and "small_deit" in ppattn.list_models(pretrained=True)
    model = pretrained(num_classes=3, img_size=48)
    assert model.head.weight.shape == [24, 3] and model.pos_embed.shape == [1, 37, 24]
    assert np.array_equal(model.blocks[0].mlp.fc1.weight.numpy(), pretrained().blocks[0].mlp.fc1.weight.numpy())
    assert "head.weight" not in pretrained(num_classes=0).state_dict()
    with pytest.raises(UserError, match="exclude each other"):
        pretrained(weights=cache / "small_deit")


@pytest.mark.parametrize(
    ("name", "known", "ranges"),
    [("broken.pth", ("sha256", DIGEST), [None, f"bytes={PIECE}-", f"bytes={2 * PIECE}-"]),
     ("changing.pth", None, [None, f"bytes={PIECE}-"]), ("odd.pth", None, [None])],
)  # fmt: skip
def test_a_file_is_whole_whatever_happens_during_the_transfer(server, tmp_path, name, known, ranges):
    """It breaks off and is resumed, changes meanwhile, or has no length."""
    assert fetch([f"{server.address}{name}"], tmp_path / "a.pth", "it", known).read_bytes() == FILE
    assert [asked for _, asked in server.asked] == ranges


def test_a_transfer_that_never_ends_well_leaves_nothing_under_the_name(server, cache, monkeypatch):
    small_deit(monkeypatch, url=f"{server.address}stubborn.pth")
    with pytest.raises(UserError, match="broke off 5 times.*convert it: `ppattn convert --model small_deit"):
        pretrained()
    assert all(path.suffix == ".part" for path in cache.iterdir())


def test_the_next_call_goes_on_where_the_last_one_ended_and_compares_the_digest(server, tmp_path):
    url, target = f"{server.address}broken.pth", tmp_path / "a.pth"
    part = tmp_path / f".a.pth.{zlib.crc32(url.encode()):08x}.part"
    for content in (FILE[:70_001], FILE, FILE + b"x"):  # all of it, or more than the file has now, under that name
        target.unlink(missing_ok=True)
        part.write_bytes(content)
        assert fetch([url], target, "it", ("sha256", DIGEST)).read_bytes() == FILE
    assert server.asked[0][1] == "bytes=70001-"
    server.asked.clear()
    assert fetch([url], target, "it", ("sha256", DIGEST)) and not server.asked, "it is as it should be"
    target.write_bytes(b"cut by a power failure")
    assert fetch([url], target, "it", ("sha256", DIGEST)).read_bytes() == FILE
    target.unlink()
    part.write_bytes(bytes(70_001))  # another version, which no digest would show
    assert fetch([url], target, "it").read_bytes() == FILE


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:port/w.pth", "nowhere/w.pth", "http://127.0.0.1:9/wäß.pth", "http://", "http://[bad/w.pth"],
)
def test_an_address_that_is_none_is_an_error(url, tmp_path):
    with pytest.raises(UserError, match="it cannot be downloaded"):
        fetch([url], tmp_path / "a.pth", "it")


@pytest.mark.parametrize(
    ("file", "digest", "words"),
    [("whole.pth", "0123", "wrong checksum, sha256 should begin with 0123"), ("nothing.pth", "", "Not Found"),
     ("page.pth", "", "a web page, not the file"),
     ("half.pth", "", "half.pth is damaged or not a complete weights file")],
)  # fmt: skip
def test_what_is_not_the_file_is_refused_and_not_kept(server, cache, monkeypatch, file, digest, words):
    small_deit(monkeypatch, url=f"{server.address}{file}", **({"sha256": digest} if digest else {}))
    with pytest.raises(UserError, match=words):
        pretrained()
    assert not list(cache.iterdir())


@pytest.mark.parametrize("by_hand", [[], ["whole.pth"]])  # these files are the user's
def test_weights_of_another_model_are_not_kept(server, cache, monkeypatch, by_hand):
    zoo.model_entry(small_deit(monkeypatch, url=f"{server.address}whole.pth")).arguments["depth"] = 3
    cache.mkdir()
    for name in by_hand:
        (cache / name).write_bytes(FILE)
    with pytest.raises(UserError, match="looks like a DeiT of the authors or timm with 24 channels and 2 blocks, but"):
        pretrained()
    assert [path.name for path in cache.iterdir()] == by_hand


def test_a_mirror_or_a_folder_takes_the_place_of_the_address(server, cache, monkeypatch, tmp_path):
    small_deit(monkeypatch, url="http://127.0.0.1:9/releases/whole.pth", sha256=DIGEST[:8])
    with pytest.raises(UserError, match="127.0.0.1:9"):
        pretrained()
    monkeypatch.setenv("PPATTN_MIRROR", server.address)
    assert is_the_published_one(pretrained())
    (cache / "small_deit.safetensors").unlink()
    (tmp_path / "whole.pth").write_bytes(FILE + b"x")
    for folder, words in ((tmp_path / "none", "No such file or directory"), (tmp_path, "wrong checksum")):
        monkeypatch.setenv("PPATTN_MIRROR", str(folder))
        with pytest.raises(UserError, match=words):
            pretrained()
    (tmp_path / "whole.pth").write_bytes(FILE)
    assert is_the_published_one(pretrained()) and (tmp_path / "whole.pth").exists()


def test_an_address_without_a_file_name_takes_that_of_the_model(server, cache, monkeypatch, capsys):
    small_deit(monkeypatch, url=f"{server.address}file?dl=1")
    assert is_the_published_one(pretrained()) and "small_deit: small_deit.pth" in capsys.readouterr().err


def test_training_starts_from_pretrained_weights(server, cache, monkeypatch, tmp_path, capsys):
    small_deit(monkeypatch, url=f"{server.address}whole.pth")
    yaml = "model: {name: small_deit, img_size: 32, weights: pretrained}\ntrain: {epochs: 1, max_steps: 1}\n"
    (tmp_path / "c.yaml").write_text(f"{yaml}output: {tmp_path}/run\n")
    assert main("train", ["-c", str(tmp_path / "c.yaml")]) == 2  # the digits have ten classes
    assert "-o model.reset_head=true" in capsys.readouterr().err
    assert main("train", ["-c", str(tmp_path / "c.yaml"), "-o", "model.reset_head=true"]) == 0
    log = (tmp_path / "run/log.txt").read_text()
    assert "30 tensors loaded from" in log and "left at initial values: head.weight" in log


def test_a_name_brings_its_preprocessing_and_constants(cache, tmp_path, capsys):
    """The file stands for the published one; the recipe of DeiT evaluates a central crop, by its authors' code."""
    images, model = images_of(0, 2, 3, 64, 64), ppattn.create_model("deit_tiny", img_size=64, norm_eps=1e-3)
    model.eval()
    facts = {"name": "deit_tiny", "img_size": [64, 64], "norm_eps": 1e-3}
    weights.save(cache / "deit_tiny.safetensors", model.state_dict(), {"config": {"model": facts}})
    _, loaded, classes, preprocess = ppattn.load_run("deit_tiny")
    assert np.array_equal(loaded(images).numpy(), model(images).numpy())
    assert preprocess == Preprocess(64, crop_ratio=0.875, crop_keep_aspect=True, interpolation="bicubic")
    assert classes[0] == "tench" and len(classes) == 1000
    cv2.imwrite(str(tmp_path / "picture.png"), np.full((70, 90, 3), 128, np.uint8))
    assert main(["predict", "--model", "deit_tiny", str(tmp_path / "picture.png"), "--topk", "1"]) == 0
    assert re.fullmatch(r"\S+picture.png  [a-z]\D+ 0\.\d{3}\n", capsys.readouterr().out, re.IGNORECASE)


def test_models_without_an_address_say_what_to_do():
    with pytest.raises(UserError, match=r"fudan-zvg/SOFT.*`ppattn convert --model soft_tiny --from FILE"):
        ppattn.create_model("soft_tiny", pretrained=True)
    with pytest.raises(UserError, match="No published weights of lavit_tiny are known"):
        ppattn.create_model("lavit_tiny", pretrained=True)


def test_the_table_of_weights_is_complete_in_its_facts():
    known = set(ppattn.list_models(pretrained=True))
    assert {"deit_tiny", "swin_base", "pvt_large", "pvt_v2_b5", "inline_swin_base"} <= known
    assert "soft_tiny" not in ppattn.list_models(pretrained=True)
    for name, row in zoo.model_entries().items():
        assert not row.weights or row.weights.keys() <= {"url", "sha256", "licence", "page", "file"}, name
        assert "url" not in row.weights or (row.weights["url"].startswith("https://") and row.weights["licence"]), name
        assert "sha256" not in row.weights or row.weights["sha256"] in row.weights["url"], name
