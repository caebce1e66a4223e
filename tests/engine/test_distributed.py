"""Two processes: the same weights as one with the double batch, every image counted once, nobody left behind."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ppattn import weights
from ppattn.config import make_config, to_yaml
from ppattn.engine import trainer
from ppattn.errors import UserError
from ppattn.runtime import processes as distributed
from ppattn.settings import Config
from tests.helpers.runs import tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tools" / "train.py"
SLOW = ROOT / "tests/helpers/slow_steps.py"


def settings(folder, batch: int, **train) -> Config:
    """Nothing random in the model, so that one process can do what two do. 23 steps of 60 images."""
    train = {"epochs": 3, "seed": 7, "max_steps": 50, "log_every": 1} | train
    return tiny(folder, data={"batch_size": batch}, train=train, optimizer={"lr": 0.05, "weight_decay": 1e-4})


def launch(folder: Path, *arguments) -> subprocess.Popen:
    call = [sys.executable, "-m", "paddle.distributed.launch", *map(str, arguments)]
    environ = os.environ | {"PADDLE_DISTRI_BACKEND": "gloo", "PYTHONWARNINGS": "ignore"}
    with (folder / "launcher.txt").open("a") as output:
        return subprocess.Popen(call, cwd=folder, env=environ, stdout=output, stderr=output)


def launcher(folder: Path, *arguments, legacy: bool = False) -> subprocess.Popen:
    """Two processes on the CPU; `--backend` makes Paddle use its older launcher, which knows no exit codes."""
    backend = ["--backend", "gloo"] if legacy else []
    return launch(folder, "--nproc_per_node", 2, *backend, "--log_dir", folder / "launch", *arguments)


def train(folder: Path, config: Config, *arguments, script: tuple = (TRAIN,), legacy: bool = False) -> subprocess.Popen:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    return launcher(folder, *script, "-c", path, *arguments, legacy=legacy)


def finish(process: subprocess.Popen, folder: Path) -> int:
    code = process.wait()
    return code if code == 0 else (code, (folder / "launcher.txt").read_text()[-3000:])


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """The process ids of the ranks under a launcher."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            rank = next((e[18:] for e in environ if e.startswith(b"PADDLE_TRAINER_ID=")), None)
            if rank is not None and parent == process.pid:
                found[int(rank)] = int(entry.name)
    return found


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        if (run / "log.txt").exists() and (run / "log.txt").read_text().count(" step ") >= step:
            return
        time.sleep(0.02)
    raise AssertionError((run.parent / "launcher.txt").read_text()[-3000:])


def state(run: Path) -> tuple[dict, dict]:
    return weights.read(run / "checkpoints" / "latest")


def assert_same_state(one: Path, other: Path) -> None:
    tensors, others = state(one)[0], state(other)[0]
    assert all(np.array_equal(others[name], tensors[name]) for name in tensors)


def plain(tensors: dict) -> dict:
    return {name: tensor for name, tensor in tensors.items() if "/" not in name}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_is_no_full_disk(rank, monkeypatch):
    """Errors of connections are `OSError`s, which training takes for those of files."""
    here, there = multiprocessing.Pipe()
    monkeypatch.setattr(distributed, "TIMEOUT", 0.0)
    with pytest.raises(UserError, match="waited 0 s"):
        distributed.Processes(rank, 2, [here]).sum(1.0)
    there.close()
    with pytest.raises(UserError, match="is gone"):
        distributed.Processes(rank, 2, [here]).sum(1.0)
    with pytest.raises(UserError, match="is gone"):
        distributed.Processes(rank, 2, [here]).sum(np.zeros(10**6))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """An undisturbed run of 50 steps on two processes."""
    folder = tmp_path_factory.mktemp("two")
    assert finish(train(folder, settings(folder / "run", 30)), folder) == 0
    return folder / "run"


def test_two_processes_are_one_with_the_double_batch(two, tmp_path):
    trainer.train(settings(tmp_path, 60))
    (one, about_one), (both, about_both) = state(tmp_path), state(two)
    assert about_one["progress"]["step"] == about_both["progress"]["step"] == 50
    for name, tensor in plain(one).items():
        assert np.abs(both[name] - tensor).max() <= 1e-5 * np.abs(tensor).max(), name
    rows_one, rows_both = (about["progress"]["history"] for about in (about_one, about_both))
    for key in ("train_loss", "val_loss", "top1"):  # every image is counted once
        assert [row[key] for row in rows_both] == pytest.approx([row[key] for row in rows_one], rel=1e-5)


def test_one_folder_one_log_and_one_per_further_process(two):
    assert {"log.txt", "log.rank1.txt", "metrics.csv", "summary.json"} <= {path.name for path in two.iterdir()}
    assert (two / "log.txt").read_text().count("epoch 1 step 5/23") == 1
    assert json.loads((two / "env.json").read_text())["processes"] == 2


def test_losses_of_adamw_on_two_processes(tmp_path):
    """Whose first steps have the sign of the gradient, whatever its size."""
    tree = settings(tmp_path / "run", 30).model_dump()
    tree["optimizer"] |= {"name": "adamw", "lr": 1e-3}
    assert finish(train(tmp_path, make_config(tree)), tmp_path) == 0
    trainer.train(make_config(tree | {"output": str(tmp_path / "one"), "data": tree["data"] | {"batch_size": 60}}))
    one, both = (state(tmp_path / name)[1]["progress"]["history"] for name in ("one", "run"))
    assert [row["train_loss"] for row in both] == pytest.approx([row["train_loss"] for row in one], rel=1e-5)


