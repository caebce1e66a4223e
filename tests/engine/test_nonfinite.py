"""Losses and weights that are not finite: the run ends, nothing damaged is saved, and a replay finds the place."""

import numpy as np
import paddle
import pytest

from ppattn.cli import main
from ppattn.data import TrainLoader
from ppattn.engine import trainer
from ppattn.errors import UserError
from tests.helpers.runs import state, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1, 10], ids=["checked at every step", "at every tenth"])
def every(request, monkeypatch) -> int:
    monkeypatch.setitem(trainer.CHECK_EVERY, "cpu", request.param)
    return request.param


def poison(monkeypatch, at: int, what: str = "images"):
    """NaN in one image, or one target, of micro-batch `at` of the run."""
    honest = TrainLoader._finish

    def finish(self, number, pixels, made):
        batch = honest(self, number, pixels, made)
        if number == at:
            getattr(batch, what).ravel()[7] = float("nan")
        return batch

    monkeypatch.setattr(TrainLoader, "_finish", finish)


@pytest.mark.parametrize(("what", "told"), [("images", "images themselves"), ("targets", "targets themselves")])
def test_a_bad_batch_ends_the_run_and_the_replay_finds_it(tmp_path, monkeypatch, capsys, every, what, told):
    """The ninth micro-batch is the first of the fifth step; the last save is that after the third."""
    poison(monkeypatch, at=8, what=what)
    given = tiny(tmp_path, train={"save_every_steps": 3, "accumulate": 2, "ema": 0.9, "log_every": 100})
    where = "at step 5 of epoch 1" if every == 1 else "at step 4 of epoch 1 to step 6 of epoch 1"
    with pytest.raises(UserError, match=rf"The loss is not finite {where}\. `ppattn debug --run {tmp_path}`"):
        trainer.train(given)
    before = (tmp_path / "checkpoints" / "latest.safetensors").read_bytes()
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())
    assert main(["debug", "--run", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert f"step 5 of epoch 1 (step 5 of the run), micro-batch 1 of 2: the {told} are not finite" in found
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
    found = capsys.readouterr().out
    place = "step 3 of epoch 1 (step 3 of the run), micro-batch 1 of 2"
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


def break_weight(monkeypatch, at: int, name: str):
    """From micro-batch `at` of the run on, a weight is NaN, as after an update that overflowed."""
    honest = trainer.update

    def update(run):
        honest(run)
        if run.state.progress.step + 1 >= at:
            weight = run.state.model.state_dict()[name]
            weight.set_value(paddle.full(weight.shape, float("nan")))

    monkeypatch.setattr(trainer, "update", update)
    monkeypatch.setattr("ppattn.engine.debug.update", update)


def test_running_statistics_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, capsys):
    """Paddle's ReLU makes zeros of NaN, so that the loss does not show them."""
    break_weight(monkeypatch, 5, "patch_embed.proj.1._variance")
    given = tiny(tmp_path, model={"name": "deit_nano"}, train={"save_every_steps": 4, "epochs": 2})
    with pytest.raises(UserError, match=r"patch_embed\.proj\.1\._variance is not finite after step 8 of epoch 1"):
        trainer.train(given)
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())
    assert not (tmp_path / "checkpoints" / "best.safetensors").exists()
    assert main(["debug", "--run", str(tmp_path)]) == 0
    assert "_variance is not finite after step 5 of epoch 1" in capsys.readouterr().out


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
