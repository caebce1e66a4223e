"""Nothing lost: a run that is killed, stopped or damaged goes on to the same weights, bit for bit."""

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ppattn import weights
from ppattn.cli import guarded, main
from ppattn.config import make_config, to_yaml
from ppattn.engine import build, outputs, trainer
from ppattn.engine.resume import RunFacts, check_same
from ppattn.engine.signals import STOPS, Signals
from ppattn.errors import Preempted, UserError
from ppattn.settings import Config
from ppattn.trained import load_run, open_weights
from tests.helpers.runs import table, tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("seconds", "images_per_second", "step_ms", "data_ms")


def everything(folder, **train) -> Config:
    """Small, with all that has a state or draws random numbers: dropout, drop path, mixing, EMA, accumulation, clip."""
    steady = {"epochs": 3, "seed": 7, "ema": 0.9, "ema_warmup": True, "clip_grad": 1.0, "accumulate": 3}
    return tiny(
        folder,
        model={"name": "deit_nano", "drop_rate": 0.1, "drop_path_rate": 0.2},
        data={"batch_size": 60},
        augment={"pad_crop": 1, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0},
        train=steady | train,
        optimizer={"name": "adamw", "weight_decay": 0.05},
        schedule={"warmup_epochs": 0.5},
        loss={"label_smoothing": 0.1},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """23 micro-batches per epoch: 8 steps, the last of two micro-batches; 24 steps in all."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer.train(everything(folder))
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, average, best checkpoint, position, best metric and all rows but their timings."""
    for name in ("latest", "best"):
        (x, about_x), (y, about_y) = (weights.read(run / "checkpoints" / name) for run in (one, other))
        assert x.keys() == y.keys()
        differing = [key for key in x if x[key].tobytes() != y[key].tobytes()]
        assert not differing
        if name == "best":
            assert all(about_x["metrics"][key] == about_y["metrics"][key] for key in ("top1", "loss"))
            continue
        assert about_x["ema_updates"] == about_y["ema_updates"]
        for key in ("step", "best_top1", "best_epoch"):
            assert about_x["progress"][key] == about_y["progress"][key]
    rows, others = ([{k: v for k, v in row.items() if k not in TIMES} for row in table(run / "metrics.csv")]
                    for run in (one, other))  # fmt: skip
    assert rows == others


def command(config: Config, folder: Path, *arguments: str) -> list[str]:
    path = folder / "config_of_the_test.yaml"
    path.write_text(to_yaml(config))
    return [sys.executable, str(ROOT / "tools" / "train.py"), "-c", str(path), *arguments]


@pytest.mark.parametrize("steps", [[8], [3, 9, 17]], ids=str)
def test_stopped_by_max_steps_and_continued(undisturbed, tmp_path, steps):
    for number, last in enumerate(steps):
        trainer.train(everything(tmp_path, max_steps=last), resume="auto" if number else None)
    trainer.train(everything(tmp_path), resume="auto")
    assert_same_run(undisturbed, tmp_path)


class CountingScaler:
    """The interface of `paddle.amp.GradScaler`, which does nothing on a CPU; every step has another scale."""

    def __init__(self):
        self.updates = 0

    def scale(self, loss):
        return loss * (1.0 + 0.1 * self.updates)

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        self.updates += 1

    def state_dict(self):
        return {"updates": np.array([self.updates])}

    def load_state_dict(self, state):
        self.updates = state["updates"][0]


def test_the_loss_scaler_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "mixed_precision", lambda settings: (contextlib.nullcontext, CountingScaler()))
    trainer.train(everything(tmp_path / "one", epochs=1, clip_grad=None))
    for last in (3, None):
        trainer.train(everything(tmp_path / "two", epochs=1, clip_grad=None, max_steps=last), resume="auto")
    assert_same_run(tmp_path / "one", tmp_path / "two")
    steps = json.loads((tmp_path / "two" / "summary.json").read_text())["steps"]
    assert steps > 3 and weights.read(tmp_path / "two" / "checkpoints" / "latest")[1]["scaler"] == {"updates": [steps]}


