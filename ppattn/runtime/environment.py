"""Versions, device, git commit and command of a result, for env.json."""

import json
import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import cv2
import numpy
import paddle

from ppattn import ops
from ppattn.runtime import cpu

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "opencv-python", "opencv-python-headless", "visualdl", "safetensors")


def arithmetic_facts() -> dict:
    """Everything that may change the last bits of a training: libraries, processor, instruction set."""
    return {
        "Paddle": paddle.__version__,
        "numpy": numpy.__version__,
        "OpenCV": cv2.__version__,
        "device": _device_name(),
        "threads": paddle.get_flags("FLAGS_paddle_num_threads")["FLAGS_paddle_num_threads"],
        "kernels": ops.status(),
        cpu.MKL_VARIABLE: os.environ.get(cpu.MKL_VARIABLE),
    }


def environment(command: str) -> dict:
    """Versions, device, git commit and command of this process."""
    return {
        "paddle": paddle.__version__,
        "python": platform.python_version(),
        "packages": {one.name: one.version for one in metadata.distributions() if one.name in PACKAGES},
        "platform": platform.platform(),
        "device": paddle.get_device(),
        "device_name": _device_name(),
        "cores": cpu.available_cores(),
        "processes": int(os.environ.get("PADDLE_TRAINERS_NUM", 1)),
        **_commit(),
        "command": command,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _device_name() -> str:
    device = paddle.get_device()
    if device == "cpu":
        return cpu.cpuinfo("model name") or platform.machine()
    return paddle.device.cuda.get_device_name() if device.startswith("gpu") else device


def _commit() -> dict:
    """The commit of the clone, or of the clone from which the package was installed (setup.py)."""
    if (installed := PACKAGE / "commit.json").is_file():
        return json.loads(installed.read_text(encoding="utf-8"))
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {"git_commit": _git("rev-parse", "HEAD"), "git_changed": changed}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(PACKAGE.parent), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        if (PACKAGE.parent / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
