"""The queue of the CIFAR-10 grid: what it trains, that it stops and continues, and that it trains nothing twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppattn.errors import UserError
from scripts import run_grid

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CELLS = run_grid.read_grid(run_grid.CONFIGS / "grid.csv")

SMALL = (
    "model.embed_dim=8 model.depth=1 model.num_heads=1 data.batch_size=64 train.threads=1 schedule.warmup_epochs=0 "
    "train.save_every_steps=1"
)
GRID = f"""tier,cell,config,overrides
1,first,../digits/inline_deit_nano,{SMALL} train.epochs=5
2,second,../digits/inline_deit_nano,{SMALL} train.epochs=1 model.attention=softmax
"""


def queue(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "scripts/run_grid.py", "--grid", folder / "grid.csv", "--runs", folder / "runs"]
    command += ["--results", folder / "results", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate()
    return process.returncode, out


def test_every_cell_has_a_config_that_loads_and_a_name_of_its_own():
    recipes = {json.dumps(run_grid.recipe(cell.load()), sort_keys=True) for cell in CELLS}
    assert len(recipes) == len({cell.name for cell in CELLS}) == len(CELLS)
    assert [cell.tier for cell in CELLS] == sorted(cell.tier for cell in CELLS)


def test_places_threads_and_parts_of_a_batch_are_no_part_of_the_recipe():
    parts = ("data.batch_size=32", "train.accumulate=2")
    plain, moved, longer, divided = (
        run_grid.Cell(1, "x", "deit_nano", overrides).load()
        for overrides in ((), ("data.root=/elsewhere", "train.threads=1", "output=/there"), ("train.epochs=99",), parts)
    )
    assert run_grid.recipe(plain) == run_grid.recipe(moved) == run_grid.recipe(divided, 2) != run_grid.recipe(longer)


def test_every_kept_run_has_the_recipe_of_its_row():
    """results/cifar10/README.md explains the two that are in no row."""
    cells = {cell.name: cell for cell in CELLS}
    kept = {path.name: path for path in (ROOT / "results/cifar10/runs").iterdir()}
    assert kept.keys() - cells.keys() == {"first_recipe_inline_deit_nano", "first_recipe_mixing_inline_deit_nano"}
    for name in kept.keys() & cells.keys():
        assert run_grid.is_complete(kept[name], cells[name].load()), name


def test_stops_at_sigterm_continues_and_counts_nothing_twice(tmp_path, capsys):
    (tmp_path / "grid.csv").write_text(GRID)
    process, metrics = queue(tmp_path), tmp_path / "runs/first/metrics.csv"
    while process.poll() is None and not metrics.is_file():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out = output(process)
    assert code == 75 and "first: stopped" in out and not (tmp_path / "results").exists()
    places = [f"--{name}={tmp_path / name}" for name in ("runs", "results")]
    assert run_grid.main([f"--grid={tmp_path}/grid.csv", *places, "--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "begun" in first and second.endswith("missing") and output(queue(tmp_path, "second"))[0] == 0
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == ["second"]
    code, out = output(queue(tmp_path))
    assert code == 0 and "second" not in out
    for name, epochs in (("first", 5), ("second", 1)):
        kept = tmp_path / "results" / name
        assert sorted(p.name for p in kept.iterdir()) == sorted(run_grid.FILES)
        assert json.loads((kept / "summary.json").read_text())["epochs"] == epochs
        assert len((kept / "metrics.csv").read_text().splitlines()) == epochs + 1
    times = [os.stat(p).st_mtime for p in sorted((tmp_path / "runs").rglob("*"))]
    assert output(queue(tmp_path)) == (0, "")
    assert [os.stat(p).st_mtime for p in sorted((tmp_path / "runs").rglob("*"))] == times


def test_an_unknown_cell_is_refused():
    with pytest.raises(UserError, match="inline_deit_nano"):
        run_grid.main(["inline_deit_nan"])
