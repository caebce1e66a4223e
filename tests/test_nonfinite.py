"""Losses that are not finite: the step is named, its update withheld, and nothing damaged is saved."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from runs import state, table, tiny

from ppattn.engine import build, trainer
from ppattn.engine.nonfinite import first_layer, first_of
from ppattn.errors import UserError

pytestmark = pytest.mark.slow


def poison(monkeypatch, at: int, labels: bool = False):
    """NaN in one image, or one target, of micro-batch `at` of every epoch."""
    honest = trainer.batches

    def batches(run, epoch, start):
        for micro, (images, *rest) in enumerate(honest(run, epoch, start), start):
            if micro == at and labels:
                rest[0][3, 1] = float("nan")
            elif micro == at:
                images[3, 1, 2, 4] = float("nan")
            yield images, *rest

    monkeypatch.setattr(trainer, "batches", batches)


def test_a_loss_that_is_not_finite_stops_with_step_place_and_batch(tmp_path, monkeypatch):
    poison(monkeypatch, at=5)
    given = tiny(tmp_path, train={"save_every_steps": 3, "accumulate": 2, "threads": 1})
    with pytest.raises(
        UserError, match="epoch 1, step 3 is not finite: the images themselves are not finite"
    ) as caught:
        trainer.train(given)
    (path,) = tmp_path.glob("nonfinite_*.npz")
    assert str(path) in str(caught.value)
    with np.load(path) as kept:
        assert np.argwhere(np.isnan(kept["images"])).tolist() == [[3, 1, 2, 4]]
        assert kept["targets"].shape == (100, 10)


def test_a_loss_that_is_not_finite_is_skipped(tmp_path, monkeypatch):
    poison(monkeypatch, at=5)
    trainer.train(tiny(tmp_path, train={"nonfinite": "skip", "threads": 1, "epochs": 2}))
    rows = table(tmp_path / "metrics.csv")
    assert [row["skipped_steps"] for row in rows] == ["1", "2"]
    assert np.isfinite([float(row["train_loss"]) for row in rows]).all()
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())
    assert "step skipped" in (tmp_path / "log.txt").read_text()


def test_a_skipped_step_leaves_the_running_statistics_alone(tmp_path, monkeypatch):
    """Batch norms have seen the bad step, and the search for the bad layer shows it to them again."""
    model = {"name": "soft_tiny", "img_size": 32, "embed_dims": [8] * 4, "depths": [1] * 4, "num_heads": [1] * 4}
    train = {"nonfinite": "skip", "accumulate": 2, "max_steps": 1}
    given = {"data": {"batch_size": 10}, "model": model | {"patch_size": None, "embed_dim": None, "depth": None}}
    trainer.train(tiny(tmp_path / "one", train=train, **given))
    poison(monkeypatch, at=3, labels=True)
    trainer.train(tiny(tmp_path / "two", train=train | {"max_steps": 2}, **given))
    assert table(tmp_path / "two" / "metrics.csv")[0]["skipped_steps"] == "1"
    before, after = state(tmp_path / "one"), state(tmp_path / "two")
    statistics = [name for name in before if name.endswith(("._mean", "._variance"))]
    assert statistics and all(np.array_equal(after[name], before[name]) for name in statistics)


@pytest.fixture
def late(monkeypatch):
    """As on a GPU, where the loss is read every tenth step."""
    monkeypatch.setitem(build.READ_EVERY, "cpu", 10)


def diverging(folder, lr=1e6, **train):
    """A rate so high that the activations of the third step overflow; momentum, batch norm and average have states."""
    model = {"name": "soft_tiny", "img_size": 32, "embed_dims": [8] * 4, "depths": [1] * 4, "num_heads": [1] * 4}
    model |= {"patch_size": None, "embed_dim": None, "depth": None}
    train = {"accumulate": 2, "ema": 0.9, "log_every": 100, "max_steps": 13} | train
    return tiny(folder, model=model, data={"batch_size": 10}, train=train, optimizer={"lr": lr})


def caught(monkeypatch) -> list:
    """The runs that are built from here on."""
    honest, runs = trainer.build_run, []
    monkeypatch.setattr(trainer, "build_run", lambda *arguments: runs.append(honest(*arguments)) or runs[-1])
    return runs


def test_an_overflow_that_is_read_late_is_met_before_its_update(tmp_path, monkeypatch, late):
    """Step, micro-batch, layer and sentence are those of a run that reads every step; so are weights and states."""
    runs = caught(monkeypatch)
    sentences, batches = [], []
    for every in (10, 1):
        monkeypatch.setitem(build.READ_EVERY, "cpu", every)
        with pytest.raises(UserError, match="the first layer whose output is not finite is") as error:
            trainer.train(diverging(tmp_path / "run"))
        sentences.append(str(error.value))
        (path,) = (tmp_path / "run").glob("nonfinite_*.npz")
        batches.append({key: array.tobytes() for key, array in np.load(path).items()})
        (tmp_path / "run").rename(tmp_path / str(every))
    assert sentences[0] == sentences[1] and "epoch 1, step 3" in sentences[0]
    assert batches[0] == batches[1]
    assert "steps 2 to 10 of epoch 1 are done again" in (tmp_path / "10" / "log.txt").read_text()
    trainer.train(diverging(tmp_path / "two", max_steps=2))
    late_run, prompt_run, two_steps = ({k: t.numpy() for k, t in run.state.tensors().items()} for run in runs)
    assert late_run.keys() == prompt_run.keys() == two_steps.keys()
    running = ("._mean", "._variance")  # which the search for the bad layer changes
    for name in two_steps:
        assert np.array_equal(late_run[name], prompt_run[name]) or name.endswith(running), name
        assert np.array_equal(late_run[name], two_steps[name]) or name.endswith(running), name


def test_a_late_reading_skips_what_a_prompt_one_skips(tmp_path, monkeypatch, late):
    """Bit for bit, running statistics and moving average too; the first step is one of them."""
    poison(monkeypatch, at=0, labels=True)
    poison(monkeypatch, at=5, labels=True)
    config = {"nonfinite": "skip", "max_steps": 13}
    trainer.train(diverging(tmp_path / "late", lr=0.01, **config))
    monkeypatch.setitem(build.READ_EVERY, "cpu", 1)
    trainer.train(diverging(tmp_path / "prompt", lr=0.01, **config))
    one, other = state(tmp_path / "late"), state(tmp_path / "prompt")
    assert table(tmp_path / "late" / "metrics.csv")[0]["skipped_steps"] == "2"
    assert one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert all(np.isfinite(value).all() for value in one.values())


def break_weight(monkeypatch, at: int, name: str):
    """From micro-batch `at` of the first epoch on, a weight is NaN, as after an update that overflowed."""
    honest = trainer.batches

    def batches(run, epoch, start):
        for number, batch in enumerate(honest(run, epoch, start), start):
            if (epoch, number) >= (0, at):
                weight = run.state.model.state_dict()[name]
                weight.set_value(paddle.full(weight.shape, float("nan")))
            yield batch

    monkeypatch.setattr(trainer, "batches", batches)


@pytest.mark.parametrize("every", [1, 10])
def test_weights_that_are_not_finite_end_a_run_that_skips(tmp_path, monkeypatch, every):
    monkeypatch.setitem(build.READ_EVERY, "cpu", every)
    break_weight(monkeypatch, 5, "blocks.1.mlp.fc1.weight")
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.fc1\.weight is not finite before step 6 of epoch 1"):
        trainer.train(tiny(tmp_path, train={"nonfinite": "skip", "save_every_steps": 2, "epochs": 3}))
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())
    assert not list(tmp_path.glob("nonfinite_*")) and not (tmp_path / "checkpoints" / "best.safetensors").exists()


def test_running_statistics_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    """Paddle's ReLU makes zeros of NaN, so that the loss does not show them."""
    break_weight(monkeypatch, 5, "patch_embed.proj.1._variance")
    given = tiny(tmp_path, model={"name": "deit_nano"}, train={"save_every_steps": 4, "epochs": 2})
    with pytest.raises(UserError, match=r"patch_embed\.proj\.1\._variance is not finite after step 8"):
        trainer.train(given)
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())


