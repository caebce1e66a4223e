"""Settings of the process on a CPU: the right instruction set for every vendor, and the sentence that says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppattn.runtime import cpu

ROOT = Path(__file__).resolve().parents[2]
ZEN4 = {"fma", "avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}


@pytest.mark.parametrize(
    ("vendor", "flags", "value"),
    [
        ("AuthenticAMD", ZEN4, "7"),
        ("AuthenticAMD", {"avx2", "fma"}, "5"),
        ("AuthenticAMD", {"avx2", "fma", "avx512f"}, "5"),  # parts of AVX512 are not enough for MKL's kernels
        ("AuthenticAMD", {"avx2"}, None),
        ("AuthenticAMD", {"sse4_2"}, None),
        ("HygonGenuine", {"avx2", "fma"}, "5"),
        ("GenuineIntel", ZEN4, None),
        ("", set(), None),
    ],
)
def test_mkl_is_told_the_instruction_set_that_the_processor_has(vendor, flags, value):
    assert cpu.mkl_processor(vendor, flags) == value


@pytest.mark.slow
@pytest.mark.skipif(
    cpu.mkl_processor(cpu.cpuinfo("vendor_id"), set(cpu.cpuinfo("flags").split())) is None,
    reason="MKL selects its kernels by itself on this processor",
)
@pytest.mark.parametrize("late", [False, True])
def test_setup_says_whether_the_setting_took_effect(late):
    program = "import paddle\n"
    program += "paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))\n" * late
    program += "import ppattn\nprint(ppattn.setup(device='cpu')[-1])"
    environment = {name: value for name, value in os.environ.items() if name != cpu.MKL_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    assert ("came too late" if late else "is set") in done.stdout