def test_an_evaluation_for_max_steps_alone_leaves_no_trace(tmp_path, monkeypatch):
    """It lies inside the second epoch and is the best of all."""
    honest, accuracies = trainer.evaluate, iter([0.5, 0.5, 0.5, 1.0, 0.5])

    def evaluate(*arguments):
        result = honest(*arguments)
        result.metrics["top1"] = next(accuracies)
        return result

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    trainer.train(everything(tmp_path / "one", epochs=2))
    for last in (8, 11, None):
        trainer.train(everything(tmp_path / "two", epochs=2, max_steps=last), resume="auto")
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_max_steps_at_the_end_of_an_epoch_that_is_not_evaluated(tmp_path):
    trainer.train(everything(tmp_path / "one", epochs=2, eval_every=2))
    for last in (8, 8, None):
        summary = trainer.train(everything(tmp_path / "two", epochs=2, eval_every=2, max_steps=last), resume="auto")
        assert summary["top1"] is not None and (tmp_path / "two" / "checkpoints" / "best.safetensors").exists()
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_killed_data_worker_ends_the_run_in_a_sentence(undisturbed, tmp_path, monkeypatch):
    honest = trainer.backward

    def backward(run, batch, parts):
        if batch.number == 23 + 9:
            for worker in multiprocessing.active_children():
                worker.kill()
        return honest(run, batch, parts)

    tree = everything(tmp_path, save_every_steps=1).model_dump()
    tree["data"]["num_workers"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "backward", backward)
        with pytest.raises(UserError, match="workers was killed"):
            trainer.train(make_config(tree))
    trainer.train(make_config(tree), resume="auto")
    assert_same_run(undisturbed, tmp_path)


@pytest.mark.parametrize("where", ["half a file", "before the first rename", "between the renames"])
def test_killed_inside_a_checkpoint_write(undisturbed, tmp_path, where):
    """The seventh write dies: with half of its temporary file written, or around the renames."""
    config = everything(tmp_path / "run", save_every_steps=1)
    script = ROOT / "tests/helpers/dying_writes.py"
    call = [sys.executable, str(script), where, "7", *command(config, tmp_path)[2:]]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    trainer.train(config, resume="auto")
    assert_same_run(undisturbed, tmp_path / "run")
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"best.safetensors", "latest.safetensors", "previous.safetensors"}


