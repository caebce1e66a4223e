"""The rules of the training loop, and what a run leaves behind."""

import io
import logging
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import cost, weights
from ppattn.cli import main
from ppattn.data import TrainLoader
from ppattn.data.splits import Splits
from ppattn.engine import build, trainer
from ppattn.engine.evaluate import Evaluation, evaluate_split, model_runner
from ppattn.engine.state import Progress
from ppattn.errors import UserError
from ppattn.trained import load_run
from tests.helpers.data_sets import fill, numbered
from tests.helpers.runs import read_json, state, table, tiny, written

pytestmark = pytest.mark.slow


def assert_close(found: dict, expected: dict):
    for key in expected.keys() | found.keys():
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-4, atol=2e-6, err_msg=key)


def test_accumulation_is_the_big_batch(tmp_path):
    changes = {"train": {"threads": 1, "max_steps": 9}, "schedule": {"name": "constant"}}
    trainer.train(tiny(tmp_path / "big", **changes))
    changes["train"]["accumulate"] = 4
    trainer.train(tiny(tmp_path / "small", data={"batch_size": 25}, **changes))
    assert_close(state(tmp_path / "small"), state(tmp_path / "big"))


def test_the_tail_of_an_accumulated_epoch_is_averaged_over_itself(tmp_path):
    """1,437 images in batches of 479 are 3 micro-batches: with accumulate = 2, a step of two and a step of one."""
    trainer.train(tiny(tmp_path / "run", data={"batch_size": 479}, train={"accumulate": 2}))
    s = build.build_run(tiny(tmp_path / "by_hand", data={"batch_size": 479}), None)
    micro = [batch for step in range(3) for batch in s.loader.micro_batches(step)]
    for step, group in enumerate((micro[:2], micro[2:])):
        s.state.optimizer.set_lr(0.01 * (1 + math.cos(math.pi * step / 2)) / 2)
        images, targets = (paddle.to_tensor(np.concatenate(parts)) for parts in list(zip(*group, strict=True))[1:3])
        s.loss(images, targets).backward()
        s.state.optimizer.step()
        s.state.optimizer.clear_grad()
    s.loader.close()
    trained = {key: array for key, array in state(tmp_path / "run").items() if "/" not in key}
    assert_close(trained, {key: tensor.numpy() for key, tensor in s.state.model.state_dict().items()})


