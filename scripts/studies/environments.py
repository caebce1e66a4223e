"""Environments of their own for programs that ppattn does not need."""

import subprocess
import venv
from pathlib import Path


def python_of(name: str) -> Path:
    """The Python of .venv-NAME with the packages of requirements-NAME.txt, which is made where it is not there."""
    python = Path(__file__).resolve().parents[2] / f".venv-{name}/bin/python"
    wanted = Path(__file__).with_name(f"requirements-{name}.txt")
    if not python.exists():
        print(f"Installing into .venv-{name} ...", flush=True)
        venv.create(python.parents[1], with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", wanted], check=True)
    return python