@pytest.fixture
def handlers():
    """Signals as a terminal leaves them, and afterwards as the tests have them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped_run(folder: Path, step: int, number: int, **train) -> int:
    """Exit code of a training whose process gets a signal after this step."""
    honest = trainer.update

    def update(run):
        honest(run)
        if run.state.progress.step == step:
            os.kill(os.getpid(), number)

    path = folder / "config.yaml"
    path.write_text(to_yaml(everything(folder / "run", **train)))
    with patch.object(trainer, "update", update):
        return main(["train", "-c", str(path)])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_saves_and_leaves_with_75(undisturbed, tmp_path, handlers, capsys, name):
    assert stopped_run(tmp_path, 10, getattr(signal, name), save_every_minutes=None) == 75
    errors = capsys.readouterr().err
    assert f"stopped by {name}" in errors and "--resume auto" in errors and "Traceback" not in errors
    trainer.train(everything(tmp_path / "run", save_every_minutes=None), resume="auto")
    assert_same_run(undisturbed, tmp_path / "run")


def test_nohup_keeps_a_run_from_ending_with_its_terminal(tmp_path, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stopped_run(tmp_path, 2, signal.SIGHUP, epochs=1) == 0


def test_a_signal_during_the_evaluation(undisturbed, tmp_path, monkeypatch):
    honest, calls = trainer.EvalLoader, []

    def stopped_loader(*arguments, **options):
        calls.append(1)
        for batch in honest(*arguments, **options):
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(trainer, "EvalLoader", stopped_loader)
    with pytest.raises(Preempted, match="evaluation after epoch 2"):
        trainer.train(everything(tmp_path))
    trainer.train(everything(tmp_path), resume="auto")
    assert_same_run(undisturbed, tmp_path)


def test_a_damaged_latest_falls_back_to_previous(undisturbed, tmp_path):
    config = everything(tmp_path, max_steps=13, save_every_steps=5)
    trainer.train(config)
    latest = tmp_path / "checkpoints" / "latest.safetensors"
    data = latest.read_bytes()
    changed = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
    for damaged in (data[: len(data) * 2 // 3], b"", b"PK\x03\x04 something else altogether", changed):
        latest.write_bytes(damaged)
        with pytest.raises(UserError, match="latest.safetensors"):
            trainer.train(everything(tmp_path), resume=str(tmp_path))
    trainer.train(everything(tmp_path), resume="auto")
    log = (tmp_path / "log.txt").read_text()
    assert "Trying the checkpoint before it" in log
    assert f"resumed from {tmp_path / 'checkpoints' / 'previous.safetensors'}" in log
    assert_same_run(undisturbed, tmp_path)


def test_with_all_checkpoints_damaged_nothing_is_overwritten(tmp_path):
    trainer.train(everything(tmp_path, max_steps=5, save_every_steps=2))
    for name in ("latest", "previous"):
        (tmp_path / "checkpoints" / f"{name}.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="No checkpoint in .* can be read"):
        trainer.train(everything(tmp_path), resume="auto")
    assert (tmp_path / "checkpoints" / "latest.safetensors").read_bytes() == b"x" * 100


def test_resuming_a_finished_run_changes_nothing(undisturbed, tmp_path):
    trainer.train(everything(tmp_path))
    summary = trainer.train(everything(tmp_path), resume="auto")
    assert summary["epochs"] == 3
    assert_same_run(undisturbed, tmp_path)


def test_a_run_is_extended_by_a_new_one(undisturbed, tmp_path):
    """Another rate and number of epochs; it begins where the other ended, and resumes bit for bit itself."""
    longer = {"epochs": 1, "max_steps": 3}
    for folder, steps in (("whole", [3]), ("parts", [2, 3])):
        for number, stop in enumerate(steps):
            given = everything(tmp_path / folder, **longer | {"max_steps": stop})
            given.optimizer.lr = 0.002
            start = {"resume": "auto"} if number else {"extend": str(undisturbed)}
            trainer.train(given, **start)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    before, about = weights.read(undisturbed / "checkpoints/latest")
    for folder in ("whole", "parts"):
        origin = json.loads((tmp_path / folder / "env.json").read_text())["extends"]
        assert origin["steps"] == 24 and origin["checkpoint"].startswith(str(undisturbed))
    first = build.build_run(everything(tmp_path / "x", **longer), None, str(undisturbed)).state
    assert first.progress.step == 0 and first.ema.updates == about["ema_updates"]
    found = {name: tensor.numpy() for name, tensor in first.tensors().items() if "/" not in name}
    assert all(np.array_equal(found[name], before[name]) for name in found)
    other = everything(tmp_path / "y", **longer)
    other.optimizer.name = "sgd"
    with pytest.raises(UserError, match="optimizer.name was 'adamw' there and is 'sgd' here"):
        trainer.train(other, extend=str(undisturbed))


def test_resume_into_another_folder(undisturbed, tmp_path):
    trainer.train(everything(tmp_path / "one", max_steps=8))
    for number, form in enumerate(("{run}", "{run}/checkpoints", "{run}/checkpoints/latest")):
        other = tmp_path / f"two{number}"
        trainer.train(everything(other, max_steps=9 if number else None), resume=form.format(run=tmp_path / "one"))
    assert_same_run(undisturbed, tmp_path / "two0")


def test_a_run_in_the_other_folder_is_moved_aside(tmp_path):
    for name in ("one", "two"):
        trainer.train(everything(tmp_path / name, max_steps=1))
    before = {path.name: path.read_bytes() for path in (tmp_path / "two" / "checkpoints").iterdir()}
    trainer.train(everything(tmp_path / "two", max_steps=2), resume=str(tmp_path / "one"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "two.1" / "checkpoints").iterdir()} == before
    assert f"was renamed to {tmp_path / 'two'}.1" in (tmp_path / "two" / "log.txt").read_text()
    trainer.train(everything(tmp_path / "two", max_steps=3), resume=str(tmp_path / "two" / "checkpoints" / "latest"))
    assert not (tmp_path / "two.2").exists()


def test_a_second_training_in_a_folder_is_refused(tmp_path):
    run = tmp_path / "run"
    trainer.train(everything(run, max_steps=1))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    call = [sys.executable, "-c", hold, str(run / "log.txt")]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for resume in (None, "auto"):
            with pytest.raises(UserError, match="Another training is writing to"):
                trainer.train(everything(run, max_steps=2), resume=resume)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        other.kill()
    trainer.train(everything(run, max_steps=2), resume="auto")


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.seed", 8), ("data.batch_size", 30), ("model.embed_dim", 24), ("optimizer.lr", 0.02), ("train.epochs", 4)],
)
def test_other_settings_are_refused_by_name(undisturbed, tmp_path, key, value):
    tree = everything(undisturbed).model_dump()
    section, name = key.split(".")
    tree[section][name] = value
    with pytest.raises(UserError, match=rf"Cannot resume: {key} was .* and is {value} now"):
        trainer.train(make_config(tree | {"output": str(tmp_path)}), resume=str(undisturbed))


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


@pytest.mark.parametrize("change", ["removed", "added", "renamed", "moved to another class", "one for validation"])
def test_changed_data_is_refused_and_may_be_accepted(folder, tmp_path, change):
    """Three steps of 2 x 2 images an epoch; the run stops in the second epoch."""
    tree = everything(tmp_path / "run", accumulate=2, max_steps=5).model_dump()
    tree["data"] |= {"name": "folder", "root": str(folder), "batch_size": 2}
    trainer.train(make_config(tree))
    tree["train"]["max_steps"] = None
    first = folder / "train" / "ant" / "0.png"
    if change == "removed":
        for path in [*folder.glob("train/ant/*.png"), *folder.glob("train/bee/*.png")][1:8]:
            path.unlink()
    elif change == "added":
        (folder / "train" / "ant" / "9.png").write_bytes(first.read_bytes())
    elif change == "renamed":
        first.rename(first.with_name("9.png"))
    elif change == "moved to another class":
        first.rename(folder / "train" / "bee" / "9.png")
    else:
        (folder / "val" / "ant" / "0.png").unlink()
    before = (tmp_path / "run" / "checkpoints" / "latest.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"the data has changed \(\d+ .* images .* data\.changed=accept"):
        trainer.train(make_config(tree), resume="auto")
    assert (tmp_path / "run" / "checkpoints" / "latest.safetensors").read_bytes() == before
    tree["data"]["changed"] = "accept"
    summary = trainer.train(make_config(tree), resume="auto")
    assert "the data has changed" in (tmp_path / "run" / "log.txt").read_text()
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["epoch"] for row in rows] == ["1", "2", "3"] and summary["epochs"] == 3
    assert len({row["train_loss"] for row in rows}) == 3  # every epoch was trained


def test_more_data_after_a_kill_in_the_evaluation(folder, tmp_path, monkeypatch):
    """The epoch counts as done; the warm-up of the average, which follows the number of steps, stays as it was."""
    tree = everything(tmp_path / "run", accumulate=2, save_every_steps=3, ema=0.6, ema_warmup=None).model_dump()
    tree["data"] |= {"name": "folder", "root": str(folder), "batch_size": 2, "changed": "accept"}

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "evaluate_model", killed)
        trainer.train(make_config(tree))
    image = (folder / "train" / "ant" / "0.png").read_bytes()
    for number in range(20, 30):
        (folder / "train" / "ant" / f"{number}.png").write_bytes(image)
    summary = trainer.train(make_config(tree), resume="auto")
    assert summary["epochs"] == 3 and len(table(tmp_path / "run" / "metrics.csv")) == 3


def test_an_extension_killed_before_its_first_save_is_not_a_new_run(undisturbed, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "backward", killed)
        trainer.train(everything(tmp_path / "run"), extend=str(undisturbed))
    with pytest.raises(UserError, match=f"run it again with --extend {undisturbed}"):
        trainer.train(everything(tmp_path / "run"), resume="auto")
    with pytest.raises(UserError, match="resume and extend exclude each other"):
        trainer.train(everything(tmp_path / "run"), resume="auto", extend=str(undisturbed))
    trainer.train(everything(tmp_path / "run", max_steps=1), extend=str(undisturbed))


@pytest.mark.parametrize("content", ['{"extends": "x"}', '{"extends": [1]}', "[1]", "{"])
def test_odd_content_of_the_env_json_of_a_run_without_a_state(tmp_path, content):
    (tmp_path / "env.json").write_text(content)
    with pytest.raises(UserError, match="env.json is damaged or not what a run writes"):
        trainer.train(everything(tmp_path), resume="auto")


def test_the_same_data_elsewhere_is_the_same(folder, tmp_path):
    tree = everything(tmp_path / "run", accumulate=2, max_steps=5).model_dump()
    tree["data"] |= {"name": "folder", "root": str(folder), "batch_size": 2}
    trainer.train(make_config(tree))
    tree["data"]["root"] = str(folder.rename(tmp_path / "elsewhere"))
    tree["train"]["max_steps"] = 6
    trainer.train(make_config(tree), resume="auto")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "5 steps are done" in log and "the data has changed" not in log
    trainer.train(make_config(tree | {"output": str(tmp_path / "at_once")}))
    assert_same_run(tmp_path / "at_once", tmp_path / "run")


def rewrite(path: Path, **changes) -> None:
    """Change a checkpoint's metadata; None takes a key out."""
    tensors, metadata = weights.read(path)
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    weights.save(path, tensors, metadata)


