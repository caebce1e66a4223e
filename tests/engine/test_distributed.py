"""Two processes: the same weights as one with the double batch, every image counted once, nobody left behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ppattn import weights
from ppattn.engine import trainer
from ppattn.errors import UserError
from ppattn.runtime import processes as distributed
from ppattn.settings import Config
from tests.helpers.runs import read_json, state, tiny, written

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def settings(folder, batch: int, model=None, optimizer=None, distill=None, **train) -> Config:
    """Nothing random in the model, so that one process can do what two do. 23 steps of 60 images."""
    train = {"epochs": 3, "seed": 7, "max_steps": 50, "log_every": 1} | train
    optimizer = {"lr": 0.05, "weight_decay": 1e-4} | (optimizer or {})
    sections = {"model": model or {}, "optimizer": optimizer, "distill": distill or {}, "train": train}
    return tiny(folder, data={"batch_size": batch}, **sections)


def disturbed(how: str = "slow", value: int = 99, verb: str = "train") -> tuple:
    """A script and its first arguments; by default nothing is disturbed, but pictures are left out."""
    return ROOT / "tests/helpers/disturbed.py", how, value, verb


def launch(folder: Path, *arguments) -> subprocess.Popen:
    call = [sys.executable, "-m", "paddle.distributed.launch", *map(str, arguments)]
    environ = os.environ | {"PADDLE_DISTRI_BACKEND": "gloo", "PYTHONWARNINGS": "ignore"}
    with (folder / "launcher.txt").open("a") as output:
        return subprocess.Popen(call, cwd=folder, env=environ, stdout=output, stderr=output)


def start(folder: Path, *call, legacy: bool = False) -> subprocess.Popen:
    """Two processes on the CPU; `--backend` makes Paddle use its older launcher, which knows no exit codes."""
    backend = ["--backend", "gloo"] if legacy else []
    return launch(folder, "--nproc_per_node", 2, *backend, "--log_dir", folder / "launch", *call)


def finish(process: subprocess.Popen, folder: Path) -> int:
    code = process.wait()
    return code if code == 0 else (code, (folder / "launcher.txt").read_text()[-3000:])


def train(config: Config, *arguments, script: tuple = disturbed()) -> int:
    folder = Path(config.output).parent
    return finish(start(folder, *script, "-c", written(config), *arguments), folder)


def ranks_of(process: subprocess.Popen) -> dict[str, int]:
    """The process ids of the ranks under a launcher."""
    return {one.environ()["PADDLE_TRAINER_ID"]: one.pid for one in psutil.Process(process.pid).children()}


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        if (run / "log.txt").exists() and (run / "log.txt").read_text().count(" step ") >= step:
            return
        time.sleep(0.02)
    raise AssertionError((run.parent / "launcher.txt").read_text()[-3000:])


def progress(run: Path) -> dict:
    return weights.read(run / "checkpoints" / "latest")[1]["progress"]


def assert_same_losses(one: Path, other: Path) -> None:
    """Every image is counted once."""
    for key in ("train_loss", "val_loss", "top1"):
        found, expected = ([row[key] for row in progress(run)["history"]] for run in (other, one))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_is_no_full_disk(rank, monkeypatch):
    """Errors of connections are `OSError`s, which training takes for those of files."""
    here, there = multiprocessing.Pipe()
    monkeypatch.setattr(distributed, "TIMEOUT", 0.0)
    with pytest.raises(UserError, match="waited 0 s"):
        distributed.Processes(rank, 2, [here]).sum(1.0)
    there.close()
    for values in (1.0, np.zeros(10**6)):
        with pytest.raises(UserError, match="is gone"):
            distributed.Processes(rank, 2, [here]).sum(values)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """An undisturbed run of 50 steps on two processes."""
    run = tmp_path_factory.mktemp("two") / "run"
    assert train(settings(run, 30), script=(ROOT / "tools/train.py",)) == 0
    return run


def test_two_processes_are_one_with_the_double_batch(two, tmp_path):
    trainer.train(settings(tmp_path / "one", 60))
    one, both = state(tmp_path / "one"), state(two)
    for name in (name for name in one if "/" not in name):
        assert np.abs(both[name] - one[name]).max() <= 1e-5 * np.abs(one[name]).max(), name
    assert progress(two)["step"] == 50
    assert_same_losses(tmp_path / "one", two)
    assert {"log.txt", "log.rank1.txt", "metrics.csv", "summary.json"} <= {path.name for path in two.iterdir()}
    assert (two / "log.txt").read_text().count("epoch 1 step 5/23") == 1
    assert read_json(two / "env.json")["processes"] == 2


def test_a_process_may_be_later_than_gloo_waits(two, tmp_path):
    """With a teacher, blocks that are recomputed, and AdamW, whose first steps have the sign of the gradient."""
    given = {"optimizer": {"name": "adamw", "lr": 1e-3}, "distill": {"teacher": str(two), "blocks": 0.5}}
    model = {"attention": "inline", "recompute": True}
    assert train(settings(tmp_path / "two", 30, model=model, **given), script=disturbed("late", 2)) == 0
    trainer.train(settings(tmp_path / "one", 60, model={"attention": "inline"}, **given))
    assert_same_losses(tmp_path / "one", tmp_path / "two")


def test_a_bad_batch_of_one_process_ends_both(tmp_path):
    """The replay, on two processes again, finds it on the process that has it."""
    run = tmp_path / "run"
    config = settings(run, 30, accumulate=2, max_steps=15, save_every_steps=2)
    assert train(config, script=disturbed("poisoned", 7)) != 0
    assert "The loss is not finite at step 4 of epoch 1." in (run / "log.rank1.txt").read_text()
    assert progress(run)["step"] == 2 and all(np.isfinite(tensor).all() for tensor in state(run).values())
    assert finish(start(tmp_path, *disturbed("poisoned", 7, "debug"), "--run", run), tmp_path) == 0
    told = [(tmp_path / f"launch/workerlog.{rank}").read_text() for rank in (0, 1)]
    assert all("step 4 of epoch 1 (step 4 of the run), micro-batch 2 of 2" in text for text in told)
    assert "on another process" in told[0] and "the images themselves are not finite" in told[1]
    with np.load(run / "nonfinite_step4_batch7_rank1.npz") as kept:
        assert np.argwhere(np.isnan(kept["images"])).tolist() == [[0, 0, 0, 0]]


def test_sigterm_stops_both_at_the_same_step(two, tmp_path):
    """Sent to one of them, to the launcher and to the older launcher, which dies before its processes."""
    run = tmp_path / "run"
    for step, victim, expected in ((26, "1", 75), (32, "launcher", 15), (38, "older launcher", -15)):
        call = [*disturbed("slow", step), "-c", written(settings(run, 30)), "--resume", "auto"]
        process = start(tmp_path, *call, legacy=victim == "older launcher")
        wait_for_step(run, step + 1, process)
        ranks = ranks_of(process)
        os.kill(ranks.get(victim, process.pid), signal.SIGTERM)
        assert process.wait() == expected
        while any(map(psutil.pid_exists, ranks.values())):
            time.sleep(0.1)
        stops = [(run / name).read_text().splitlines()[-1] for name in ("log.txt", "log.rank1.txt")]
        epoch, last = divmod(progress(run)["step"] - 1, 23)
        assert all(f" after step {last + 1} of epoch {epoch + 1};" in text for text in stops)
    assert train(settings(run, 30), "--resume", "auto") == 0
    np.testing.assert_equal(state(run), state(two))


def node(number: int, port: int, folder: Path, *call) -> subprocess.Popen:
    """The launcher of one machine of two with a process each; both are this one, under its loopback address."""
    place = ["--nnodes", 2, "--rank", number, "--master", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
    return launch(folder, *place, "--nproc_per_node", 1, "--log_dir", folder / f"launch{number}", *call)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_machines_one_of_which_is_lost(two, tmp_path):
    """The other one ends by itself; both start again, and the weights are those of the undisturbed run."""
    run, port = tmp_path / "run", free_port()
    given = ["-c", written(settings(run, 30, save_every_steps=1))]
    nodes = [node(number, port, tmp_path, *disturbed("slow", 29), *given) for number in (0, 1)]
    wait_for_step(run, 30, nodes[0])
    for pid in (nodes[0].pid, *ranks_of(nodes[0]).values()):
        os.kill(pid, signal.SIGKILL)
    assert [process.wait() for process in nodes][1] != 0
    steps, port = (run / "log.txt").read_text().count(" step "), free_port()
    nodes = [node(number, port, tmp_path, *disturbed(), *given, "--resume", "auto") for number in (0, 1)]
    assert [finish(process, tmp_path) for process in nodes] == [0, 0]
    assert 30 <= steps < 50 and "resumed from" in (run / "log.txt").read_text()
    np.testing.assert_equal(state(run), state(two))


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
