"""Train what is missing of the CIFAR-10 grid, in the order of configs/cifar10/grid.csv.

python scripts/run_grid.py                     # everything that is missing
python scripts/run_grid.py inline_deit_nano    # these runs only
python scripts/run_grid.py --list              # what is done, begun and missing
python scripts/run_grid.py -o data.root=...    # as in tools/train.py, for where the data lies and how many threads run

A run is a config with overrides. It trains in runs/cifar10/RUN; when it is complete, its configuration and numbers are
copied to results/cifar10/runs/RUN. On SIGTERM or SIGINT the run saves its state and this program exits with 75;
started again, it continues there. A run whose results were made with the same recipe is skipped.
"""

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import guarded
from ppattn.config import load_config
from ppattn.errors import UserError, unknown_name
from ppattn.files.atomic import atomic_folder
from ppattn.settings import Config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs/cifar10"
FILES = ("config.yaml", "metrics.csv", "summary.json", "env.json")
PREEMPTED = 75


@dataclass(frozen=True)
class Cell:
    """A row of grid.csv: `overrides` are those of tools/train.py, separated by blanks."""

    tier: int
    name: str
    config: str
    overrides: tuple[str, ...]

    def load(self, overrides: Sequence[str] = ()) -> Config:
        return load_config(CONFIGS / f"{self.config}.yaml", [*self.overrides, *overrides])[0]


def read_grid(path: Path) -> list[Cell]:
    """All runs in the order in which they are trained."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [Cell(int(row["tier"]), row["cell"], row["config"], tuple(row["overrides"].split())) for row in rows]


def recipe(config: Config, processes: int = 1) -> dict:
    """What determines the numbers: the config without places, threads, logging, saving and the parts of a batch."""
    data = {"root", "download", "num_workers", "eval_batch_size"}
    train = {"device", "threads", "log_every", "save_every_steps", "save_every_minutes", "eval_every"}
    tree = config.model_dump(exclude={"output": True, "data": data, "train": train})
    tree["data"]["batch_size"] *= tree["train"].pop("accumulate") * processes
    tree["train"]["ema_warmup"] = bool(tree["train"]["ema_warmup"])  # null is off in runs of this length
    return tree


def is_complete(folder: Path, config: Config) -> bool:
    """Whether a run folder holds all epochs of this recipe."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    summary, env = (json.loads((folder / name).read_text()) for name in ("summary.json", "env.json"))
    try:
        made = recipe(load_config(folder / "config.yaml")[0], env.get("processes", 1))
    except UserError:  # settings of an older version
        return False
    return summary["epochs"] == config.train.epochs + config.schedule.cooldown_epochs and made == recipe(config)


def keep(run: Path, results: Path) -> None:
    """Copy the small files of a complete run, all or none."""
    with atomic_folder(results, {*FILES}, "kept run") as folder:
        for name in FILES:
            shutil.copy2(run / name, folder / name)


def state(cell: Cell, runs: Path, results: Path) -> str:
    """done (with its accuracy), begun (with its epochs), outdated (made with another recipe) or missing."""
    config, kept, run = cell.load(), results / cell.name, runs / cell.name
    if is_complete(kept, config):
        return f"done {100 * json.loads((kept / 'summary.json').read_text())['top1']:.2f} %"
    if (run / "metrics.csv").is_file():
        return f"begun {len((run / 'metrics.csv').read_text().splitlines()) - 1} of {config.train.epochs} epochs"
    return "outdated" if (kept / "summary.json").is_file() else "missing"


class Trainer:
    """Runs tools/train.py in a process of its own and hands SIGTERM and SIGINT on to it."""

    def __init__(self):
        self.child: subprocess.Popen | None = None
        self.stopped = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self.stop)

    def stop(self, *_) -> None:
        self.stopped = True
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)

    def train(self, cell: Cell, run: Path, overrides: list[str]) -> int:
        place = run.relative_to(ROOT) if run.is_relative_to(ROOT) else run
        items = [*cell.overrides, *overrides, f"output={place}"]
        command = [sys.executable, "tools/train.py", "-c", f"configs/cifar10/{cell.config}.yaml", "--resume", "auto"]
        self.child = subprocess.Popen([*command, "-o", *items], cwd=ROOT, start_new_session=True)
        if self.stopped:  # the signal came while the process was made
            self.child.send_signal(signal.SIGTERM)
        return self.child.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="RUN", help="default: all of the grid")
    parser.add_argument("--list", action="store_true", help="print the runs and their states, train nothing")
    parser.add_argument("-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--grid", type=Path, default=CONFIGS / "grid.csv", help="table of the runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar10"), help="folder of the run folders")
    parser.add_argument("--results", type=Path, default=Path("results/cifar10/runs"), help="folder of the kept files")
    args = parser.parse_args(arguments)
    runs, results = ROOT / args.runs, ROOT / args.results
    grid = {cell.name: cell for cell in read_grid(args.grid)}
    for name in args.cells:
        if name not in grid:
            raise unknown_name("run", name, grid)
    cells = [grid[name] for name in dict.fromkeys(args.cells or grid)]
    if args.list:
        for cell in cells:
            print(f"{cell.tier}  {cell.name:<36} {state(cell, runs, results)}")
        return 0
    for cell in cells:
        cell.load(args.override)  # a wrong one fails before anything is trained
    configs = {cell: cell.load() for cell in cells}
    trainer, failed = Trainer(), []  # after the configs, whose checks import Paddle, which takes the signals
    for cell, config in configs.items():
        run, kept = runs / cell.name, results / cell.name
        if is_complete(kept, config):
            continue
        if not is_complete(run, config):
            print(f"{cell.name}: training", flush=True)
            code = trainer.train(cell, run, args.override)
            if code == PREEMPTED or trainer.stopped:
                print(f"{cell.name}: stopped; start again to continue", flush=True)
                return PREEMPTED
            if code or not is_complete(run, config):
                print(f"{cell.name}: incomplete, exit code {code}; continuing with the next run", flush=True)
                failed.append(cell.name)
                continue
        keep(run, kept)
        print(f"{cell.name}: {state(cell, runs, results)}, kept in {kept}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: sys.exit(main())))
