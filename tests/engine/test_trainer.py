"""The rules of the training loop, and what a run leaves behind."""

import io
import json
import logging
import math
import shutil
import sys

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import cost, weights
from ppattn.config import to_yaml
from ppattn.data.splits import Splits
from ppattn.engine import build, trainer
from ppattn.engine.evaluate import Evaluation, evaluate_split, model_runner
from ppattn.engine.metrics import sentence
from ppattn.engine.state import Progress
from ppattn.errors import UserError
from ppattn.trained import load_run
from tests.helpers.data_sets import fill, numbered
from tests.helpers.runs import state, table, tiny

pytestmark = pytest.mark.slow


def test_accumulation_is_the_big_batch(tmp_path):
    changes = {"train": {"threads": 1, "max_steps": 9}, "schedule": {"name": "constant"}}
    trainer.train(tiny(tmp_path / "big", **changes))
    changes["train"]["accumulate"] = 4
    trainer.train(tiny(tmp_path / "small", data={"batch_size": 25}, **changes))
    big, small = state(tmp_path / "big"), state(tmp_path / "small")
    assert big.keys() == small.keys()
    for key in big:
        np.testing.assert_allclose(small[key], big[key], rtol=1e-4, atol=2e-6, err_msg=key)


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
    for key, value in s.state.model.state_dict().items():
        np.testing.assert_allclose(state(tmp_path / "run")[key], value.numpy(), rtol=1e-4, atol=2e-6, err_msg=key)


