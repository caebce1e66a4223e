"""Kill training runs at random and compare what they resume to with a run that nothing disturbed, bit for bit.

python tests/kill.py --count 20 --seed 0

Every third run has two processes. A run is killed once or twice, with SIGKILL: at a random moment (with two processes:
one of them, or both and the launcher), or inside a checkpoint write. Then it is resumed with `--resume auto` to its
end. The exit code is 1 if any run differs from the undisturbed one.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn import weights

ROOT = Path(__file__).resolve().parents[1]
WRITES = ("half a file", "before the first rename", "between the renames")
CONFIG = """
model: {name: deit_nano, attention: inline, img_size: 8, patch_size: 2, embed_dim: 12, depth: 2, num_heads: 3}
data: {name: digits, batch_size: 60}
augment: {pad_crop: 1, mixup: 0.8, cutmix: 1.0}
train: {epochs: 4, seed: 7, ema: 0.9, clip_grad: 1.0, accumulate: 2, save_every_steps: 2, log_every: 1, threads: 1}
optimizer: {lr: 0.01}
loss: {label_smoothing: 0.1}
"""


def start(folder: Path, processes: int, dying: tuple[str, int] | None = None) -> subprocess.Popen:
    """Train into `folder`/run; `dying` kills the main process inside its n-th write of a state."""
    script = [ROOT / "tests/helpers/dying_writes.py", dying[0], dying[1]] if dying else [ROOT / "tools" / "train.py"]
    call = [*script, "-c", folder / "config.yaml", "-o", f"output={folder / 'run'}", "--resume", "auto"]
    if processes > 1:
        launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", processes, "--log_dir", folder / "launch"]
        call = [*launch, *call]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, call)],
            cwd=folder,
            env=os.environ | {"PADDLE_DISTRI_BACKEND": "gloo"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def family(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks under a launcher, or of the training process itself."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in children] or [process.pid]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def steps_told(folder: Path) -> int:
    log = folder / "run" / "log.txt"
    return log.read_text().count(" step ") if log.exists() else 0


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    while steps_told(folder) < step and process.poll() is None:
        time.sleep(0.005)


def interrupt(folder: Path, processes: int, steps: int, rng: random.Random) -> str:
    """Start or resume, kill, and say how."""
    if rng.random() < 0.4:
        where, count = rng.choice(WRITES), rng.randint(1, steps // 4)
        process = start(folder, processes, (where, count))
        code = process.wait()
        return f"write {count}: {where}" if code else f"nowhere (fewer than {count} writes were left)"
    before = steps_told(folder)
    step = rng.randint(1, max(1, steps - before - 2))
    process = start(folder, processes)
    wait_for_step(folder, before + step, process)
    time.sleep(rng.random() * 0.1)
    pids = family(process)
    victims = [process.pid, *pids] if rng.random() < 0.5 else [rng.choice(pids)]
    kill(victims)
    process.wait()
    kill(pids)
    return f"{'all' if len(victims) > 1 else 'one'} after {step} steps"


def state(folder: Path) -> tuple[dict, dict]:
    tensors, metadata = weights.read(folder / "run" / "checkpoints" / "latest")
    best, _ = weights.read(folder / "run" / "checkpoints" / "best")
    progress = metadata["progress"]
    rows = [{k: row.get(k) for k in ("epoch", "step", "train_loss", "val_loss", "top1")} for row in progress["history"]]
    facts = {key: progress[key] for key in ("step", "best_top1", "best_epoch")}
    return tensors | {f"best/{k}": v for k, v in best.items()}, facts | {"rows": rows, "ema": metadata["ema_updates"]}


def same(one: tuple[dict, dict], other: tuple[dict, dict]) -> bool:
    tensors = one[0].keys() == other[0].keys() and all(one[0][k].tobytes() == other[0][k].tobytes() for k in one[0])
    return tensors and json.dumps(one[1]) == json.dumps(other[1])


def run(folder: Path, processes: int) -> None:
    if start(folder, processes).wait():
        raise SystemExit((folder / "output.txt").read_text()[-4000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="runs to kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, failed, truth = random.Random(args.seed), 0, {}
    with tempfile.TemporaryDirectory() as scratch:
        print(f"{'run':>4} {'processes':>9}  {'killed':<60} {'seconds':>7}  result")
        for number in range(1, args.count + 1):
            processes, began = (2 if number % 3 == 0 else 1), time.monotonic()
            if processes not in truth:
                folder = Path(scratch) / f"undisturbed{processes}"
                folder.mkdir()
                (folder / "config.yaml").write_text(CONFIG)
                run(folder, processes)
                truth[processes] = state(folder)
            folder = Path(scratch) / f"run{number}"
            folder.mkdir()
            (folder / "config.yaml").write_text(CONFIG)
            steps = truth[processes][1]["rows"][-1]["step"]
            how = [interrupt(folder, processes, steps, rng) for _ in range(rng.randint(1, 2))]
            run(folder, processes)
            good = same(state(folder), truth[processes])
            failed += not good
            seconds = time.monotonic() - began
            result = "identical" if good else "DIFFERS"
            print(f"{number:>4} {processes:>9}  {'; '.join(how):<60} {seconds:>7.1f}  {result}")
            sys.stdout.flush()
    print(f"{args.count - failed} of {args.count} runs ended with the weights of an undisturbed run, bit for bit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
