"""The wheel, installed and used where no clone is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
