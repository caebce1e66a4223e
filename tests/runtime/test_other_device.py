"""The code path of a device that is not the CPU, on a device of the tests' own whose memory the host cannot read.

Paddle loads the plugin (other_device/testdev.cc) at import from CUSTOM_DEVICE_ROOT, and a mistake ends the process:
every case runs in a process of its own. Not covered: numerics of another device's kernels, streams, collectives.
"""

import html
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppattn import list_attentions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMPARE = str(HERE / "other_device" / "compare.py")
TRAIN = ["tools/train.py", "-c", "configs/digits/inline_deit_nano.yaml", "-o", "train.device=testdev", "model.depth=1"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The environment of a process in which Paddle finds the device."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("the device of these tests needs Linux and a C++17 compiler")
    paddle = Path(importlib.util.find_spec("paddle").submodule_search_locations[0])
    folder = tmp_path_factory.mktemp("device")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{paddle / 'include'}"]
    command += [str(HERE / "other_device" / "testdev.cc"), "-o", str(folder / "libtestdev.so")]
    command += [f"-L{paddle / 'base'}", "-l:libpaddle.so", "-Wl,--allow-shlib-undefined"]
    subprocess.run(command, check=True)
    settings = {"CUSTOM_DEVICE_ROOT": str(folder), "FLAGS_use_stride_kernel": "0", "GLOG_minloglevel": "2"}
    return os.environ | settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(device: dict, *command: str, exit_code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *command], env=device, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exit_code, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_the_host_cannot_read_the_memory_of_the_device_and_a_planted_mistake_is_noticed(device):
    """Otherwise the tests below would prove nothing."""
    program = "import ctypes, paddle; paddle.set_device('testdev'); x = paddle.ones([4]); assert x.sum() == 4\n"
    run(device, "-c", program)
    run(device, "-c", program + "ctypes.c_float.from_address(x.data_ptr()).value", exit_code=-signal.SIGSEGV)
    run(device, COMPARE, "testdev", "deit_nano", "softmax", "--plant", exit_code=-signal.SIGSEGV)


@pytest.mark.parametrize("first", range(3))
def test_a_training_step_equals_that_of_the_cpu(device, first):
    """Every attention on one of the backbones, in turn."""
    backbone = ("deit_nano", "pvt_nano", "swin_nano")[first]
    assert run(device, COMPARE, "testdev", backbone, *list_attentions()[first::3]).stdout.endswith("all equal\n")


def test_train_resume_evaluate_predict_and_export(device, tmp_path):
    output, exported = tmp_path / "run", tmp_path / "exported"
    train = [*TRAIN, "train.accumulate=2", "train.ema=0.9", f"output={output}"]
    run(device, *train, "train.max_steps=3")
    assert json.loads((output / "env.json").read_text())["device"].startswith("testdev")
    run(device, *train, "train.max_steps=5", "--resume", "auto")
    assert json.loads((output / "summary.json").read_text())["steps"] == 5
    on_device, on_cpu = (
        run(device, "tools/eval.py", "--run", str(output), "--device", name).stdout for name in ("testdev", "cpu")
    )
    assert on_device.split("top-1")[1].split()[0] == on_cpu.split("top-1")[1].split()[0]
    run(device, "tools/export.py", "--run", str(output), "--output", str(exported))
    picture = next((output / "eval").glob("*.png"))
    run(device, "tools/predict.py", "--run", str(output), "--device", "testdev", str(picture))


def test_the_check_for_users_with_a_gpu_runs_on_a_cpu(device, tmp_path):
    """Every branch that does not ask for CUDA."""
    paths = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = ["bash", "scripts/gpu_check.sh", "--device", "cpu", "--output", str(tmp_path / "check")]
    done = subprocess.run(command, env=device | paths, cwd=ROOT, capture_output=True, text=True)
    report = json.loads((tmp_path / "check" / "gpu_check.json").read_text())
    verdicts = {promise: row["verdict"] for promise, row in report["promises"].items()}
    assert done.returncode == 0 and set(verdicts.values()) == {"kept", "not tried"}, done.stdout + done.stderr
    assert report["device"] == "cpu" and list(verdicts.values()).count("kept") >= 8
    assert all(promise in html.unescape((tmp_path / "check/gpu_check.html").read_text()) for promise in verdicts)


def test_other_devices_and_mixed_precision_that_would_not_take_effect_are_errors(device, tmp_path):
    done = run(device, "tools/eval.py", "--run", "runs/none", "--device", "xpu", exit_code=2)
    assert "testdev" in done.stderr and "cpu" in done.stderr
    done = run(device, *TRAIN, "train.amp=bf16", f"output={tmp_path / 'run'}", exit_code=2)
    assert "train.amp" in done.stderr
