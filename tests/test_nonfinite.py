"""Losses that are not finite: the step is named, its update withheld, and nothing damaged is saved."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from runs import state, table, tiny

from ppattn.engine import build, trainer
from ppattn.engine.nonfinite import first_nonfinite
from ppattn.errors import UserError


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
    """Bit for bit, running statistics and moving average too."""
    poison(monkeypatch, at=5, labels=True)
    config = {"nonfinite": "skip", "max_steps": 13}
    trainer.train(diverging(tmp_path / "late", lr=0.01, **config))
    monkeypatch.setitem(build.READ_EVERY, "cpu", 1)
    trainer.train(diverging(tmp_path / "prompt", lr=0.01, **config))
    one, other = state(tmp_path / "late"), state(tmp_path / "prompt")
    assert table(tmp_path / "late" / "metrics.csv")[0]["skipped_steps"] == "1"
    assert one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert all(np.isfinite(value).all() for value in one.values())


def test_the_first_layer_that_overflows_is_named():
    from ppattn import create_model

    model = create_model("deit_tiny", img_size=8, patch_size=2, embed_dim=12, depth=3, num_heads=3, num_classes=4)
    model.train()
    images = paddle.randn([2, 3, 8, 8])
    assert first_nonfinite(model, images) == "every layer's output is finite"
    weight = model.state_dict()["blocks.1.mlp.fc1.weight"]
    weight.set_value(paddle.full(weight.shape, 3e38))
    named = first_nonfinite(model, images)
    assert named.startswith("the first layer whose output is not finite is blocks.1")  # one operator when compiled
    weight.set_value(paddle.full(weight.shape, float("inf")))
    assert first_nonfinite(model, images) == "parameter blocks.1.mlp.fc1.weight was no longer finite before this step"
