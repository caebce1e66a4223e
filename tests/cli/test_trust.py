"""Odd places and interruptions: nothing of strangers runs, nothing half done stays, and every answer is a sentence."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ppattn
from ppattn import weights
from ppattn.engine import trainer
from ppattn.errors import UserError
from ppattn.files.cache import cache_folder
from tests.helpers.data_sets import write_image
from tests.helpers.runs import full_disk, read_json, tiny

ROOT = Path(__file__).resolve().parents[2]
POISON = ("random", "statistics", "argparse", "secrets", "numpy", "paddle", "onnxruntime", "tqdm", "scripts", "tools")


def run(*command, folder=ROOT, **variables) -> tuple[int, str]:
    """Exit code and stderr of this copy of the package in a process of its own; None removes a variable."""
    given = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    environment = {name: value for name, value in given.items() if value is not None}
    call = [sys.executable, *map(str, command)]
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def model():
    return ppattn.create_model("deit_nano", img_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=3)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trust") / "exported"
    ppattn.export(model, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["TOOLS/predict.py --model EXPORTED a.png", "-m ppattn export --run inline_deit_nano_cifar10 --output again",
     "-m ppattn benchmark --models deit_nano --sizes 16 --batch 1 --rounds 1 --seconds 0.01 --output bench"],
    ids=lambda command: command.split(" --")[0],
)  # fmt: skip
def test_modules_of_the_current_folder_do_not_run(exported, tmp_path, command):
    for name in POISON:
        (tmp_path / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\n")
    write_image(tmp_path / "a.png", 0, (9, 9, 3))
    command = command.replace("TOOLS", str(ROOT / "tools")).replace("EXPORTED", str(exported))
    code, errors = run(*command.split(), folder=tmp_path)
    assert code == 0 and not (tmp_path / "ran").exists(), errors


@pytest.mark.slow
def test_a_stopped_export_leaves_neither_folder_nor_process(tmp_path):
    call = ["-m", "ppattn", "export", "--run", "inline_deit_nano_cifar10", "--output", str(tmp_path / "new/it")]
    with subprocess.Popen([sys.executable, *call], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        runtimes = ["pgrep", "-f", f"ppattn.deploy.engines {tmp_path}"]  # they are being tried
        while process.poll() is None and subprocess.run(runtimes, stdout=subprocess.DEVNULL).returncode:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1 and process.stderr.read().endswith("interrupted\n")
    assert [*(tmp_path / "new").iterdir()] == [] and subprocess.run(["pgrep", "-f", str(tmp_path)]).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [3000, 30_000])
def test_a_disk_that_fills_during_an_export_is_told(model, tmp_path, limit):
    with full_disk(limit), pytest.raises(UserError, match=r"Cannot write .*new/it: the disk is full\."):
        ppattn.export(model, tmp_path / "new/it")
    assert [*(tmp_path / "new").iterdir()] == []


def test_a_release_that_is_killed_while_it_writes_leaves_the_old_list(tmp_path, monkeypatch):
    from scripts import release_weights

    (tmp_path / "models.yaml").write_text("{}\n")
    monkeypatch.setattr(release_weights.table, "RELEASED", tmp_path / "models.yaml")
    monkeypatch.setattr(Path, "replace", lambda *_: sys.exit(9))
    with pytest.raises(SystemExit):
        release_weights.add_entry("new", tiny(tmp_path / "run"), 10, "new.safetensors")
    assert (tmp_path / "models.yaml").read_text() == "{}\n"


UNKNOWN_USER = """
import os, pwd, sys
if not os.environ.get("HOME"):
    pwd.getpwuid = {}.__getitem__
from ppattn.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_a_user_without_a_home(exported, tmp_path, home):
    """What libraries keep at home goes to a private folder, not to the current one."""
    write_image(tmp_path / "a.png", 0, (9, 9, 3))
    own = tmp_path / f"tmp/ppattn-{os.geteuid()}"
    own.mkdir(0o700, parents=True)
    for library in cache_folder().glob("native-*.so"):  # or they would be compiled, which takes minutes
        shutil.copy(library, own)
    config = "-o model.img_size=16 model.depth=1 train.epochs=1 train.max_steps=1"
    predict, train = f"predict --model {exported} a.png", f"train -c digits/inline_deit_nano {config} output=run"
    odd = {"folder": tmp_path, "HOME": home, "XDG_CACHE_HOME": None, "TMPDIR": str(tmp_path / "tmp")}
    code, errors = run("-c", UNKNOWN_USER, *(predict if home else train).split(), **odd)
    assert code == 0 and "Traceback" not in errors and "temporary cache" not in errors, errors
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "tmp"} | (set() if home else {"run"})
    assert own.stat().st_mode & 0o777 == 0o700
    if home:
        own.chmod(0o777)
        code, errors = run("-c", UNKNOWN_USER, "predict", "--run", "vittt_tiny", "a.png", **odd)
        assert code == 2 and "error: " in errors and "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trust") / "run"
    trainer.train(tiny(folder, train={"max_steps": 2, "log_every": 1}))
    return folder


