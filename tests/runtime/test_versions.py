"""Where ppattn runs: without packages of extras and private entry points of Paddle, as a wheel, on any processor."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import paddle
import pytest
from setuptools import Distribution

import ppattn
from ppattn import ops
from ppattn.engine.build import mixed_precision
from ppattn.engine.optim import Muon
from ppattn.errors import UserError
from ppattn.ops import native, tracing
from ppattn.runtime import cpu, environment, startup
from ppattn.settings import Train

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

WITHOUT_EXTRAS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import cv2
import numpy as np
import ppattn
from ppattn.cli import main

ppattn.setup(threads=1, seed=0)
model = ppattn.create_model("deit_nano", attention="inline", img_size=32, num_classes=3)
ppattn.export(model, "exported", img_size=32, classes=["a", "b", "c"])
cv2.imwrite("image.png", np.full((40, 30, 3), 128, np.uint8))
assert main(["predict", "--model", "exported", "image.png"]) == 0
sys.exit(main(["train", "-c", sys.argv[2]]))
"""


@pytest.mark.slow
def test_models_exports_and_predictions_need_no_extra(tmp_path):
    extras = "sklearn scipy matplotlib visualdl braceexpand onnx onnxruntime paddle2onnx pandas"
    command = [sys.executable, "-c", WITHOUT_EXTRAS, extras, str(ROOT / "configs/digits/inline_deit_nano.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.splitlines()[-1] == "error: The package sklearn is not installed: pip install 'ppattn[train]'"


def test_what_only_gpus_meet(monkeypatch):
    assert pytest.deprecated_call(float, paddle.to_tensor([2.0])) == 2.0  # as GradScaler does; an error in numpy 2.4
    monkeypatch.setattr(startup, "devices", lambda: {"cpu": 1, "gpu": 4})
    monkeypatch.setenv("FLAGS_selected_gpus", "2,3")  # as a launch with one process sets it
    monkeypatch.setattr(paddle, "set_device", lambda device: monkeypatch.setattr(paddle, "get_device", lambda: device))
    assert startup._place(paddle, "auto") == startup._place(paddle, "gpu") == "gpu:2"
    with pytest.raises(UserError, match="train.amp = bf16 needs .*bf16: Ampere or newer"):  # a Volta or Turing
        monkeypatch.setattr(paddle.amp, "is_bfloat16_supported", lambda: False)
        mixed_precision(Train(amp="bf16"))


def test_a_paddle_outside_the_tested_range(monkeypatch):
    monkeypatch.setattr(paddle, "__version__", "2.6.2")
    with pytest.raises(UserError, match=r"needs Paddle 3.1 to 3.3; this is 2.6.2"):
        ppattn.setup()
    monkeypatch.setattr(paddle, "__version__", "3.4.0")
    with pytest.warns(UserWarning, match=r"tested with Paddle 3.1 to 3.3; this is 3.4.0"):
        ppattn.setup()


def test_without_custom_operators_the_plain_forms_run(monkeypatch):
    was_on = ops.enable()
    with monkeypatch.context() as patch:
        patch.setattr(native, "_loaded", False)
        patch.delattr(paddle._C_ops, "_run_custom_op")
        assert not ops.enable() and "registers operators in another way" in ops.status()
        x = paddle.randn([3, 5])
        assert ops.gelu(x).numpy() == pytest.approx(paddle.nn.functional.gelu(x).numpy(), abs=1e-6)
    assert ops.enable() == was_on


def test_without_private_calls_setup_and_tracing_work(monkeypatch):
    monkeypatch.delattr(paddle.base.core, "set_num_threads")
    assert "1 CPU thread(s)" in cpu.tune(1)[0]
    for folder in ("dy2static", "pir_dy2static"):
        monkeypatch.setitem(sys.modules, f"paddle.jit.{folder}.parameter_recorder", None)
    with tracing():
        pass


def test_muon_does_not_turn_into_adamw_silently(monkeypatch):
    monkeypatch.setattr(paddle.optimizer, "AdamW", type("Later", (), {}))
    with pytest.raises(UserError, match="set optimizer.name to adamw"):
        Muon([], 0.95)


def test_layers_in_float32_are_known_to_the_public_form_too():
    model = ppattn.create_model("deit_nano", attention="performer", num_classes=2)
    assert sum(getattr(part, "keeps_float32", False) for part in model.sublayers()) == len(model.blocks)


def test_an_installed_package_knows_its_commit(tmp_path, monkeypatch):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    monkeypatch.chdir(ROOT)
    built: dict = {}
    monkeypatch.setattr("setuptools.setup", lambda cmdclass: built.update(cmdclass))
    runpy.run_path("setup.py")
    command = built["build_py"](Distribution({"packages": ["ppattn.files"], "script_name": "setup.py"}))
    command.ensure_finalized()
    command.build_lib = str(tmp_path)
    command.run()
    wanted = environment.environment("")["git_commit"]
    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "ppattn")
    assert environment.environment("")["git_commit"] == wanted and len(wanted) == 40


USE = """
import paddle, ppattn
model = ppattn.create_model("inline_deit_nano_cifar10", pretrained=True)
assert model(paddle.zeros([1, 3, 32, 32])).shape == [1, 10]
print(ppattn.__file__)
"""


@pytest.mark.slow
def test_the_wheel_works_outside_the_clone(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run("git", "clone", "-q", str(ROOT), "clone")  # building leaves files in the source folder
    run(*pip, "wheel", "-q", "--no-deps", "-w", "wheels", "./clone")
    (wheel,) = (tmp_path / "wheels").iterdir()
    run(*pip, "install", "-q", "--no-deps", "--target", "site", str(wheel))
    environment["PYTHONPATH"] = str(tmp_path / "site")
    assert run(sys.executable, "-c", USE).splitlines()[-1].startswith(str(tmp_path / "site"))
    script = str(tmp_path / "site/bin/ppattn")
    assert "inline_deit_tiny" in run(script, "list")
    assert "deit_nano" in run(script, "train", "-c", "cifar10/deit_nano", "--print-config")


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 2), ("max 100000", 64), ("9900000 100000", 64), ("", 64)]
)
def test_a_container_has_no_more_cores_than_its_quota(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(cpu, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert cpu.available_cores() == cores


ZEN4 = {"fma", "avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}


@pytest.mark.parametrize(
    ("vendor", "flags", "value"),
    [("AuthenticAMD", ZEN4, "7"), ("AuthenticAMD", {"avx2", "fma"}, "5"), ("AuthenticAMD", {"avx2"}, None),
     ("AuthenticAMD", {"avx2", "fma", "avx512f"}, "5"),  # parts of AVX512 are not enough for MKL's kernels
     ("AuthenticAMD", {"sse4_2"}, None), ("HygonGenuine", {"avx2", "fma"}, "5"), ("GenuineIntel", ZEN4, None),
     ("", set(), None)],
)  # fmt: skip
def test_mkl_is_told_the_instruction_set_that_the_processor_has(vendor, flags, value):
    assert cpu.mkl_processor(vendor, flags) == value


@pytest.mark.slow
@pytest.mark.skipif(
    cpu.mkl_processor(cpu.cpuinfo("vendor_id"), set(cpu.cpuinfo("flags").split())) is None,
    reason="MKL selects its kernels by itself on this processor",
)
@pytest.mark.parametrize(("first", "says"), [("", "is set"), ("x = paddle.ones([9, 9]); x @ x", "came too late")])
def test_setup_says_whether_the_setting_took_effect(first, says):
    program = f"import paddle, ppattn\n{first}\nprint(ppattn.setup(device='cpu')[-2])"
    environment = {name: value for name, value in os.environ.items() if name != cpu.MKL_VARIABLE}
    assert says in subprocess.check_output([sys.executable, "-c", program], text=True, env=environment, cwd=ROOT)