def test_a_process_may_be_later_than_gloo_waits(two, tmp_path):
    """And recomputed blocks change nothing."""
    tree = settings(tmp_path / "run", 30).model_dump()
    tree["model"]["recompute"] = True
    (tmp_path / "config.yaml").write_text(to_yaml(make_config(tree)))
    assert finish(launcher(tmp_path, ROOT / "tests/helpers/distributed_job.py", "one_is_late", tmp_path), tmp_path) == 0
    assert_same_state(two, tmp_path / "run")


def test_a_bad_batch_of_one_process_ends_both(tmp_path):
    """The replay, on two processes again, finds it on the process that has it."""
    config = settings(tmp_path / "run", 30, accumulate=2, max_steps=15, save_every_steps=2)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    job = ROOT / "tests/helpers/distributed_job.py"
    assert finish(launcher(tmp_path, job, "one_is_poisoned", tmp_path), tmp_path) != 0
    assert "The loss is not finite at step 4 of epoch 1." in (tmp_path / "run" / "log.rank1.txt").read_text()
    tensors, about = state(tmp_path / "run")
    assert about["progress"]["step"] == 2
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    assert finish(launcher(tmp_path, job, "poisoned_again", tmp_path), tmp_path) == 0
    told = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert all("step 4 of epoch 1 (step 4 of the run), micro-batch 2 of 2" in text for text in told)
    assert "on another process" in told[0] and "the images themselves are not finite" in told[1]
    with np.load(tmp_path / "run" / "nonfinite_step4_batch7_rank1.npz") as kept:
        assert np.argwhere(np.isnan(kept["images"])).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("victim", ["other", "launcher", "legacy launcher"])
def test_sigterm_stops_both_at_the_same_step(two, tmp_path, victim):
    run = tmp_path / "run"
    process = train(tmp_path, settings(run, 30), script=(SLOW, 26), legacy=victim.startswith("legacy"))
    wait_for_step(run, 27, process)
    ranks = ranks_of(process)
    os.kill(ranks[1] if victim == "other" else process.pid, signal.SIGTERM)
    code = process.wait()
    while any(Path(f"/proc/{rank}").exists() for rank in ranks.values()):
        time.sleep(0.1)  # the legacy launcher dies before its processes
    assert code == {"launcher": 15, "legacy launcher": -15, "other": 75}[victim]
    logs = [(run / name).read_text() for name in ("log.txt", "log.rank1.txt")]
    stops = [text.splitlines()[-1].split(" after step ")[1] for text in logs]
    assert stops[0] == stops[1]
    epoch, step = divmod(state(run)[1]["progress"]["step"] - 1, 23)
    assert stops[0].startswith(f"{step + 1} of epoch {epoch + 1};")
    assert finish(train(tmp_path, settings(run, 30), "--resume", "auto"), tmp_path) == 0
    assert_same_state(two, run)


def node(number: int, port: int, folder: Path, config: Config, *script) -> subprocess.Popen:
    """The launcher of one machine of two with a process each; both are this one, under its loopback address."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    place = ["--nnodes", 2, "--rank", number, "--master", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
    logs = ["--nproc_per_node", 1, "--log_dir", folder / f"launch{number}"]
    return launch(folder, *place, *logs, *script, "-c", path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_machines_one_of_which_is_lost(two, tmp_path):
    """The other one ends by itself; both start again, and the weights are those of the undisturbed run."""
    run = tmp_path / "run"
    config, port = settings(run, 30, save_every_steps=1), free_port()
    nodes = [node(number, port, tmp_path, config, SLOW, 29) for number in (0, 1)]
    wait_for_step(run, 30, nodes[0])
    for pid in (nodes[0].pid, *ranks_of(nodes[0]).values()):
        os.kill(pid, signal.SIGKILL)
    assert [process.wait() for process in nodes][1] != 0
    steps = (run / "log.txt").read_text().count(" step ")
    port = free_port()
    nodes = [node(number, port, tmp_path, config, TRAIN, "--resume", "auto") for number in (0, 1)]
    assert [finish(process, tmp_path) for process in nodes] == [0, 0]
    assert 30 <= steps < 50 and "resumed from" in (run / "log.txt").read_text()
    assert_same_state(two, run)


@pytest.mark.parametrize(
    ("other", "words"), [(1, "different checkpoints in"), (1 << 32, "different images or labels in")]
)
def test_processes_that_see_different_files_are_refused(tmp_path, monkeypatch, other, words):
    """As told by a second process whose numbers are larger by `other` where they are large enough."""

    class Two(distributed.Processes):
        def sum(self, values):
            values = np.asarray(values, "float64")
            return 2 * values + (other if other == 1 or values.max() > 1 << 30 else 0)

    monkeypatch.setattr(distributed, "join", lambda: Two(0, 2))
    with pytest.raises(UserError, match=words):
        trainer.train(settings(tmp_path / "run", 30))


def test_another_number_of_processes_is_refused(two, tmp_path):
    with pytest.raises(UserError, match="the number of processes was 2 .* and is 1 now"):
        trainer.train(settings(tmp_path, 30), resume=str(two))