def test_of_many_bad_batches_a_few_are_kept(tmp_path, monkeypatch):
    honest = trainer.batches

    def batches(run, epoch, start):
        for number, (images, targets, unreadable) in enumerate(honest(run, epoch, start), start):
            if number % 2 or epoch == 1:
                targets[0, 0] = float("nan")
            yield images, targets, unreadable

    monkeypatch.setattr(trainer, "batches", batches)
    with pytest.raises(UserError, match="No step of epoch 2 had a finite loss"):
        trainer.train(tiny(tmp_path, train={"nonfinite": "skip", "epochs": 3}))
    assert [row["skipped_steps"] for row in table(tmp_path / "metrics.csv")] == ["7"]
    assert (tmp_path / "log.txt").read_text().count("step skipped") == 7 + 14
    assert len(list(tmp_path.glob("nonfinite_*.npz"))) == 3


def test_an_accuracy_without_a_finite_loss_is_never_the_best(tmp_path, monkeypatch):
    honest, losses = trainer.evaluate, iter([2.0, float("nan"), 3.0])

    def evaluate(*arguments):
        result = honest(*arguments)
        result.metrics |= {"loss": next(losses), "top1": 0.5}
        if np.isnan(result.metrics["loss"]):
            result.metrics["top1"] = 1.0
        return result

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    summary = trainer.train(tiny(tmp_path, train={"epochs": 3}))
    assert (summary["best_top1"], summary["best_epoch"]) == (0.5, 1)


def test_the_first_layer_that_overflows_is_named():
    from ppattn import create_model

    model = create_model("deit_tiny", img_size=8, patch_size=2, embed_dim=12, depth=3, num_heads=3, num_classes=4)
    model.train()
    images = paddle.randn([2, 3, 8, 8])
    assert first_layer(model, images) == "every layer's output is finite"
    weight = model.state_dict()["blocks.1.mlp.fc1.weight"]
    weight.set_value(paddle.full(weight.shape, 3e38))
    named = first_layer(model, images)
    assert named.startswith("the first layer whose output is not finite is blocks.1")  # one operator when compiled
    assert first_of(dict(model.named_parameters())) is None
    weight.set_value(paddle.full(weight.shape, float("inf")))
    assert first_of(dict(model.named_parameters())) == "blocks.1.mlp.fc1.weight"