def test_a_checkpoint_of_another_layout_is_refused(tmp_path):
    trainer.train(everything(tmp_path, max_steps=2))
    rewrite(tmp_path / "checkpoints" / "latest.safetensors", layout=None)
    with pytest.raises(UserError, match=r"was written by another version of ppattn.* -o model\.weights="):
        trainer.train(everything(tmp_path), resume=str(tmp_path))


def test_a_checkpoint_without_a_config(tmp_path):
    config = everything(tmp_path, max_steps=1, ema_warmup=None)
    trainer.train(config)
    rewrite(tmp_path / "checkpoints/latest.safetensors", config=None)
    with pytest.raises(UserError, match="Cannot resume: "):
        trainer.train(everything(tmp_path, ema_warmup=None), resume="auto")


def test_another_processor_is_named_in_the_log(tmp_path):
    trainer.train(everything(tmp_path, max_steps=2))
    latest = tmp_path / "checkpoints" / "latest.safetensors"
    runtime = weights.read(latest)[1]["runtime"]
    rewrite(latest, runtime=runtime | {"device": "Another processor", "MKL_DEBUG_CPU_TYPE": "4"})
    trainer.train(everything(tmp_path, max_steps=3), resume="auto")
    log = (tmp_path / "log.txt").read_text()
    assert f"device was Another processor and is {runtime['device']}" in log
    assert "MKL_DEBUG_CPU_TYPE was 4 and is" in log and "Paddle was" not in log