def test_run_folder_holds_what_was_promised(tmp_path, unabridged):
    summary = trainer.train(tiny(tmp_path, train={"epochs": 2, "max_steps": 20, "log_every": 5}), command="me")
    promised = {"config.yaml", "env.json", "log.txt", "metrics.csv", "summary.json", "vdl", "checkpoints"}
    promised |= {"curves.png", "curves.svg"}
    assert {path.name for path in tmp_path.iterdir()} == promised
    wanted = ["top1", "best_top1", "best_epoch", "epochs", "steps", "seconds", "images_per_second", "params", "macs"]
    wanted += ["train_pflop", "balanced", "f1", "majority"]
    assert list(read_json(tmp_path / "summary.json")) == wanted == list(summary) and summary["steps"] == 20
    assert summary["train_pflop"] == pytest.approx(6e-15 * summary["macs"] * 20 * 100)
    rows = table(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["14", "20"] and 0 < float(rows[0]["data_ms"]) < float(rows[0]["step_ms"])
    assert read_json(tmp_path / "env.json")["command"] == "me"
    assert "epoch 2 step 6/14" in (tmp_path / "log.txt").read_text() and list((tmp_path / "vdl").iterdir())


def test_training_takes_a_file_a_mapping_and_a_configuration(tmp_path):
    config = tiny(tmp_path / "object", train={"max_steps": 2, "threads": 1})
    file = written(config)
    mapping = {"base": file, "train": {"max_steps": 3}}
    for source, name, steps in ((config, "object", 2), (file, "file", 2), (mapping, "mapping", 3)):
        summary = ppattn.train(source, override=[f"output={tmp_path / name}"])
        assert summary == read_json(tmp_path / name / "summary.json") and summary["steps"] == steps
    assert ppattn.train(mapping, "auto", override=[f"output={tmp_path / 'file'}"])["steps"] == 3
    assert mapping["train"] == {"max_steps": 3}
    np.testing.assert_equal(state(tmp_path / "file"), state(tmp_path / "mapping"))
    with pytest.raises(UserError, match="Did you mean 'train.epochs'"):
        ppattn.train({"train": {"epoch": 3}})
    with pytest.raises(UserError, match="list, not a mapping"):
        ppattn.train([mapping])


def test_in_jupyter_the_steps_are_a_bar_between_the_lines_of_epochs(tmp_path, monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stdout", stream)
    trainer.train(tiny(tmp_path, train={"epochs": 2, "threads": 1, "log_every": 1}))
    frames = [text for line in stream.getvalue().splitlines() for text in line.split("\r")]
    lines = [text for text in frames if text.strip() and "step/s" not in text and "?step" not in text]
    assert any("0/28" in text for text in frames)
    assert sum(text.startswith("epoch") for text in lines) == 2 and len(lines) < 12


def test_the_first_epochs_on_smaller_images_take_less_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr("ppattn.engine.metrics.cost", cost)  # not that of the other tests
    resize = {"progressive_resize": {"img_size": 6, "epochs": 1}}
    summary = trainer.train(tiny(tmp_path, augment=resize, train={"epochs": 2, "threads": 1}))
    _, model, _, _ = load_run(tmp_path)
    assert summary["macs"] == cost.macs(model, (8, 8))
    both = cost.macs(model, (8, 8)) + cost.macs(model, (6, 6))
    assert summary["train_pflop"] == pytest.approx(6e-15 * both * summary["steps"] / 2 * 100)


def test_a_run_starts_from_the_average_of_another(tmp_path):
    trainer.train(tiny(tmp_path, train={"max_steps": 3, "threads": 1, "ema": 0.5}))
    saved = state(tmp_path)
    for reset, names in ((False, ["head.weight", "blocks.0.attn.qkv.weight"]), (True, ["blocks.0.attn.qkv.weight"])):
        given = tiny(tmp_path, model={"weights": str(tmp_path / "checkpoints/latest"), "reset_head": reset})
        model = build.build_model(given, Splits(numbered(1), numbered(1), [*"0123456789"]), fresh=True)
        for name in names:
            assert np.array_equal(model.state_dict()[name].numpy(), saved[f"ema/{name}"])
            assert not np.array_equal(saved[name], saved[f"ema/{name}"])
    assert not np.array_equal(model.state_dict()["head.weight"].numpy(), saved["ema/head.weight"])


def test_the_average_is_evaluated_and_kept_as_the_best(tmp_path):
    trainer.train(tiny(tmp_path, train={"max_steps": 9, "threads": 1, "ema": 0.9}))
    best, latest = weights.read(tmp_path / "checkpoints/best")[0], state(tmp_path)
    assert all(np.array_equal(array, latest[f"ema/{name}"]) for name, array in best.items())
    assert not np.array_equal(best["head.weight"], latest["head.weight"])
    config, model, classes, preprocess = load_run(tmp_path)
    model.set_state_dict({name.removeprefix("ema/"): latest[name] for name in latest if name.startswith("ema/")})
    found = evaluate_split(model_runner(model), config, classes, preprocess)[0].metrics
    (row,) = table(tmp_path / "metrics.csv")
    assert found["top1"] == pytest.approx(float(row["top1"]), abs=1e-6)
    assert found["loss"] == pytest.approx(float(row["val_loss"]), rel=1e-5)


def test_a_fresh_start_moves_an_earlier_run_aside(tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        trainer.train(tiny(run, train={"max_steps": 1, "threads": 1}))
    assert (tmp_path / "run.1" / "checkpoints" / "best.safetensors").exists()
    assert f"was renamed to {run}.1" in (run / "log.txt").read_text()
    shutil.rmtree(run / "checkpoints")  # to save space
    before = (run / "metrics.csv").read_text()
    trainer.train(tiny(run, train={"max_steps": 1, "threads": 1}))
    assert (tmp_path / "run.2" / "metrics.csv").read_text() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_counted_per_epoch(tmp_path, workers, caplog):
    """Broken files, links to nothing, and classes without images."""
    fill(tmp_path / "data", ["train"], "ab", 7)  # and a link: 5 steps of 3
    fill(tmp_path / "data", ["val"], "ab", 2)
    for name in ("train/a/2.png", "train/b/5.png", "val/a/1.png"):
        (tmp_path / "data" / name).write_text("no image")
    (tmp_path / "data/train/a/9.png").symlink_to("nowhere")
    (tmp_path / "data/val/a/9.png").symlink_to("9.png")
    (tmp_path / "data/train/none").mkdir()
    data = {"name": "folder", "root": str(tmp_path / "data"), "batch_size": 3, "num_workers": workers}
    for last in (3, 6, None):
        trainer.train(tiny(tmp_path / "run", data=data, train={"epochs": 2, "max_steps": last}), resume="auto")
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [(row["unreadable_train"], row["unreadable_val"]) for row in rows] == [("3", "2")] * 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "5 images could not be read" in log and "a/2.png is not a readable image" in log
    assert "a/9.png: No such file" in log and "a/9.png: Too many levels" in log
    assert "1 classes have no training images: none" in log
    assert not caplog.text and logging.getLogger("ppattn").propagate  # the root logger's handler tells nothing again


def test_early_stopping(tmp_path):
    stop = {"epochs": 30, "threads": 1, "early_stop": {"patience": 2, "min_delta": 1.0}}
    assert trainer.train(tiny(tmp_path, train=stop))["epochs"] == 3  # the first counts as better, then two do not
    progress = Progress(history=[{"top1": top1} for top1 in (0.5, 0.504, None, 0.508, 0.506)])  # small gains add up
    assert (progress.waited(0.005), progress.waited(0.0), progress.waited(0.01)) == (1, 1, 3)
    assert Progress(history=[{"cosine": 0.9, "val_loss": v} for v in (0.5, 0.1, 0.4, 0.3)]).waited(0.0) == 2
    splits = SimpleNamespace(classes=[], val=SimpleNamespace(table=None))
    assert build.Run.best.fget(SimpleNamespace(config=tiny(tmp_path), splits=splits)) == "cosine"


def test_the_best_of_equal_scores_has_the_lower_loss():
    rows = [(0.9, 3.0, 0.5), (0.9, 0.1, 0.5), (0.9, 0.2, 0.5), (0.8, 0.05, 0.6), (0.9, math.nan, 0.5)]
    progress = Progress(history=[dict(zip(("top1", "val_loss", "balanced"), row, strict=True)) for row in rows])
    for by, best in (("top1", 1), ("loss", 3), ("balanced", 3)):
        found = progress.worths(by)
        assert found.index(max(found)) == best and progress.waited(0.0, by) == len(rows) - 1 - best


@pytest.mark.parametrize("by,epoch,worse", [("top1", 2, 0), ("loss", 3, 0), ("top1", 2, 2)])  # negative, as cosines
def test_the_checkpoint_is_the_best_one(tmp_path, monkeypatch, by, epoch, worse):
    """Equal top-1 in the first two epochs, the lowest loss in the third, and one that is not finite in the last."""
    scores = iter([(0.9 - worse, 3.0), (0.9 - worse, 0.3), (0.8 - worse, 0.1), (1.0, math.nan)])

    def evaluate(*arguments):
        top1, loss = next(scores)
        return Evaluation({"top1": top1, "loss": loss, "images": 360}, np.zeros(360, int))

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    summary = trainer.train(tiny(tmp_path, train={"epochs": 4, "best": by}, data={"batch_size": 1000}))
    assert summary["best_epoch"] == epoch
    best = weights.read(tmp_path / "checkpoints/best")[1]["metrics"]
    assert best["top1"] == summary["best_top1"] and best["loss"] == {2: 0.3, 3: 0.1}[epoch]
    scores = iter([(1.0, math.nan)])
    with pytest.raises(UserError, match="The validation loss is not finite after any epoch"):
        trainer.train(tiny(tmp_path / "nan", train={"epochs": 1, "best": by}, data={"batch_size": 1000}))


@pytest.mark.parametrize("ema,warmup,expected", [(0.9999, None, True), (0.5, None, False), (0.9999, False, False)])
def test_a_short_run_does_not_average_its_initial_weights(tmp_path, ema, warmup, expected):
    trainer.train(tiny(tmp_path, train={"ema": ema, "ema_warmup": warmup}))  # 14 steps
    assert f"ema_warmup: {str(expected).lower()}" in (tmp_path / "config.yaml").read_text()
    assert ("still the initial weights" in (tmp_path / "log.txt").read_text()) == (warmup is False)


@pytest.fixture(params=[1, 10], ids=["checked at every step", "at every tenth"])
def every(request, monkeypatch) -> int:
    monkeypatch.setitem(trainer.CHECK_EVERY, "cpu", request.param)
    return request.param


@pytest.mark.parametrize("what", ["images", "targets"])
def test_a_bad_batch_ends_the_run_and_the_replay_finds_it(tmp_path, monkeypatch, capsys, every, what):
    """The ninth micro-batch, the first of the fifth step, has a NaN; the last save is that after the third step."""
    honest = TrainLoader._finish

    def finish(self, number, pixels, made):
        batch = honest(self, number, pixels, made)
        if number == 8:
            getattr(batch, what).ravel()[7] = float("nan")
        return batch

    monkeypatch.setattr(TrainLoader, "_finish", finish)
    given = tiny(tmp_path, train={"save_every_steps": 3, "accumulate": 2, "ema": 0.9, "log_every": 100})
    where = "at step 5 of epoch 1" if every == 1 else "at step 4 of epoch 1 to step 5 of epoch 1"
    with pytest.raises(UserError, match=rf"The loss is not finite {where}\. `ppattn debug --run {tmp_path}`"):
        trainer.train(given)
    before = (tmp_path / "checkpoints" / "latest.safetensors").read_bytes()
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())
    assert main(["debug", "--run", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert f"step 5 of epoch 1 (step 5 of the run), micro-batch 1 of 2: the {what} themselves are not finite" in found
    with np.load(tmp_path / "nonfinite_step5_batch8_rank0.npz") as kept:
        assert np.flatnonzero(np.isnan(kept[what])).tolist() == [7]
    assert (tmp_path / "checkpoints" / "latest.safetensors").read_bytes() == before


def test_an_overflow_is_traced_to_its_layer(tmp_path, capsys, every):
    """A rate so high that the activations of the third step overflow; there is no checkpoint yet."""
    model = {"name": "soft_tiny", "img_size": 32, "embed_dims": [8] * 4, "depths": [1] * 4, "num_heads": [1] * 4}
    model |= {"patch_size": None, "embed_dim": None, "depth": None}
    train = {"accumulate": 2, "ema": 0.9, "log_every": 100, "max_steps": 13}
    given = tiny(tmp_path, model=model, data={"batch_size": 10}, train=train, optimizer={"lr": 1e6})
    with pytest.raises(UserError, match="The loss is not finite at step"):
        trainer.train(given)
    assert main(["debug", "--run", str(tmp_path)]) == 0
    found, place = capsys.readouterr().out, "step 3 of epoch 1 (step 3 of the run), micro-batch 1 of 2"
    assert f"{place}: the first layer whose output is not finite" in found


def test_the_replay_meets_the_same_numbers_and_says_if_all_are_finite(tmp_path, monkeypatch, capsys):
    trainer.train(tiny(tmp_path, train={"max_steps": 3, "log_every": 1, "ema": 0.9}))
    losses, honest = [], trainer.backward
    monkeypatch.setattr(trainer, "backward", lambda *given: losses.append(honest(*given)) or losses[-1])
    monkeypatch.setattr("ppattn.engine.debug.backward", trainer.backward)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("max_steps: 3", "max_steps: 6"))
    assert main(["debug", "--run", str(tmp_path)]) == 0
    assert "All losses and weights are finite in steps 4 to 6" in capsys.readouterr().out
    replayed = [loss.item() for loss in losses]
    losses.clear()
    trainer.train(tiny(tmp_path, train={"max_steps": 6, "log_every": 1, "ema": 0.9}), resume="auto")
    assert [loss.item() for loss in losses] == replayed and len(replayed) == 3
    assert main(["debug", "--run", str(tmp_path / "nothing")]) == 2


def test_running_statistics_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, capsys):
    """Those of the fifth step on; Paddle's ReLU makes zeros of NaN, so that the loss does not show them."""
    honest = trainer.update

    def update(run):
        honest(run)
        if run.state.progress.step + 1 >= 5:
            variance = run.state.model.state_dict()["patch_embed.proj.1._variance"]
            variance.set_value(variance * float("nan"))

    monkeypatch.setattr(trainer, "update", update)
    monkeypatch.setattr("ppattn.engine.debug.update", update)
    given = tiny(tmp_path, model={"name": "deit_nano"}, train={"save_every_steps": 4, "epochs": 2})
    with pytest.raises(UserError, match=r"patch_embed\.proj\.1\._variance is not finite after step 8 of epoch 1"):
        trainer.train(given)
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())
    assert not (tmp_path / "checkpoints" / "best.safetensors").exists()
    assert main(["debug", "--run", str(tmp_path)]) == 0
    assert "_variance is not finite after step 5 of epoch 1" in capsys.readouterr().out
