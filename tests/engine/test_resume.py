"""Nothing lost: a run that is killed, stopped or damaged goes on to the same weights, bit for bit."""

import contextlib
import errno
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import paddle
import pytest

from ppattn import weights
from ppattn.cli import guarded, main
from ppattn.config import make_config
from ppattn.engine import build, trainer
from ppattn.engine.resume import RunFacts, check_same
from ppattn.engine.signals import STOPS, Signals
from ppattn.errors import Preempted, UserError
from ppattn.settings import Config
from ppattn.trained import load_run, open_weights
from tests.helpers.runs import full_disk, read_json, table, tiny, written

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("seconds", "images_per_second", "step_ms", "data_ms")


def everything(folder, data=None, optimizer=None, **train) -> Config:
    """Small, with all that has a state or draws random numbers: dropout, drop path, mixing, EMA, accumulation, clip."""
    steady = {"epochs": 3, "seed": 7, "ema": 0.9, "ema_warmup": True, "clip_grad": 1.0, "accumulate": 3}
    return tiny(
        folder,
        model={"name": "deit_nano", "drop_rate": 0.1, "drop_path_rate": 0.2},
        data={"batch_size": 60} | (data or {}),
        augment={"pad_crop": 1, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0},
        train=steady | train,
        optimizer={"name": "adamw", "weight_decay": 0.05} | (optimizer or {}),
        schedule={"warmup_epochs": 0.5},
        loss={"label_smoothing": 0.1},
    )


def train(folder, resume=None, **settings) -> dict:
    return trainer.train(everything(folder, **settings), resume=resume and str(resume))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """23 micro-batches per epoch: 8 steps, the last of two micro-batches; 24 steps in all."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return folder


def outcome(run: Path) -> tuple:
    """Weights, optimizer, average, best checkpoint, position, best metric and all rows but their timings."""
    (latest, about), (best, about_best) = (weights.read(run / "checkpoints" / name) for name in ("latest", "best"))
    position = [about["progress"][key] for key in ("step", "best_top1", "best_epoch")]
    found = {key: about_best["metrics"][key] for key in ("top1", "loss")}
    rows = [{key: row[key] for key in row if key not in TIMES} for row in table(run / "metrics.csv")]
    return latest, best, about["ema_updates"], position, found, rows


def assert_same_run(one: Path, other: Path) -> None:
    np.testing.assert_equal(outcome(one), outcome(other))


def contents(folder: Path, pattern: str = "*") -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob(pattern) if path.is_file()}


def test_stopped_by_max_steps_and_continued(undisturbed, tmp_path):
    """In an epoch, at its end and not at all; resuming a finished run changes nothing."""
    for last in (3, 8, 9, 17, None, None):
        summary = train(tmp_path, "auto", max_steps=last)
    assert summary["epochs"] == 3
    assert_same_run(undisturbed, tmp_path)


class CountingScaler(paddle.amp.GradScaler):
    """One that also works on a CPU; every step has another scale."""

    updates = 0

    def scale(self, loss):
        return loss * (1.0 + 0.1 * self.updates)

    def update(self):
        self.updates += 1

    def state_dict(self):
        return {"updates": np.array([self.updates])}

    def load_state_dict(self, state):
        self.updates = state["updates"][0]


def test_the_loss_scaler_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "mixed_precision", lambda _: (contextlib.nullcontext, CountingScaler(enable=False)))
    train(tmp_path / "one", epochs=1, clip_grad=None)
    for last in (3, None):
        train(tmp_path / "two", "auto", epochs=1, clip_grad=None, max_steps=last)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    steps = read_json(tmp_path / "two" / "summary.json")["steps"]
    assert steps > 3 and weights.read(tmp_path / "two" / "checkpoints" / "latest")[1]["scaler"] == {"updates": [steps]}


def test_an_evaluation_for_max_steps_alone_leaves_no_trace(tmp_path, monkeypatch):
    """At the end of the first epoch, which is not evaluated, and inside the third one; it is the best of all."""
    honest, accuracies = trainer.evaluate, iter([0.5, 0.4, 1.0, 1.0, 0.5, 1.0, 0.4])

    def evaluate(*arguments):
        result = honest(*arguments)
        result.metrics["top1"] = next(accuracies)
        return result

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    train(tmp_path / "one", eval_every=2)
    for last in (8, 8, 19, None):
        summary = train(tmp_path / "two", "auto", eval_every=2, max_steps=last)
        assert summary["top1"] is not None and (tmp_path / "two" / "checkpoints" / "best.safetensors").exists()
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_killed_data_worker_ends_the_run_in_a_sentence(undisturbed, tmp_path):
    honest, given = trainer.backward, {"data": {"num_workers": 2}, "save_every_steps": 1}

    def backward(run, batch, parts):
        if batch.number == 23 + 9:
            for worker in multiprocessing.active_children():
                worker.kill()
        return honest(run, batch, parts)

    with patch.object(trainer, "backward", backward), pytest.raises(UserError, match="workers was killed"):
        train(tmp_path, **given)
    train(tmp_path, "auto", **given)
    assert_same_run(undisturbed, tmp_path)


@pytest.mark.parametrize("where", ["half a file", "before the first rename", "between the renames"])
def test_killed_inside_a_checkpoint_write(undisturbed, tmp_path, where):
    """The seventh write dies: with half of its temporary file written, or around the renames."""
    run, script = tmp_path / "run", ROOT / "tests/helpers/disturbed.py"
    config = written(everything(run, save_every_steps=1))
    call = [sys.executable, str(script), "dying", f"{where} 7", "train", "-c", config]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    train(run, "auto", save_every_steps=1)
    assert_same_run(undisturbed, run)
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == {"best.safetensors", "latest.safetensors", "previous.safetensors"}


@pytest.fixture
def handlers():
    """Signals as a terminal leaves them, and afterwards as the tests have them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped_run(folder: Path, step: int, number: int, **settings) -> int:
    """Exit code of a training whose process gets a signal after this step."""
    honest = trainer.update

    def update(run):
        honest(run)
        if run.state.progress.step == step:
            os.kill(os.getpid(), number)

    with patch.object(trainer, "update", update):
        return main(["train", "-c", written(everything(folder, **settings))])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_saves_and_leaves_with_75(undisturbed, tmp_path, handlers, capsys, name):
    assert stopped_run(tmp_path / "run", 10, getattr(signal, name), save_every_minutes=None) == 75
    errors = capsys.readouterr().err
    assert f"stopped by {name}" in errors and "--resume auto" in errors and "Traceback" not in errors
    train(tmp_path / "run", "auto", save_every_minutes=None)
    assert_same_run(undisturbed, tmp_path / "run")


