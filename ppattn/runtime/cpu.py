"""Settings that make Paddle fast on a CPU; docs/lab/performance.md has the measurements.

They change no result beyond rounding. `ppattn.setup()` applies all of them.
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}
AVX2 = {"avx2", "fma"}
MKL_VARIABLE = "MKL_DEBUG_CPU_TYPE"
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds in a period of microseconds


def tune(threads: int | None = None) -> list[str]:
    """Apply the settings; returns sentences for the log. For `threads` see `ppattn.setup`."""
    import paddle

    processor = mkl_processor(cpuinfo("vendor_id"), set(cpuinfo("flags").split()))
    if processor:
        os.environ.setdefault(MKL_VARIABLE, processor)  # MKL reads it at its first product, not at import
    processes = os.environ.get("PADDLE_LOCAL_SIZE") or os.environ.get("PADDLE_TRAINERS_NUM", "1")
    threads = threads or max(1, available_cores() // int(processes))
    set_threads(threads)
    # With stride kernels, transposes and slices are lazy views, which every later operator copies slowly.
    paddle.set_flags({"FLAGS_use_stride_kernel": False, "FLAGS_paddle_num_threads": threads})
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD: freed memory is kept, not returned after each large operator.
        for parameter, value in {-3: 1 << 30, -1: 2**31 - 1, -2: 256 << 20}.items():
            libc.mallopt(parameter, value)
    settings = f"{threads} CPU thread(s), contiguous tensors, memory kept between operators."
    return [settings, check_mkl()] if processor else [settings]


def available_cores() -> int:
    """Cores that this process may use; in a container with a quota of CPU time, no more than the quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2; "max" is no quota
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def set_threads(count: int) -> None:
    """CPU threads of matrix products; `import paddle` leaves OpenMP with one."""
    import paddle

    with contextlib.suppress(AttributeError):  # private; without it, OMP_NUM_THREADS at the start of Python does it
        paddle.base.core.set_num_threads(count)


def mkl_processor(vendor: str, flags: set[str]) -> str | None:
    """The value of MKL_DEBUG_CPU_TYPE that makes MKL use the vector instructions of this processor.

    Paddle's MKL (2019) selects its kernels by vendor, and the slowest ones for every vendor but Intel. The variable
    names the kernels instead: 7 for AVX512, 5 for AVX2 with FMA. None where there is neither, and on Intel's.
    """
    if vendor == "GenuineIntel" or not flags >= AVX2:
        return None
    return "7" if flags >= AVX512 else "5"


def cpuinfo(field: str) -> str:
    """A field of /proc/cpuinfo (vendor_id, model name, flags); empty if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def check_mkl() -> str:
    """A sentence for the log: did MKL take the setting? Its kernels for AVX2 and AVX512 round x * x + y once (FMA)."""
    import numpy as np
    import paddle

    x = np.float32(1 + 3 * 2.0**-13)  # x * x needs more than 24 bits
    left = x * np.eye(64, k=1, dtype="float32")
    left[:, 0] = -x * x
    right = np.array([[1]] + 63 * [[x]], x.dtype).repeat(64, 1)  # the product's rows but one: x * x - round(x * x)
    setting = f"{MKL_VARIABLE}={os.environ[MKL_VARIABLE]}"
    if np.any(paddle.matmul(paddle.to_tensor(left, place="cpu"), paddle.to_tensor(right, place="cpu")).numpy()[:-1]):
        return f"{setting} is set: Paddle's MKL uses the vector instructions of this processor."
    late = f"{setting} came too late: Paddle's MKL does not use the vector instructions of this processor"
    return f"{late}. Call ppattn.setup() before the first product, or set the variable before the program starts."


def describe_processor(environment: dict, threads: int | None = None) -> str:
    """What a result was measured on, from an env.json: `2 cores of an AMD EPYC`; `threads` are those of a process."""
    cores = threads * environment.get("processes", 1) if threads else environment["cores"]
    of = f"{cores} core{'s' * (cores > 1)} of an " if environment.get("device", "cpu") == "cpu" else ""
    return of + environment["device_name"].removesuffix(" Processor")