def test_run_folder_holds_what_was_promised(tmp_path, unabridged):
    summary = trainer.train(tiny(tmp_path, train={"epochs": 2, "max_steps": 20, "log_every": 5}), command="me")
    promised = {"config.yaml", "env.json", "log.txt", "metrics.csv", "summary.json", "vdl", "checkpoints"}
    promised |= {"curves.png", "curves.svg"}
    assert {path.name for path in tmp_path.iterdir()} == promised
    wanted = ["top1", "best_top1", "best_epoch", "epochs", "steps", "seconds", "images_per_second", "params", "macs"]
    wanted += ["train_pflop", "balanced", "f1", "majority"]
    assert list(json.loads((tmp_path / "summary.json").read_text())) == wanted == list(summary)
    assert summary["steps"] == 20
    assert summary["train_pflop"] == pytest.approx(6e-15 * summary["macs"] * 20 * 100)
    rows = table(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["14", "20"]
    assert 0 < float(rows[0]["data_ms"]) < float(rows[0]["step_ms"])
    assert json.loads((tmp_path / "env.json").read_text())["command"] == "me"
    assert "epoch 2 step 6/14" in (tmp_path / "log.txt").read_text()
    assert list((tmp_path / "vdl").iterdir())


def test_training_takes_a_file_a_mapping_and_a_configuration(tmp_path):
    config = tiny(tmp_path / "object", train={"max_steps": 2, "threads": 1})
    (tmp_path / "file.yaml").write_text(to_yaml(config))
    mapping = {"base": str(tmp_path / "file.yaml"), "train": {"max_steps": 3}}
    for source, name, steps in ((config, "object", 2), (tmp_path / "file.yaml", "file", 2), (mapping, "mapping", 3)):
        summary = ppattn.train(source, override=[f"output={tmp_path / name}"])
        assert summary == json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["steps"] == steps
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


def test_the_first_epochs_on_smaller_images_take_less_arithmetic(tmp_path, unabridged):
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
    fill(tmp_path / "data", ["train"], "ab", 6)
    fill(tmp_path / "data", ["val"], "ab", 2)
    (tmp_path / "data/train/a/2.png").write_text("no image")
    (tmp_path / "data/train/b/5.png").write_text("no image")
    (tmp_path / "data/val/a/1.png").write_text("no image")
    data = {"name": "folder", "root": str(tmp_path / "data"), "batch_size": 3, "num_workers": workers}
    for last in (3, 6, None):
        train = {"epochs": 2, "max_steps": last}
        trainer.train(tiny(tmp_path / "run", data=data, train=train), resume="auto" if last != 3 else None)
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [(row["unreadable_train"], row["unreadable_val"]) for row in rows] == [("2", "1")] * 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "3 images could not be read" in log and "a/2.png is not a readable image" in log
    assert not caplog.text and logging.getLogger("ppattn").propagate  # the root logger's handler tells nothing again


def test_links_to_nothing_and_empty_classes_are_told(tmp_path):
    fill(tmp_path / "data", ["train"], "ab", 3)
    fill(tmp_path / "data", ["val"], "ab", 2)
    (tmp_path / "data/train/a/9.png").symlink_to("nowhere")
    (tmp_path / "data/val/a/9.png").symlink_to("9.png")
    (tmp_path / "data/train/none").mkdir()
    data = {"name": "folder", "root": str(tmp_path / "data"), "batch_size": 7}
    trainer.train(tiny(tmp_path / "run", data=data))
    (row,) = table(tmp_path / "run" / "metrics.csv")
    assert (row["unreadable_train"], row["unreadable_val"]) == ("1", "1")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "a/9.png: No such file" in log and "a/9.png: Too many levels" in log
    assert "1 classes have no training images: none" in log


def test_early_stopping(tmp_path):
    stop = {"epochs": 30, "threads": 1, "early_stop": {"patience": 2, "min_delta": 1.0}}
    assert trainer.train(tiny(tmp_path, train=stop))["epochs"] == 3  # the first counts as better, then two do not


def test_small_gains_add_up_before_early_stopping():
    progress = Progress(history=[{"top1": top1} for top1 in (0.5, 0.504, None, 0.508, 0.506)])
    assert (progress.waited(0.005), progress.waited(0.0), progress.waited(0.01)) == (1, 1, 3)


def test_the_best_of_equal_scores_has_the_lower_loss():
    def row(top1, loss, balanced=0.5):
        return {"top1": top1, "val_loss": loss, "balanced": balanced}

    rows = [row(0.9, 3.0), row(0.9, 0.1), row(0.9, 0.2), row(0.8, 0.05, 0.6), row(0.9, math.nan)]
    progress = Progress(history=rows)
    for by, best in (("top1", 1), ("loss", 3), ("balanced", 3)):
        found = progress.worths(by)
        assert found.index(max(found)) == best and progress.waited(0.0, by) == len(rows) - 1 - best


@pytest.mark.parametrize("by,epoch", [("top1", 2), ("loss", 3)])
def test_the_checkpoint_is_the_best_one(tmp_path, monkeypatch, by, epoch):
    """Equal top-1 in the first two epochs, the lowest loss in the third."""
    scores = iter([(0.9, 3.0), (0.9, 0.3), (0.8, 0.1)])

    def evaluate(*arguments):
        top1, loss = next(scores)
        return Evaluation({"top1": top1, "loss": loss, "images": 360}, np.zeros(360, int))

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    summary = trainer.train(tiny(tmp_path, train={"epochs": 3, "best": by}, data={"batch_size": 1000}))
    assert summary["best_epoch"] == epoch
    best = weights.read(tmp_path / "checkpoints/best")[1]["metrics"]
    assert best["top1"] == summary["best_top1"] and best["loss"] == {2: 0.3, 3: 0.1}[epoch]


@pytest.mark.parametrize("ema,warmup,expected", [(0.9999, None, True), (0.5, None, False), (0.9999, False, False)])
def test_a_short_run_does_not_average_its_initial_weights(tmp_path, ema, warmup, expected):
    trainer.train(tiny(tmp_path, train={"ema": ema, "ema_warmup": warmup}))  # 14 steps
    assert f"ema_warmup: {str(expected).lower()}" in (tmp_path / "config.yaml").read_text()
    assert ("still the initial weights" in (tmp_path / "log.txt").read_text()) == (warmup is False)


def test_top5_of_five_classes_or_fewer_is_not_told():
    row = {"epoch": 1, "train_loss": 1.0, "val_loss": 1.0, "top1": 0.5, "top5": 1.0}
    row |= {"unreadable_train": 0, "images_per_second": 3.0}
    assert "top-5 100.00 %" in sentence(row, 2, classes=6)
    assert "top-1 50.00 %, 3 img/s" in sentence(row, 2, classes=5)
