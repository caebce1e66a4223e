"""Kill training runs at random and compare what they resume to with a run that nothing disturbed, bit for bit.

python tests/kill.py --count 20 --seed 0

Every third run has two processes. A run is killed once or twice, with SIGKILL: at a random moment (of two processes one
or both and the launcher), or inside a checkpoint write. Then it is resumed to its end. Exit code 1: a run differs.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.config import to_yaml
from tests.engine.test_resume import ROOT, assert_same_run, everything

LENGTH = {"epochs": 4, "save_every_steps": 2, "log_every": 1}
WRITES = ("half a file", "before the first rename", "between the renames")


def start(folder: Path, config, processes: int, dying: str | None = None) -> subprocess.Popen:
    """Train or resume in processes of their own; `dying` kills the main one inside its n-th write of a state."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    script = [ROOT / "tests/helpers/disturbed.py", "dying", dying, "train"] if dying else [ROOT / "tools/train.py"]
    call = [*script, "-c", folder / "config.yaml", "--resume", "auto"]
    if processes > 1:
        launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", processes, "--log_dir", folder / "launch"]
        call = [*launch, *call]
    command = [sys.executable, "-W", "ignore", *map(str, call)]
    environ = os.environ | {"PADDLE_DISTRI_BACKEND": "gloo"}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True)


def finish(folder: Path, config, processes: int) -> None:
    if start(folder, config, processes).wait():
        raise SystemExit((folder / "output.txt").read_text()[-4000:])


def result_of(one: Path, other: Path) -> str:
    try:
        assert_same_run(one, other)
    except AssertionError:
        return "DIFFERS"
    return "identical"


def steps_told(folder: Path) -> int:
    log = folder / "run" / "log.txt"
    return log.read_text().count(" step ") if log.exists() else 0


def interrupt(folder: Path, config, processes: int, steps: int, rng: random.Random) -> str:
    """Start or resume, kill, and say how."""
    if rng.random() < 0.4:
        where, count = rng.choice(WRITES), rng.randint(1, steps // 4)
        code = start(folder, config, processes, f"{where} {count}").wait()
        return f"write {count}: {where}" if code else f"nowhere (fewer than {count} writes were left)"
    before = steps_told(folder)
    step = rng.randint(1, max(1, steps - before - 2))
    process = start(folder, config, processes)
    while steps_told(folder) < before + step and process.poll() is None:
        time.sleep(0.005)
    time.sleep(rng.random() * 0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    ranks = [int(pid) for pid in children] or [process.pid]
    victims = [process.pid, *ranks] if rng.random() < 0.5 else [rng.choice(ranks)]
    for pids in (victims, ranks):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return f"{'all' if len(victims) > 1 else 'one'} after {step} steps"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="runs to kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, failed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as scratch:
        print(f"{'run':>4} {'processes':>9}  {'killed':<60} {'seconds':>7}  result")
        for number in range(1, args.count + 1):
            processes, began = (2 if number % 3 == 0 else 1), time.monotonic()
            undisturbed, folder = (Path(scratch) / name for name in (f"undisturbed{processes}", f"run{number}"))
            config = everything(folder / "run", **LENGTH)
            if not undisturbed.exists():
                finish(undisturbed, everything(undisturbed / "run", **LENGTH), processes)
            steps = steps_told(undisturbed)
            how = [interrupt(folder, config, processes, steps, rng) for _ in range(rng.randint(1, 2))]
            finish(folder, config, processes)
            result = result_of(undisturbed / "run", folder / "run")
            failed += result == "DIFFERS"
            seconds = time.monotonic() - began
            print(f"{number:>4} {processes:>9}  {'; '.join(how):<60} {seconds:>7.1f}  {result}", flush=True)
    print(f"{args.count - failed} of {args.count} runs ended with the weights of an undisturbed run, bit for bit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
