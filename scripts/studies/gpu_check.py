"""What ppattn promises, tried on one device, with a verdict for each promise: gpu_check.json and gpu_check.html.

bash scripts/gpu_check.sh                                  # about half an hour on a GPU
bash scripts/gpu_check.sh --device cpu --output checked    # a rehearsal: small sizes, one minute

Needs the packages of scripts/setup.sh test. Every step is a process of its own, so that a crash is one verdict more.
Verdicts: "kept"; "broken"; "not tried", with the reason. The page has all figures; send it, or the JSON, with a report.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jinja2 import Template

import ppattn
from ppattn import zoo
from ppattn.files.atomic import write_json, write_text
from ppattn.runtime.startup import devices
from scripts.run_grid import ROOT

LIMIT = {"bfloat16": 0.02, "float16": 0.003}  # of the largest logit
COMPARE = "tests/runtime/other_device/compare.py"
DIGITS = "configs/digits/inline_deit_nano.yaml"
PAGE = Path(__file__).with_name("gpu_check.html")


class NotTried(Exception):
    """A step that this machine cannot try."""


class Check:
    """The steps on one device; `small` sizes where it is not a GPU."""

    def __init__(self, device: str, output: Path):
        self.device, self.output, self.small = device, output, not device.startswith("gpu")
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "PPATTN_TEST_DEVICE": device}

    def run(self, *command: str, exact: bool = False, **more: str) -> str:
        """What a Python program prints; `exact`: without TF32."""
        settings = self.environment | more | ({"NVIDIA_TF32_OVERRIDE": "0"} if exact else {})
        done = subprocess.run([sys.executable, *command], env=settings, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise RuntimeError("\n".join([f"exit code {done.returncode}", *lines[-15:]]))
        return done.stdout

    def figures(self, name: str, *arguments: str, **more: Any) -> Any:
        """What a function of gpu_figures.py finds, in a process of its own."""
        program = ("-m", "scripts.studies.gpu_figures", name, self.device)
        return json.loads(self.run(*program, *arguments, **more).splitlines()[-1])

    def build(self) -> Any:
        facts = self.figures("versions")
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
            facts["nvidia-smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        return facts

    def paddle(self) -> Any:
        return self.run("-c", "import paddle; paddle.utils.run_check()").strip().splitlines()[-1]

    def golden_float32(self) -> Any:
        chosen = ["-k", "shrunk_inline_deit or mod_agent_deit"] if self.small else []
        command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/attention/test_golden.py"]
        return self.run(*command, *chosen, exact=True).strip().splitlines()[-1]

    def golden_half(self) -> Any:
        if self.small:
            raise NotTried("Paddle casts on GPUs only; tests/test_half.py emulates it on the CPU")
        found = {dtype: self.figures("half", dtype, exact=True) for dtype in LIMIT}
        if not all(value <= limit for dtype, limit in LIMIT.items() for value in found[dtype].values()):
            raise RuntimeError(f"beyond the limit: {found}")
        return found

    def same_as_cpu(self) -> Any:
        """Logits, gradients and a step of AdamW; all on the device; no copy from the host in a step."""
        chosen = [("deit_nano", "inline")] if self.small else [(f"{name}_nano",) for name in ("deit", "pvt", "swin")]
        return [self.run(COMPARE, self.device, *names, exact=True).strip().splitlines()[-1] for names in chosen]

    def resume(self, amp: str) -> Any:
        """60 steps at once, and stopped in the middle: the same state, with that of the loss scaler."""
        if self.small and amp:
            raise NotTried("train.amp needs a GPU")
        steps, folders = (4 if self.small else 60), [self.output / f"train_{amp or 'fp32'}_{n}" for n in (1, 2)]
        for folder, stops in zip(folders, ([steps], [steps // 2, steps]), strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            for stop in stops:
                settings = [f"train.device={self.device}", f"train.max_steps={stop}", f"output={folder}"]
                settings += [f"train.amp={amp}"] if amp else []
                settings += ["model.depth=1"] if self.small else []
                self.run("tools/train.py", "-c", DIGITS, "-o", *settings, "--resume", "auto")
        one, two = (self.figures("state", str(folder)) for folder in folders)
        if one != two:
            raise RuntimeError(f"the states differ: {one} {two}")
        return one

    def memory(self) -> Any:
        if self.small:
            raise NotTried("only a GPU counts its memory here")
        found = {name: self.figures("memory", PPATTN_KERNELS=name) for name in ("plain", "auto")}
        if not found["auto"] < 0.5 * found["plain"]:
            raise RuntimeError(f"fused softmax takes {found['auto']} MB, plain {found['plain']} MB")
        return found

    def speed(self, kernels: str) -> Any:
        models, attentions, sizes, batch, rounds = "deit_nano", ["inline"], ["32"], "1", "1"
        modes = ["infer" if kernels == "plain" else "train"]
        if not self.small:
            attentions = [name for name in zoo.attentions() if name not in ("less", "gaussian")]
            models, sizes, batch, rounds = "deit_tiny", ["224", "448", "896", "1792"], "16", "3"
            modes = ["infer", "train"]
        folder = self.output / f"speed_{kernels}"
        command = ["tools/benchmark.py", "--models", models, "--attentions", *attentions, "--sizes", *sizes]
        command += ["--modes", *modes, "--batch", batch, "--seconds", "0.2", "--rounds", rounds]
        self.run(*command, "--output", str(folder), PPATTN_KERNELS=kernels)
        rows = json.loads((folder / "benchmark.json").read_text())["rows"]
        return [{key: row[key] for key in ("name", "mode", "img_size", "ms_per_image", "peak_mb")} for row in rows]

    def exports(self) -> Any:
        if not all(map(importlib.util.find_spec, ("paddle2onnx", "onnxruntime"))):
            raise NotTried("paddle2onnx or onnxruntime is not installed")
        found = self.figures("exports", str(self.output))
        if trtexec := shutil.which("trtexec"):
            for name in ("fp32", "fp16"):
                program = self.output / f"export_{name}" / "inference.onnx"
                command = [trtexec, f"--onnx={program}", "--stronglyTyped", "--shapes=images:8x3x32x32"]
                done = subprocess.run(command, capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if "Throughput" in line or "mean =" in line]
                found[f"trtexec_{name}"] = lines[:2] if done.returncode == 0 else done.stderr[-300:]
        return found

    def two_gpus(self) -> Any:
        count = self.figures("versions")["gpus"]
        if count < 2:
            raise NotTried(f"{count} GPUs")
        folder, launch = self.output / "train_two", ["-m", "paddle.distributed.launch", "--gpus", "0,1"]
        settings = ["train.device=gpu", "train.max_steps=20", f"output={folder}"]
        self.run(*launch, "tools/train.py", "-c", DIGITS, "-o", *settings)
        return json.loads((folder / "summary.json").read_text())["steps"]


def steps(check: Check) -> dict[str, Any]:
    """Promise -> how it is tried."""
    return {
        "Paddle sees the device": check.build,
        "Paddle's own check passes": check.paddle,
        "Official outputs and gradients, float32 without TF32": check.golden_float32,
        "Official logits in bf16 (0.02) and fp16 (0.003)": check.golden_half,
        "A training step equals that of the CPU, on the device alone": check.same_as_cpu,
        "Training resumes bit for bit, float32": lambda: check.resume(""),
        "Training resumes bit for bit, bf16": lambda: check.resume("bf16"),
        "Training resumes bit for bit, fp16 with its loss scaler": lambda: check.resume("fp16"),
        "Fused softmax stores no attention map": check.memory,
        "Speed, plain": lambda: check.speed("plain"),
        "Speed, fused": lambda: check.speed("auto"),
        "Speed, traced": lambda: check.figures("to_static"),
        "Exports give the model's answers in ONNX Runtime (and TensorRT)": check.exports,
        "Two GPUs": check.two_gpus,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--device", help="default: gpu, or the CPU where there is none")
    args = parser.parse_args()
    device = args.device or ("gpu" if "gpu" in devices() else "cpu")
    args.output.mkdir(parents=True, exist_ok=True)
    page = Template(PAGE.read_text(encoding="utf-8"), autoescape=True)
    report: dict = {"ppattn": ppattn.__version__, "device": device, "date": time.strftime("%Y-%m-%d"), "promises": {}}
    for name, call in steps(Check(device, args.output.resolve())).items():
        start, row = time.monotonic(), {"verdict": "kept"}
        try:
            row["found"] = call()
        except NotTried as reason:
            row |= {"verdict": "not tried", "found": str(reason)}
        except Exception as error:  # one broken promise must not hide the others
            row |= {"verdict": "broken", "found": str(error)}
        row["seconds"] = round(time.monotonic() - start, 1)
        report["promises"][name] = row
        print(f"{row['verdict']:9}  {name}" + (f": {row['found']}" if row["verdict"] != "kept" else ""), flush=True)
        write_json(args.output / "gpu_check.json", report)
        write_text(args.output / "gpu_check.html", page.render(report))
    print(f"written to {args.output}/gpu_check.json and gpu_check.html")
    return int(any(row["verdict"] == "broken" for row in report["promises"].values()))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