OTHER = "it.safetensors is "
EDITS = {
    "no data": (lambda about: about.pop("data"), OTHER),
    "no config": (lambda about: about.pop("config"), "Cannot resume: "),
    "no layout": (lambda about: about.pop("layout"), "was written by another version of ppattn, which alone can"),
}


def resume(trained, folder, tensors, metadata) -> list[str]:
    """The call that resumes a run from this state."""
    weights.save(folder / "it.safetensors", tensors, metadata)
    config = ["-c", trained / "config.yaml", "-o", f"output={folder / 'run'}", "train.max_steps=4"]
    return ["train", *config, "--resume", folder / "it.safetensors"]


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_with_another_content_and_a_right_seal(trained, edit, tmp_path, refused):
    tensors, metadata = weights.read(trained / "checkpoints/latest")
    change, words = EDITS[edit]
    change(metadata)
    assert words in refused(*resume(trained, tmp_path, tensors, metadata))


@pytest.mark.parametrize("name", ["optimizer/head.weight/velocity", "head.weight"])
@pytest.mark.parametrize("shape", [None, (2, 3)])
def test_a_state_with_other_tensors(trained, name, shape, tmp_path, refused):
    tensors, metadata = weights.read(trained / "checkpoints/latest")
    del tensors[name]
    tensors |= {name: np.zeros(shape, "float32")} if shape else {}
    message = refused(*resume(trained, tmp_path, tensors, metadata))
    assert name.partition("/")[0] in message and "Traceback" not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("source", {"config": [1]}, "damaged or not what export wrote"),
     ("source", {"config": {}, "origin": [1]}, "origin"), ("preprocess", {"img_size": 32}, "describes another input"),
     ("sha256", {}, "would unpack to more than 20 times its size")],
)  # fmt: skip
def test_an_export_that_contradicts_itself(exported, key, value, words, tmp_path, refused):
    shutil.copytree(exported, folder := tmp_path / "it")
    about = read_json(folder / "ppattn.json")
    if key == "sha256":
        np.savez_compressed(folder / "golden.npz", input=np.zeros((10**6, 3)), output=np.zeros((1, 3)))
        value = {"golden.npz": hashlib.sha256((folder / "golden.npz").read_bytes()).hexdigest()}
    about[key] |= value
    (folder / "ppattn.json").write_text(json.dumps(about))
    assert words in refused("eval", "--model", folder, "-o", "data.name=digits")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["null", "[" * 99999], ids=["null", "deep"])
def test_a_cache_of_engines_with_anything_in_it(exported, content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ppattn").mkdir()
    (tmp_path / "ppattn/engines.json").write_text(content)
    assert ppattn.Predictor(exported, engine="auto").engine in ("paddle", "onnxruntime", "openvino")


def test_weights_without_pixel_statistics_and_of_another_type(trained, tmp_path, refused):
    tensors, metadata = weights.read(trained / "checkpoints/best")
    weights.save(tmp_path / "pixels.safetensors", tensors, metadata | {"preprocess": {}})
    weights.save(tmp_path / "bool.safetensors", {name: array > 0 for name, array in tensors.items()}, metadata)
    for name, words in (("pixels", "mean"), ("bool", "holds bool for")):
        assert words in refused("eval", "--run", tmp_path / f"{name}.safetensors", "--output", tmp_path)


@pytest.mark.slow
def test_closed_streams(exported, tmp_path):
    """A file that is opened first would get the number of stdout, and what is silenced would go into it."""
    write_image(tmp_path / "a.png", 0, (9, 9, 3))
    for call in ("list models", f"predict --model {exported} {tmp_path}/a.png --csv {tmp_path}/it.csv"):
        command = f"{shlex.quote(sys.executable)} -m ppattn {call} <&- >&-"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "it.csv").read_text().count("\n") == 4


def test_names_that_are_not_utf8(model, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(UserError, match="not printable UTF-8"):
        ppattn.export(model, folder)
    assert not [*tmp_path.iterdir()]
