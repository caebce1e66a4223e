"""Fast and quiet defaults, set by one call that every tool makes first. Import changes nothing."""

import os
import random
import signal
import threading
import warnings
from contextlib import suppress
from typing import Any, Literal

from ppattn.errors import UserError, install_command
from ppattn.files.cache import private_folder
from ppattn.validation import Positive, Seed, check_arguments

OLDEST, NEWEST = (3, 1), (3, 3)  # versions of Paddle that the tests passed with


def setup(
    device: str = "auto",
    threads: Positive | None = None,
    seed: Seed | None = None,
    kernels: Literal["auto", "fused", "plain"] | None = None,
) -> list[str]:
    """Prepare this process; returns lines for the log. `train` makes this call itself, with the settings of its config.

    Args:
        device: "auto" (a GPU or another accelerator if Paddle finds one, else the CPU), "cpu", "gpu", "gpu:1", "npu",
            "xpu", ...: whatever this Paddle offers, see `devices`.
        threads: CPU threads of the matrix products; default: the cores divided by the processes of this launch.
        seed: seeds Python, numpy and Paddle.
        kernels: "auto" (compiled on the CPU, Paddle's fused softmax attention elsewhere), "fused" or "plain" on every
            device, see `ppattn.ops.enable`; default: the variable PPATTN_KERNELS, or "auto".
    """
    check_arguments(setup, {"device": device, "threads": threads, "seed": seed, "kernels": kernels}, "setup")
    paddle = import_paddle()
    from ppattn import ops
    from ppattn.runtime import cpu

    log = [f"Paddle {paddle.__version__} on {_place(paddle, device)}"]
    on_cpu = paddle.get_device() == "cpu"
    if on_cpu:
        log += cpu.tune(threads)
    ops.enable(kernels, build=on_cpu)
    if seed is not None:
        seed_all(seed)
    return [*log, ops.status()]


def import_paddle() -> Any:
    """Paddle, without the noise of its import; raises `UserError` if it is missing or too old."""
    for noise in ("No ccache found", r"\s*Non compatible API", "When training, we now always track global mean"):
        warnings.filterwarnings("ignore", message=noise)
    os.environ.setdefault("GLOG_minloglevel", "2")
    if not os.access(os.path.expanduser("~"), os.W_OK):  # where Paddle, VisualDL and Matplotlib make folders
        with suppress(OSError):
            os.environ["HOME"] = str(private_folder())
    try:
        import paddle
    except ImportError as error:
        advice = f"{install_command('cpu')}, or see requirements.txt for an NVIDIA GPU"
        raise UserError(f"PaddlePaddle does not import ({error}). Install it: {advice}.") from None
    if threading.current_thread() is threading.main_thread() and callable(stop := signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, stop)  # the import has put another handler in its place
    version = tuple(int(part) for part in paddle.__version__.split(".")[:2])
    tested = "Paddle {}.{} to {}.{}".format(*OLDEST, *NEWEST)
    if version < OLDEST:
        raise UserError(f"ppattn needs {tested}; this is {paddle.__version__}.")
    if version > NEWEST:
        warnings.warn(f"ppattn is tested with {tested}; this is {paddle.__version__}.", stacklevel=3)
    return paddle


def seed_all(seed: int) -> None:
    """Seed Python, numpy and Paddle."""
    import numpy as np
    import paddle

    random.seed(seed)
    np.random.seed(seed % 2**32)
    paddle.seed(seed)


def devices() -> dict[str, int]:
    """The devices that this Paddle offers, with their number: cpu, gpu, xpu, and the types of plugins (npu, ...)."""
    import paddle

    found = {"cpu": 1}
    if paddle.is_compiled_with_cuda():
        found["gpu"] = paddle.device.cuda.device_count()
    if paddle.is_compiled_with_xpu():
        found["xpu"] = paddle.device.xpu.device_count()
    for name in paddle.device.get_all_custom_device_type() or ():
        found[name] = len([device for device in paddle.device.get_available_custom_device() if device.startswith(name)])
    return {name: count for name, count in found.items() if count}


def _place(paddle, device: str) -> str:
    found = devices()
    if device == "auto":
        device = next((name for name in found if name != "cpu"), "cpu")
    name, colon, number = device.partition(":")
    if name not in found or (colon and not (number.isdecimal() and int(number) < found[name])):
        there = ", ".join(f"{name}:0 to {name}:{count - 1}" if count > 1 else name for name, count in found.items())
        raise UserError(f"Device {device!r} is not available; this Paddle offers: auto, {there}.")
    selected = os.environ.get(f"FLAGS_selected_{name}s")  # set by paddle.distributed.launch
    if name != "cpu" and selected and not colon:
        device = f"{name}:{selected.split(',')[0]}"
    paddle.set_device("cpu" if name == "cpu" else device)  # Paddle knows no number of that
    return paddle.get_device()
