"""What a result was measured on: versions, device, git commit and command, for env.json."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

from ppattn import __version__, cpu, ops


def arithmetic() -> dict:
    """What the last bits of a training depend on: libraries, processor and the instructions that its products use."""
    import cv2
    import numpy
    import paddle

    return {
        "Paddle": paddle.__version__,
        "numpy": numpy.__version__,
        "OpenCV": cv2.__version__,
        "device": _device_name(paddle.get_device()),
        "threads": paddle.get_flags("FLAGS_paddle_num_threads")["FLAGS_paddle_num_threads"],
        "kernels": ops.status(),
        cpu.MKL_VARIABLE: os.environ.get(cpu.MKL_VARIABLE),
    }


def environment(command: str) -> dict:
    """Versions, device, git commit and command of this process."""
    import paddle

    packages = {}
    for name in ("numpy", "opencv-python", "opencv-python-headless", "visualdl", "safetensors"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = paddle.get_device()
    return {
        "ppattn": __version__,
        "paddle": paddle.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "device": device,
        "device_name": _device_name(device),
        "cores": cpu.available_cores(),
        "processes": int(os.environ.get("PADDLE_TRAINERS_NUM", 1)),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": command,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return cpu.cpuinfo("model name") or platform.machine()
    import paddle

    return paddle.device.cuda.get_device_name()


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