def test_what_cannot_be_resumed_from(undisturbed, tmp_path):
    with pytest.raises(UserError, match="holds weights but no training state"):
        trainer.train(everything(tmp_path), resume=str(undisturbed / "checkpoints" / "best"))
    with pytest.raises(UserError, match=r"there is no .*latest\.safetensors"):
        trainer.train(everything(tmp_path), resume=str(tmp_path))
    with pytest.raises(UserError, match="No weights at"):
        trainer.train(everything(tmp_path), resume=str(tmp_path / "nothing"))


def test_a_full_disk_leaves_the_last_good_checkpoint(undisturbed, tmp_path):
    """A file-size limit stands in for the full disk: small files and `best` pass, a training state does not."""
    config = everything(tmp_path / "run", max_steps=13)
    trainer.train(config)
    folder = tmp_path / "run" / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.stem != "best"}
    limit = len(before["latest.safetensors"]) // 2

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    call = command(everything(tmp_path / "run"), tmp_path, "--resume", "auto")
    done = subprocess.run(call, capture_output=True, text=True, preexec_fn=small_files)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "next.safetensors: the disk is full" in done.stderr and "checkpoints are whole: make room" in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.stem != "best"} == before
    trainer.train(everything(tmp_path / "run"), resume="auto")
    assert_same_run(undisturbed, tmp_path / "run")


