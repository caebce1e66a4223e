"""Odd places and interruptions: nothing of strangers runs, nothing half done stays, and every answer is a sentence."""

import hashlib
import json
import os
import resource
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
from ppattn.cli import main
from ppattn.engine import trainer
from ppattn.errors import UserError
from tests.helpers.data_sets import write_image
from tests.helpers.runs import tiny

ROOT = Path(__file__).resolve().parents[2]
POISON = ("random", "statistics", "argparse", "secrets", "numpy", "paddle", "onnxruntime", "tqdm", "scripts", "tools")


def start(*command, folder=ROOT, **variables) -> subprocess.Popen:
    """A verb of this copy of the package in a process of its own; None removes a variable."""
    given = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    environment = {name: value for name, value in given.items() if value is not None}
    call = [sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(call, cwd=folder, env=environment, **pipes)


def run(*command, **settings) -> tuple[int, str]:
    """Exit code and what was written to stderr."""
    with start(*command, **settings) as process:
        _, errors = process.communicate()
        return process.returncode, errors


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export, with ONNX where that is installed."""
    folder = tmp_path_factory.mktemp("trust") / "exported"
    model = ppattn.create_model("deit_nano", img_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    ppattn.export(model, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "ppattn"], [ROOT / "tools/VERB.py"]], ids=["module", "tool"])
def test_modules_of_the_current_folder_do_not_run(exported, tmp_path, program):
    for name in POISON:
        (tmp_path / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\n")
    write_image(tmp_path / "a.png", 0, (9, 9, 3))
    benchmark = "benchmark --models deit_nano --sizes 16 --batch 1 --rounds 1 --seconds 0.01 --output bench"
    for verb, *arguments in (
        ["list", "models", "inline_deit_tiny"],
        ["predict", "--model", exported, "a.png"],
        ["export", "--run", "inline_deit_nano_cifar10", "--output", "again"],
        benchmark.split(),
    ):
        command = [str(part).replace("VERB", verb) for part in program] + ([verb] if "-m" in program else [])
        code, errors = run(*command, *arguments, folder=tmp_path)
        assert code == 0 and not (tmp_path / "ran").exists(), errors


@pytest.mark.slow
def test_a_stopped_export_leaves_neither_folder_nor_process(tmp_path):
    call = ["export", "--run", "inline_deit_nano_cifar10", "--output", tmp_path / "new/it"]
    with start("-m", "ppattn", *call) as process:
        runtimes = ["pgrep", "-f", f"ppattn.deploy.engines {tmp_path}"]  # they are being tried
        while process.poll() is None and subprocess.run(runtimes, stdout=subprocess.DEVNULL).returncode:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1 and process.stderr.read().endswith("interrupted\n")
    assert [*(tmp_path / "new").iterdir()] == []
    assert subprocess.run(["pgrep", "-f", str(tmp_path)]).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [3000, 30_000])
def test_a_disk_that_fills_during_an_export_is_told(tmp_path, limit):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = ppattn.create_model("deit_nano", img_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(UserError, match=r"Cannot write .*new/it: the disk is full\."):
            ppattn.export(model, tmp_path / "new/it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(tmp_path / "new").iterdir()] == []


def test_a_stopped_index_of_shards_keeps_what_it_has(tmp_path, shards):
    """Also where nothing can be done at the end."""
    program = f"""
import time
from ppattn.data import shards
index_shard = shards.index_shard
shards.index_shard = lambda path: time.sleep(0.4) or index_shard(path)
root = shards.Path({str(shards[0])!r})
shards.read_index(root, sorted(path.name for path in root.glob("train*.tar")))
"""
    index = shards[0] / "shards.json"
    with start("-c", program) as process:
        while process.poll() is None and not index.is_file():
            time.sleep(0.05)
        process.kill()
    assert b"train-000000.tar" in index.read_bytes()


RELEASE = """
import sys, time
from pathlib import Path
from scripts import release_weights as script
folder = Path(sys.argv[1])
script.table.RELEASED, script.table.COSTS = folder / "models.yaml", folder / "costs.csv"
script.LOGITS = folder / "logits.json"
def release(run, model, overrides, about):
    for name in ("models.yaml", "new.safetensors"):
        (folder / name).write_text("half")
    print("now", flush=True)
    time.sleep(60)
script.release = release
sys.exit(script.guarded(script.main))
"""


def test_a_stopped_release_leaves_nothing(tmp_path):
    for name in ("models.yaml", "costs.csv", "logits.json", "old.safetensors"):
        (tmp_path / name).write_text("whole")
    with start("-c", RELEASE, tmp_path) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1 and process.stderr.read().endswith("interrupted\n")
    assert {path.name for path in tmp_path.iterdir()} == {"models.yaml", "costs.csv", "logits.json", "old.safetensors"}
    assert (tmp_path / "models.yaml").read_text() == "whole"


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
    config = "-o model.img_size=16 model.depth=1 train.epochs=1 train.max_steps=1"
    train = f"train -c digits/inline_deit_nano {config} output=run"
    (tmp_path / "tmp").mkdir()
    odd = {"folder": tmp_path, "HOME": home, "XDG_CACHE_HOME": None, "TMPDIR": str(tmp_path / "tmp")}
    calls = [f"predict --model {exported} --engine auto a.png", train]
    for call in calls if home is None else calls[:1]:
        code, errors = run("-c", UNKNOWN_USER, *call.split(), **odd)
        assert code == 0 and "Traceback" not in errors and "temporary cache" not in errors, errors
    own = tmp_path / f"tmp/ppattn-{os.geteuid()}"
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "tmp"} | ({"run"} if home is None else set())
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    code, errors = run("-c", UNKNOWN_USER, "predict", "--run", "vittt_tiny", "a.png", **odd)
    assert code == 2 and "error: " in errors and "Traceback" not in errors, errors


# content of files


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trust") / "run"
    trainer.train(tiny(folder, train={"max_steps": 2, "log_every": 1}))
    return folder


def progress(**changes):
    return lambda metadata: metadata["progress"].update(changes)


EDITS = {
    "no data": lambda metadata: metadata.pop("data"), "no world": lambda metadata: metadata.pop("world"),
    "no runtime": lambda metadata: metadata.pop("runtime"),
    "text in data": lambda metadata: metadata["data"]["train"].update(images="x"),
    "text for a step": progress(step="x"),
    "step below 0": progress(step=-5),
    "no history": progress(history=[5]),
    "no steps per epoch": progress(steps_per_epoch=-1),
    "text in sums": progress(sums={"loss": "x"}),
    "a model that is a list": lambda metadata: metadata["config"].update(model=[1]),
    "a size in words": lambda metadata: metadata["preprocess"].update(img_size="large"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_with_another_content_and_a_right_seal(trained, edit, tmp_path, capsys):
    tensors, metadata = weights.read(trained / "checkpoints/latest")
    EDITS[edit](metadata)
    weights.save(tmp_path / "it.safetensors", tensors, metadata)
    config = ["-c", str(trained / "config.yaml"), "-o", f"output={tmp_path / 'run'}", "train.max_steps=4"]
    assert main("train", [*config, "--resume", str(tmp_path / "it.safetensors")]) == 2
    assert "it.safetensors is " in capsys.readouterr().err


@pytest.mark.parametrize("change", ["gone", "of another shape"])
def test_a_state_without_its_optimizer(trained, change, tmp_path, capsys):
    tensors, metadata = weights.read(trained / "checkpoints/latest")
    moments = [name for name in tensors if name.endswith("/moment1")] or [n for n in tensors if n.endswith("/velocity")]
    for name in moments[:1]:
        del tensors[name]
        tensors |= {name: np.zeros((2, 3))} if "shape" in change else {}
    weights.save(tmp_path / "it.safetensors", tensors, metadata)
    config = ["-c", str(trained / "config.yaml"), "-o", f"output={tmp_path / 'run'}", "train.max_steps=4"]
    assert moments and main("train", [*config, "--resume", str(tmp_path / "it.safetensors")]) == 2
    message = capsys.readouterr().err
    assert "optimizer" in message and "Traceback" not in message


@pytest.mark.parametrize(
    "model",
    [None, 5, [1], {"name": ["deit_nano"]}, {"name": "deit_nano", "attention_options": "x"},
     {"name": "deit_nano", "img_size": [[1]]}, {"name": "deit_nano", "img_size": "x"}],
)  # fmt: skip
def test_weights_whose_metadata_is_of_another_kind(trained, model, tmp_path, capsys):
    tensors, metadata = weights.read(trained / "checkpoints/best")
    weights.save(path := tmp_path / "w.safetensors", tensors, {"config": {"model": model}})
    for call in (lambda: ppattn.load_run(path), lambda: ppattn.create_model("deit_nano", weights=path)):
        with pytest.raises(UserError, match="is not what training or convert wrote"):
            call()


def test_converted_weights_with_odd_settings_of_the_data(trained, tmp_path):
    config = {"model": {"name": "deit_nano"}}
    for data in (None, 5, {"mean": "x"}):
        weights.save(path := tmp_path / "w.safetensors", {"a": np.ones(2)}, {"config": config | {"data": data}})
        with pytest.raises(UserError, match="data"):
            ppattn.load_run(path)


def changed_export(exported, folder, **changes):
    shutil.copytree(exported, folder)
    about = json.loads((folder / "ppattn.json").read_text())
    (folder / "ppattn.json").write_text(json.dumps(about | changes))
    return about


@pytest.mark.slow
def test_an_export_that_contradicts_itself(exported, tmp_path, capsys):
    about = json.loads((exported / "ppattn.json").read_text())
    for i, (changes, words) in enumerate(
        (
            ({"preprocess": about["preprocess"] | {"img_size": [32, 32]}}, "describes another input"),
            ({"preprocess": about["preprocess"] | {"in_chans": 1}}, "describes another input"),
            ({"source": {"config": [1]}}, "damaged or not what export wrote"),
            ({"source": {"config": None}}, "damaged or not what export wrote"),
            ({"source": {"config": {}, "origin": [1]}}, "origin"),
            ({"stride": 0}, "damaged or not what export wrote"),
        )
    ):
        changed_export(exported, tmp_path / str(i), **changes)
        assert main("eval", ["--model", str(tmp_path / str(i)), "-o", "data.name=digits"]) == 2
        assert words in capsys.readouterr().err
    changed_export(exported, tmp_path / "golden")
    np.savez_compressed(path := tmp_path / "golden/golden.npz", input=np.zeros((10**6, 3)), output=np.zeros((1, 3)))
    about["sha256"]["golden.npz"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "golden/ppattn.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="would unpack to more than 20 times its size"):
        ppattn.Predictor(tmp_path / "golden")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["null", "5", "[" * 99999, '{"a": '])
def test_a_cache_of_engines_with_anything_in_it(exported, content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ppattn").mkdir()
    (tmp_path / "ppattn/engines.json").write_text(content)
    assert ppattn.Predictor(exported, engine="auto").engine in ("paddle", "onnxruntime", "openvino")


def test_numbers_of_devices(capsys):
    assert ppattn.setup("cpu:0")
    for name in ("cpu:1", "cpu:²", "cpu:"):
        with pytest.raises(UserError, match="is not available"):
            ppattn.setup(name)


def test_weights_without_pixel_statistics_and_of_another_type(trained, tmp_path, capsys):
    tensors, metadata = weights.read(trained / "checkpoints/best")
    weights.save(tmp_path / "pixels.safetensors", tensors, metadata | {"preprocess": {}})
    weights.save(tmp_path / "bool.safetensors", {name: array > 0 for name, array in tensors.items()}, metadata)
    for name, words in (("pixels", "mean"), ("bool", "holds bool for")):
        assert main("eval", ["--run", str(tmp_path / f"{name}.safetensors"), "--output", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err


def test_a_link_to_itself_is_replaced_or_told(trained, tmp_path, capsys):
    write_image(tmp_path / "a.png", 0, (9, 9, 3))
    link = tmp_path / "it.csv"
    link.symlink_to(link)
    assert main("predict", ["--run", str(trained), str(tmp_path / "a.png"), "--csv", str(link)]) == 0
    assert link.read_text().startswith("image,rank")
    (tmp_path / "it.json").symlink_to(tmp_path / "it.json")
    assert main("check", ["-c", str(trained / "config.yaml"), "--json", str(tmp_path / "it.json")]) == 0


@pytest.mark.parametrize(
    ("option", "words"),
    [("--options x", "JSON"), ("--options 5", "JSON"), ("--budget nan", "--budget nan"), ("--budget -1", "--budget -1"),
     ("--images 0", "--images 0"), ("--epochs -1", "--epochs -1"), ("--new-lr nan", "--new-lr nan")],
)  # fmt: skip
def test_numbers_of_linearize(trained, tmp_path, capsys, option, words):
    call = ["--model", str(trained), "--to", "linear", "--output", str(tmp_path / "new"), *option.split()]
    assert main("linearize", call) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_closed_streams(exported, tmp_path):
    """A file that is opened first would get the number of stdout, and what is silenced would go into it."""
    write_image(tmp_path / "a.png", 0, (9, 9, 3))
    for call in ("list models", f"predict --model {exported} {tmp_path}/a.png --csv {tmp_path}/it.csv"):
        command = f"{shlex.quote(sys.executable)} -m ppattn {call} <&- >&-"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "it.csv").read_text().count("\n") == 4


def test_names_that_are_not_utf8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    model = ppattn.create_model("deit_nano", img_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    with pytest.raises(UserError, match="not printable UTF-8"):
        ppattn.export(model, folder)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_checkpoint_is_of_a_run(exported, capsys):
    assert main("eval", ["--model", str(exported), "--checkpoint", "latest"]) == 2
    assert "--checkpoint is for --run" in capsys.readouterr().err
