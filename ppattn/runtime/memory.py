"""Memory in MB (10^6 bytes): of the host, and of the device that Paddle computes on."""

import math
from contextlib import suppress
from pathlib import Path


def host() -> float:
    """What this process may still have without swapping; infinite where the system does not say."""
    left = math.inf
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        left = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        left = min(left, int(limit) - int(used)) if limit.strip() != "max" else left
    return left / 1e6


def free() -> float:
    """What tensors on the device may still take."""
    import paddle

    if paddle.device.get_device() == "cpu":
        return host()
    return (paddle.device.cuda.get_device_properties().total_memory - paddle.device.cuda.memory_reserved()) / 1e6


def allocated() -> float:
    """Tensors that live now; the peak of `peak_allocated` is counted from here on."""
    import paddle

    core = paddle.base.core
    if paddle.device.get_device() == "cpu":
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        return core.host_memory_stat_current_value("Allocated", 0) / 1e6
    paddle.device.cuda.reset_max_memory_allocated()
    return paddle.device.cuda.memory_allocated() / 1e6


def peak_allocated() -> float:
    """The most that tensors took at once since `allocated`."""
    import paddle

    if paddle.device.get_device() == "cpu":
        return paddle.base.core.host_memory_stat_peak_value("Allocated", 0) / 1e6
    return paddle.device.cuda.max_memory_allocated() / 1e6