def test_a_run_that_was_stopped_in_its_first_save_continues_in_its_folder(tmp_path, monkeypatch):
    """Nothing can be resumed then, and what else lies in the folder must stay there."""
    (tmp_path / "run/linearize").mkdir(parents=True)

    def broken(handle):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="next.safetensors"):
        patch.setattr(os, "fsync", broken)
        trainer.train(everything(tmp_path / "run", max_steps=2), resume="auto")
    assert [*(tmp_path / "run/checkpoints").iterdir()] == []
    trainer.train(everything(tmp_path / "run", max_steps=2), resume="auto")
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
        trainer.train(everything(tmp_path / "run", max_steps=2, log_every=1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.txt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        trainer.train(everything(tmp_path / "other"))


def test_too_little_memory_is_no_full_disk(tmp_path, monkeypatch, capsys):
    def no_memory(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory", str(tmp_path / "run"))

    monkeypatch.setattr(outputs.Outputs, "save_state", no_memory)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(everything(tmp_path / "run", epochs=1)))
    assert main(["train", "-c", str(path)]) == 2
    told = capsys.readouterr().err
    assert "not enough memory" in told and "disk" not in told


def test_saves_by_the_clock(tmp_path, monkeypatch):
    saved, honest = [], trainer.save

    def save(run):
        saved.append((run.state.progress.step, len(run.state.progress.history)))
        honest(run)

    monkeypatch.setattr(trainer, "save", save)
    trainer.train(everything(tmp_path, epochs=1, save_every_minutes=1e-9))
    assert saved == [*((step, 0) for step in range(1, 9)), (8, 1)]


def test_what_a_checkpoint_says(undisturbed):
    tensors, about = weights.read(undisturbed / "checkpoints" / "latest")
    assert json.loads(json.dumps(about["config"])) == json.loads(json.dumps(everything(undisturbed).model_dump()))
    names = {name for name in tensors if "/" not in name}
    assert {name.removeprefix("ema/") for name in tensors if name.startswith("ema/")} == names
    names -= {name for name in names if name.endswith(("._mean", "._variance"))}  # running statistics have no gradient
    for kind in ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"):
        assert {n.split("/")[1] for n in tensors if n.startswith("optimizer/") and n.endswith(kind)} == names
    assert tensors["optimizer/head.weight/beta1_pow_acc"].item() == pytest.approx(0.9**25, rel=1e-5)
    assert about["ema_updates"] == 24


def test_load_run_gives_the_average_and_what_belongs_to_it(undisturbed):
    config, model, classes, preprocess = load_run(undisturbed, "latest")
    tensors, _ = weights.read(undisturbed / "checkpoints" / "latest")
    assert all(np.array_equal(t.numpy(), tensors[f"ema/{name}"]) for name, t in model.state_dict().items())
    assert not model.training
    assert (config.train.seed, classes, preprocess.img_size) == (7, [str(n) for n in range(10)], (8, 8))
    assert load_run(undisturbed / "checkpoints" / "best", overrides=["data.batch_size=3"])[0].data.batch_size == 3
    with pytest.raises(UserError, match="is not a run folder with a checkpoint 'best'"):
        load_run(undisturbed / "vdl")


def test_overrides_reach_the_preprocessing(undisturbed, tmp_path):
    """Mean and standard deviation stay those that the run was trained with."""
    trained = load_run(undisturbed)[3]
    wanted = ["model.img_size=12", "data.crop_ratio=0.5", "data.crop_keep_aspect=true", "data.interpolation=area"]
    config, model, _, changed = load_run(undisturbed, overrides=wanted)
    assert (model.img_size, changed.img_size, changed.crop_ratio) == ((12, 12), (12, 12), 0.5)
    assert (changed.crop_keep_aspect, changed.interpolation) == (True, "area")
    assert (changed.mean, changed.std) == (trained.mean, trained.std) == ((0.3053,) * 3, (0.3760,) * 3)
    assert load_run(undisturbed, overrides=["data.mean=[0, 0, 0]"])[3].mean == (0, 0, 0)
    assert open_weights(config, undisturbed / "checkpoints" / "best")[0].preprocess == changed
    assert load_run(undisturbed)[3] == trained


@pytest.mark.parametrize("launched", [True, False])
def test_a_stopped_process_of_several_keeps_ignoring_sigterm_until_it_has_left(launched, handlers):
    """The launcher sends it to all when the first has left; it must not replace the exit code 75."""

    def run():
        with Signals(launched):
            os.kill(os.getpid(), signal.SIGTERM)
            raise Preempted("stopped")

    assert guarded(run) == 75
    assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if launched else signal.SIG_DFL)