def test_nohup_keeps_a_run_from_ending_with_its_terminal(tmp_path, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stopped_run(tmp_path / "run", 2, signal.SIGHUP, epochs=1) == 0


def test_an_error_and_a_signal_during_the_evaluation(undisturbed, tmp_path, monkeypatch):
    honest, calls = trainer.evaluate, itertools.count(0)

    def evaluate(*arguments):
        if (call := next(calls)) == 0:
            raise UserError("no memory")
        if call == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments)

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    with pytest.raises(UserError, match="no memory"):
        train(tmp_path)
    with pytest.raises(Preempted, match="evaluation after epoch 2"):
        train(tmp_path, tmp_path)
    train(tmp_path, "auto")
    assert_same_run(undisturbed, tmp_path)


def test_a_damaged_latest_falls_back_to_previous(undisturbed, tmp_path):
    """Where that is damaged, too, nothing is overwritten."""
    train(tmp_path, max_steps=13, save_every_steps=5)
    latest, previous = (tmp_path / f"checkpoints/{name}.safetensors" for name in ("latest", "previous"))
    data, before = latest.read_bytes(), previous.read_bytes()
    changed = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
    for damaged in (data[: len(data) * 2 // 3], b"", b"PK\x03\x04 something else altogether", changed):
        latest.write_bytes(damaged)
        with pytest.raises(UserError, match="latest.safetensors"):
            train(tmp_path, tmp_path)
    previous.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="No checkpoint in .* can be read"):
        train(tmp_path, "auto")
    assert (latest.read_bytes(), previous.read_bytes()) == (changed, b"x" * 100)
    previous.write_bytes(before)
    train(tmp_path, "auto")
    log = (tmp_path / "log.txt").read_text()
    assert "Trying the checkpoint before it" in log and f"resumed from {previous}" in log
    assert_same_run(undisturbed, tmp_path)


def test_a_run_is_extended_by_a_new_one(undisturbed, tmp_path, caplog):
    """Another rate and number of epochs; it begins where the other ended, and resumes bit for bit itself."""
    given, whole, parts = {"epochs": 1, "optimizer": {"lr": 0.002}}, tmp_path / "whole", tmp_path / "parts"
    for folder, stop in ((whole, 3), (parts, 2)):
        trainer.train(everything(folder, max_steps=stop, **given), extend=str(undisturbed))
    train(parts, "auto", max_steps=3, **given)
    assert_same_run(whole, parts)
    before, about = weights.read(undisturbed / "checkpoints/latest")
    for folder in (whole, parts):
        origin = read_json(folder / "env.json")["extends"]
        assert origin["steps"] == 24 and origin["checkpoint"].startswith(str(undisturbed))
    assert "trained on pixels" not in caplog.text
    first = build.build_run(everything(tmp_path / "x", {"mean": [0.5] * 3}, **given), None, str(undisturbed)).state
    assert "trained on pixels of mean and std [[0.3053," in caplog.text and "not [[0.5, 0.5, 0.5]," in caplog.text
    assert first.progress.step == 0 and first.ema.updates == about["ema_updates"]
    found = {name: tensor.numpy() for name, tensor in first.tensors().items() if "/" not in name}
    assert all(np.array_equal(found[name], before[name]) for name in found)
    with pytest.raises(UserError, match="optimizer.name was 'adamw' there and is 'sgd' here"):
        trainer.train(everything(tmp_path / "y", optimizer={"name": "sgd"}), extend=str(undisturbed))


@pytest.mark.parametrize("key", ["extend", "resume"])
def test_what_another_run_began_is_not_lost_by_a_kill_before_the_first_save(undisturbed, tmp_path, key):
    train(tmp_path / "begun", max_steps=5)
    given = {key: str(undisturbed if key == "extend" else tmp_path / "begun")}
    whole, parts = (everything(tmp_path / name, max_steps=7) for name in ("whole", "parts"))
    trainer.train(whole, **given)
    with patch.object(trainer, "backward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        trainer.train(parts, **given)
    with pytest.raises(UserError, match="resume and extend exclude each other"):
        trainer.train(parts, resume="auto", extend=str(undisturbed))
    trainer.train(parts, resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_resume_into_another_folder(undisturbed, tmp_path):
    """A run that lies there is moved aside, unless it is the one that goes on."""
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, max_steps=8)
    train(tmp_path / "whole", one)
    assert_same_run(undisturbed, tmp_path / "whole")
    train(two, max_steps=1)
    before = contents(two / "checkpoints")
    train(two, one / "checkpoints", max_steps=9)
    assert contents(tmp_path / "two.1/checkpoints") == before
    assert f"was renamed to {two}.1" in (two / "log.txt").read_text()
    (two / "checkpoints").rename(disk := tmp_path / "another disk")
    (two / "checkpoints").symlink_to(disk)
    train(two, two / "checkpoints/latest", max_steps=10)
    assert not (tmp_path / "two.2").exists()


def test_a_second_training_in_a_folder_is_refused(tmp_path):
    run = tmp_path / "run"
    train(run, max_steps=1)
    before = contents(tmp_path)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    call = [sys.executable, "-c", hold, str(run / "log.txt")]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for resume in (None, "auto"):
            with pytest.raises(UserError, match="Another training is writing to"):
                train(run, resume, max_steps=2)
        assert contents(tmp_path) == before
        other.kill()
    train(run, "auto", max_steps=2)


@pytest.mark.parametrize(
    ("key", "values"),
    [("model.attention_options.kernel", ({}, {"attention_options": {"kernel": "relu"}})),
     ("augment.random_resized_crop.ratio", ({}, {"random_resized_crop": {}})),
     ("model.freeze", ({}, {"freeze": ["head"]}))],
)  # fmt: skip
def test_settings_that_only_one_side_has_are_compared(key, values):
    section = key.split(".")[0]
    facts = [RunFacts(config=make_config({section: value}).model_dump(), world=1, runtime={}) for value in values]
    for saved, now in (facts, facts[::-1]):
        with pytest.raises(UserError, match=f"Cannot resume: {key} was"):
            check_same(saved, now)
    check_same(facts[0], facts[0].model_copy(update={"config": facts[0].config | {"extra": None}}))


def photos(folder: Path, **settings) -> dict:
    """Three steps of 2 x 2 images an epoch."""
    return {"data": {"name": "folder", "root": str(folder), "batch_size": 2} | settings, "accumulate": 2}


FIRST, NEW = "train/ant/0.png", "train/ant/9.png"
CHANGES = {
    "removed": lambda root: [path.unlink() for path in [*root.glob("train/ant/*"), *root.glob("train/bee/*")][1:8]],
    "added": lambda root: shutil.copy(root / FIRST, root / NEW),
    "renamed": lambda root: (root / FIRST).rename(root / NEW),
    "moved to another class": lambda root: (root / FIRST).rename(root / "train/bee/9.png"),
    "one for validation": lambda root: (root / "val/ant/0.png").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_refused_and_may_be_accepted(folder, tmp_path, change):
    run = tmp_path / "run"
    train(run, **photos(folder), max_steps=5)  # in the second epoch
    before = contents(run / "checkpoints")
    CHANGES[change](folder)
    with pytest.raises(UserError, match=r"the data has changed \(\d+ .* images .* data\.changed=accept"):
        train(run, "auto", **photos(folder))
    assert contents(run / "checkpoints") == before
    summary = train(run, "auto", **photos(folder, changed="accept"))
    assert "the data has changed" in (run / "log.txt").read_text()
    rows = table(run / "metrics.csv")
    assert [row["epoch"] for row in rows] == ["1", "2", "3"] and summary["epochs"] == 3
    assert len({row["train_loss"] for row in rows}) == 3  # every epoch was trained


def test_more_data_after_a_kill_in_the_evaluation(folder, tmp_path):
    """The epoch counts as done; the warm-up of the average, which follows the number of steps, stays as it was."""
    given = {"save_every_steps": 3, "ema": 0.6, "ema_warmup": None} | photos(folder, changed="accept")
    with patch.object(trainer, "evaluate_model", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", **given)
    for number in range(20, 30):
        shutil.copy(folder / FIRST, folder / f"train/ant/{number}.png")
    assert train(tmp_path / "run", "auto", **given)["epochs"] == 3 == len(table(tmp_path / "run" / "metrics.csv"))


def test_the_same_data_elsewhere_is_the_same(folder, tmp_path):
    train(tmp_path / "run", **photos(folder), max_steps=5)
    given = photos(folder.rename(tmp_path / "elsewhere")) | {"max_steps": 6}
    train(tmp_path / "run", "auto", **given)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "5 steps are done" in log and "the data has changed" not in log
    train(tmp_path / "at_once", **given)
    assert_same_run(tmp_path / "at_once", tmp_path / "run")


def test_another_processor_is_named_in_the_log(tmp_path):
    train(tmp_path, max_steps=2)
    tensors, metadata = weights.read(latest := tmp_path / "checkpoints" / "latest.safetensors")
    other = {"device": "Another processor", "MKL_DEBUG_CPU_TYPE": "4"}
    weights.save(latest, tensors, metadata | {"runtime": metadata["runtime"] | other})
    train(tmp_path, "auto", max_steps=3)
    log = (tmp_path / "log.txt").read_text()
    assert f"device was Another processor and is {metadata['runtime']['device']}" in log
    assert "MKL_DEBUG_CPU_TYPE was 4 and is" in log and "Paddle was" not in log


def test_a_full_disk_leaves_the_last_good_checkpoint(undisturbed, tmp_path, capsys):
    """Small files and `best` pass, a training state does not."""
    run = tmp_path / "run"
    train(run, max_steps=13)
    before = contents(run / "checkpoints", "[!b]*")
    with full_disk((run / "checkpoints/latest.safetensors").stat().st_size // 2):
        assert main(["train", "-c", written(everything(run)), "--resume", "auto"]) == 2
    told = capsys.readouterr().err
    assert "next.safetensors: the disk is full" in told and "checkpoints are whole: make room" in told
    assert contents(run / "checkpoints", "[!b]*") == before and "Traceback" not in told
    train(run, "auto")
    assert_same_run(undisturbed, run)


def test_a_run_that_was_stopped_in_its_first_save_continues_in_its_folder(tmp_path):
    """Nothing can be resumed then, and what else lies in the folder must stay there."""
    (tmp_path / "run/linearize").mkdir(parents=True)
    broken = OSError(errno.EIO, "Input/output error")
    with patch.object(os, "fsync", side_effect=broken), pytest.raises(OSError, match="next.safetensors"):
        train(tmp_path / "run", "auto", max_steps=2)
    assert [*(tmp_path / "run/checkpoints").iterdir()] == []
    train(tmp_path / "run", "auto", max_steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and (tmp_path / "run/linearize").is_dir()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_disk_that_is_full_at_the_log(tmp_path, monkeypatch):
    honest = trainer.train_steps

    def train_steps(run):
        run.outputs.log.file.close()
        run.outputs.log.file = open("/dev/full", "a")  # noqa: SIM115
        return honest(run)

    monkeypatch.setattr(trainer, "train_steps", train_steps)
    with pytest.raises(UserError, match="the disk is full"):
        train(tmp_path / "run", max_steps=2, log_every=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.txt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "other")


def test_saves_by_the_clock(tmp_path, monkeypatch):
    saved, honest = [], trainer.save

    def save(run):
        saved.append((run.state.progress.step, len(run.state.progress.history)))
        honest(run)

    monkeypatch.setattr(trainer, "save", save)
    train(tmp_path, epochs=1, save_every_minutes=1e-9)
    assert saved == [*((step, 0) for step in range(1, 9)), (8, 1)]


def test_load_run_gives_the_average_and_what_belongs_to_it(undisturbed):
    """Overrides reach the preprocessing; mean and standard deviation stay those that the run was trained with."""
    config, model, classes, preprocess = load_run(undisturbed, "latest")
    tensors, _ = weights.read(undisturbed / "checkpoints" / "latest")
    assert all(np.array_equal(t.numpy(), tensors[f"ema/{name}"]) for name, t in model.state_dict().items())
    assert not model.training
    assert (config.train.seed, classes, preprocess.img_size) == (7, [str(n) for n in range(10)], (8, 8))
    assert load_run(undisturbed / "checkpoints" / "best", overrides=["data.batch_size=3"])[0].data.batch_size == 3
    with pytest.raises(UserError, match="is not a run folder with a checkpoint 'best'"):
        load_run(undisturbed / "vdl")
    wanted = ["model.img_size=12", "data.crop_ratio=0.5", "data.crop_keep_aspect=true", "data.interpolation=area"]
    config, model, _, changed = load_run(undisturbed, overrides=wanted)
    assert (model.img_size, changed.img_size, changed.crop_ratio) == ((12, 12), (12, 12), 0.5)
    assert (changed.crop_keep_aspect, changed.interpolation) == (True, "area")
    assert (changed.mean, changed.std) == (preprocess.mean, preprocess.std) == ((0.3053,) * 3, (0.3760,) * 3)
    assert load_run(undisturbed, overrides=["data.mean=[0, 0, 0]"])[3].mean == (0, 0, 0)
    assert open_weights(config, undisturbed / "checkpoints" / "best")[0].preprocess == changed


@pytest.mark.parametrize("launched", [True, False])
def test_a_stopped_process_of_several_keeps_ignoring_sigterm_until_it_has_left(launched, handlers, monkeypatch):
    """The launcher sends it to all when the first has left; it must not replace the exit code 75."""

    def run():
        with Signals(launched):
            os.kill(os.getpid(), signal.SIGTERM)
            raise Preempted("stopped")

    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError(errno.EIO, "closed"))))  # the terminal
    assert guarded(run) == 75 and signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if launched else signal.SIG_DFL)
