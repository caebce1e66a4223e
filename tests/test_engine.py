"""Optimizers, schedule, loss, average, evaluation and the rules of the loop, each against an independent truth."""

from __future__ import annotations

import csv
import json
import logging
import math
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

import ppattn
from ppattn import weights
from ppattn.cli import main
from ppattn.config import Config, make_config
from ppattn.engine import session, trainer
from ppattn.engine.ema import Ema
from ppattn.engine.evaluate import Evaluation, confusion, evaluate, write_evaluation
from ppattn.engine.optim import build_optimizer, freeze, lr_at
from ppattn.engine.step import TrainStep, first_nonfinite
from ppattn.errors import UserError


class Toy(nn.Layer):
    """Two matrices with biases, a norm and a position table: what the parameter groups tell apart."""

    def __init__(self):
        super().__init__()
        self.table = self.create_parameter([1, 3, 5])
        self.body = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 4)

    def forward(self, x):
        return self.head(nn.functional.gelu(self.norm(self.body(x + self.table)))).mean(axis=1)

    def forward_train(self, x):
        return self(x), {}

    def no_weight_decay(self):
        return {"table"}

    def layer_groups(self):
        return [["table"], ["body.weight", "body.bias"], ["norm.weight", "norm.bias", "head.weight", "head.bias"]]


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def config(**sections) -> Config:
    return make_config(sections)


# --- schedule: numbers of timm 1.0.9's CosineLRScheduler(cycle_limit=1) ---


def test_cosine_per_step_is_timms():
    # t_initial=210, lr=2e-3, lr_min=4e-5, warmup_t=21, warmup_lr_init=2e-6, t_in_epochs=False
    truth = {0: 2e-06, 1: 9.714285714285715e-05, 20: 0.0019048571428571433, 21: 0.0019520353859692507}
    truth |= {22: 0.0019474008361231808, 105: 0.00102, 209: 4.0109660225932036e-05, 210: 4e-05, 215: 4e-05}
    schedule = {"warmup_epochs": 3, "warmup_lr": 1e-6, "min_lr": 2e-5}
    given = config(train={"epochs": 30}, optimizer={"lr": 1e-3, "lr_batch": 512}, schedule=schedule)
    for step, lr in truth.items():
        assert lr_at(step, given, steps_per_epoch=7, total_batch=1024) == pytest.approx(lr, rel=1e-12)


def test_cosine_per_epoch_is_timms_and_only_the_peak_is_scaled():
    # t_initial=30, lr=1e-3, lr_min=5e-5, warmup_t=10, warmup_lr_init=1e-6, t_in_epochs=True
    truth = {0: 1e-06, 1: 0.00010090000000000001, 9: 0.0009001000000000001, 10: 0.0007625, 15: 0.0005250000000000001}
    truth |= {29: 5.2602099700070135e-05, 30: 5e-05, 33: 5e-05}
    schedule = {"warmup_epochs": 10, "warmup_lr": 1e-6, "min_lr": 5e-5, "per": "epoch"}
    optimizer = {"lr": 1e-3 * 1024 / 384, "lr_batch": 1024, "lr_batch_scales": "peak"}
    given = config(train={"epochs": 30}, optimizer=optimizer, schedule=schedule)
    for epoch, lr in truth.items():
        for step in (7 * epoch, 7 * epoch + 6):
            assert lr_at(step, given, steps_per_epoch=7, total_batch=384) == pytest.approx(lr, rel=1e-12)


def test_schedule_of_the_notebook_is_paddles_cosine():
    given = config(train={"epochs": 100}, optimizer={"lr": 3e-4})
    paddles = paddle.optimizer.lr.CosineAnnealingDecay(3e-4, T_max=50_000 // 256 * 100)
    for step in range(400):
        assert lr_at(step, given, 50_000 // 256, 256) == pytest.approx(paddles(), rel=1e-9)
        paddles.step()


# --- loss ---


def test_label_smoothing_is_the_formula_of_the_notebook():
    from ppattn.data import smooth_targets

    rng = np.random.default_rng(0)
    logits, labels, eps = rng.normal(size=(5, 7)), rng.integers(0, 7, 5), 0.1
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    truth = ((1 - eps) * -log_p[np.arange(5), labels] + eps * -log_p.mean(1)).mean()
    model = SimpleNamespace(forward_train=lambda x: (x, {"shape": paddle.to_tensor(0.25)}))
    targets = smooth_targets(labels, 7, eps)
    loss = TrainStep.forward(SimpleNamespace(model=model), paddle.to_tensor(logits), paddle.to_tensor(targets))
    assert loss.item() == pytest.approx(truth + 0.25, rel=1e-6)


# --- optimizers in float64 numpy ---


def reference(name, values, grads, state, step, lr, options, decays, scales, clip):
    """One step of Adam (coupled L2), AdamW or SGD with momentum (coupled L2), after clipping by the global norm."""
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    factor = min(1.0, clip / norm)
    for key, p in values.items():
        g, rate = grads[key] * factor, lr * scales[key]
        if name != "adamw":
            g = g + options["weight_decay"] * p
        m, v = state.setdefault(key, (np.zeros_like(p), np.zeros_like(p)))
        if name == "sgd":
            m = options["momentum"] * m + g
            p = p - rate * m
        else:
            if name == "adamw" and key in decays:
                p = p * (1 - rate * options["weight_decay"])
            b1, b2 = options["betas"]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            p = p - rate * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + options["eps"])
        state[key], values[key] = (m, v), p


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("layer_decay", [None, 0.65])
def test_optimizer_against_float64(name, layer_decay):
    paddle.seed(3)
    model = Toy()
    options = {"name": name, "lr": 1e-2, "weight_decay": 0.3, "betas": [0.8, 0.95], "eps": 1e-6, "momentum": 0.7}
    given = config(optimizer=options | {"layer_decay": layer_decay}, train={"clip_grad": 0.5})
    optimizer = build_optimizer(given, model)
    decay = layer_decay or 1.0
    scales = {key: decay ** (2 - i) for i, group in enumerate(model.layer_groups()) for key in group}
    values = {key: p.numpy().astype("float64") for key, p in model.named_parameters()}
    state, rng = {}, np.random.default_rng(1)
    for step in range(1, 8):
        x = paddle.to_tensor(rng.normal(size=(6, 3, 5)), "float32")
        (model(x) ** 2).sum().backward()
        grads = {key: p.grad.numpy().astype("float64") for key, p in model.named_parameters()}
        optimizer.set_lr(1e-2 / step)
        optimizer.step()
        optimizer.clear_grad()
        reference(name, values, grads, state, step, 1e-2 / step, options, {"body.weight", "head.weight"}, scales, 0.5)
        for key, p in model.named_parameters():
            np.testing.assert_allclose(p.numpy(), values[key], rtol=2e-5, atol=2e-6, err_msg=f"{key}, step {step}")


def test_freeze_takes_patterns_and_refuses_a_wrong_one():
    model = Toy()
    assert freeze(model, ["body*", "table"]) == ["body.bias", "body.weight", "table"]
    assert len(build_optimizer(config(), model)._parameter_list) == 4
    with pytest.raises(UserError, match=r"'bodi\.weight'.*Did you mean 'body\.weight'"):
        freeze(model, ["bodi.weight"])
    with pytest.raises(UserError, match="no parameter to train"):
        freeze(model, ["*"])


# --- moving average ---


@pytest.mark.parametrize("warmup", [False, True])
def test_ema_against_float64(warmup):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1D(5))
    ema = Ema(model, 0.9, warmup)
    truth = {key: t.numpy().astype("float64") for key, t in model.state_dict().items()}
    rng = np.random.default_rng(2)
    for t in range(25):
        for key, tensor in model.state_dict().items():
            value = rng.normal(size=tensor.shape).astype("float32")
            tensor.set_value(value)
            decay = min(0.9, (1 + t) / (10 + t)) if warmup else 0.9
            truth[key] = decay * truth[key] + (1 - decay) * value
        ema.update()
    own = {key: t.numpy() for key, t in model.state_dict().items()}
    with ema.applied():
        for key, tensor in model.state_dict().items():
            np.testing.assert_allclose(tensor.numpy(), truth[key], rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(own[key], t.numpy()) for key, t in model.state_dict().items())
    assert ema.updates == 25


# --- evaluation ---


def parts(logits, labels, sizes, leave_out=()):
    """What `eval_loader` yields; the images are the logits themselves."""
    start = 0
    for size in sizes:
        indices = np.array([i for i in range(start, start + size) if i not in leave_out], "int64")
        yield logits[indices], labels[indices], indices
        start += size


def test_evaluation_weighs_every_image_the_same():
    rng = np.random.default_rng(4)
    logits, labels = rng.normal(size=(43, 7)), rng.integers(0, 7, 43)
    result = evaluate(lambda x: x, parts(logits, labels, [20, 20, 3]), 43)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ranks = (logits > logits[np.arange(43), labels][:, None]).sum(1)
    truth = {"top1": (ranks < 1).mean(), "top5": (ranks < 5).mean(), "loss": -log_p[np.arange(43), labels].mean()}
    for key, value in truth.items():
        assert result.metrics[key] == pytest.approx(value, rel=1e-12)
    assert list(result.metrics) == ["top1", "top5", "loss", "images", "images_per_second", "seconds"]
    assert result.metrics["images"] == 43
    assert np.array_equal(result.predicted, logits.argmax(1))


def test_equal_logits_are_no_success():
    result = evaluate(lambda x: x, parts(np.zeros((9, 3)), np.arange(9) % 3, [9]), 9)
    assert result.metrics["top1"] == pytest.approx(1 / 3)
    assert result.metrics["top5"] == 1.0  # three classes


def test_unreadable_images_count_as_wrong():
    logits, labels = np.eye(4)[np.arange(10) % 4], np.arange(10) % 4
    result = evaluate(lambda x: x, parts(logits, labels, [5, 5], leave_out=(2, 7)), 10)
    assert result.metrics["top1"] == 0.8
    assert (result.metrics["images"], result.metrics["unreadable"]) == (10, 2)


def test_evaluation_stops_when_told():
    assert evaluate(lambda x: x, parts(np.eye(4), np.arange(4), [2, 2]), 4, stopped=lambda: True) is None


def test_confusion_is_sklearns_also_with_one_class():
    from sklearn.metrics import confusion_matrix

    labels, predicted = np.random.default_rng(0).integers(0, 4, (2, 50))
    counts, names = confusion(labels, predicted, list("abcd"))
    assert np.array_equal(counts, confusion_matrix(labels, predicted)) and names == list("abcd")
    predicted[7:9] = -1
    counts, names = confusion(labels, predicted, list("abcd"))
    truth = confusion_matrix(labels, predicted, labels=[0, 1, 2, 3, -1])[:4]
    assert np.array_equal(counts, truth) and names == [*"abcd", "unreadable"]
    assert confusion(np.zeros(3, int), np.zeros(3, int), ["a"])[0].tolist() == [[3]]  # of which sklearn warns


def test_top5_of_five_classes_or_fewer_is_not_told():
    row = {"epoch": 1, "train_loss": 1.0, "val_loss": 1.0, "top1": 0.5, "top5": 1.0}
    row |= {"unreadable_train": 0, "images_per_second": 3.0}
    assert "top-5 100.00 %" in trainer.in_words(row, 2, classes=6)
    assert "top-1 50.00 %, 3 img/s" in trainer.in_words(row, 2, classes=5)


def test_files_of_an_evaluation(tmp_path):
    from ppattn.data import Preprocess

    labels = np.array([0, 0, 1, 1, 1, 2])
    predicted = np.array([0, 1, 1, 1, 2, -1])  # the last one could not be read
    image = np.full((6, 5, 3), 128, np.uint8)
    split = SimpleNamespace(labels=labels, image=lambda i: image)
    write_evaluation(tmp_path, Evaluation({"top1": 0.5}, predicted), split, ["cat", "dog", "emu"], Preprocess((8, 8)))
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"top1": 0.5}
    rows = table(tmp_path / "per_class.csv")
    assert [row["class"] for row in rows] == ["cat", "dog", "emu"]
    dog = rows[1]
    assert (dog["images"], dog["mostly_taken_for"], dog["times"]) == ("3", "emu", "1")
    assert (float(dog["accuracy"]), float(dog["precision"])) == (0.6667, 0.6667)
    assert [(row["images"], row["unreadable"]) for row in rows] == [("2", "0"), ("3", "0"), ("1", "1")]
    assert sum(int(row["images"]) * float(row["accuracy"]) for row in rows) == pytest.approx(3, abs=1e-3)
    readable = Evaluation({"top1": 0.6}, predicted[:-1])
    split.labels = labels[:-1]
    write_evaluation(tmp_path, readable, split, ["cat", "dog", "emu"], Preprocess((8, 8)))
    assert "unreadable" not in table(tmp_path / "per_class.csv")[0]
    for name in ("confusion_matrix.png", "predictions.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# --- the eval verb ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer.train(
        tiny(folder, train={"max_steps": 12, "threads": 1}, model={"name": "deit_nano", "attention": "inline"})
    )
    return folder


def metrics(folder) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def test_eval_of_a_run_and_of_its_weights(trained, tmp_path, capsys):
    assert main("eval", ["--run", str(trained)]) == 0
    written = metrics(trained / "eval")
    assert list(written) == ["top1", "top5", "loss", "images", "images_per_second", "seconds"]
    last = table(trained / "metrics.csv")[-1]
    assert written["top1"] == pytest.approx(float(last["top1"]), abs=1e-6)
    assert written["loss"] == pytest.approx(float(last["val_loss"]), rel=1e-6)
    names = {path.name for path in (trained / "eval").iterdir()}
    assert names == {"metrics.json", "per_class.csv", "confusion_matrix.png", "predictions.png"}
    for weights_file in ("checkpoints/best", "checkpoints/latest.safetensors"):
        call = ["-c", str(trained / "config.yaml"), "--weights", str(trained / weights_file), "--output", str(tmp_path)]
        assert main("eval", call) == 0
        assert metrics(tmp_path)["top1"] == written["top1"]
    assert "top-1" in capsys.readouterr().out


def test_eval_of_a_plain_paddle_state_dict(trained, tmp_path):
    arrays = weights.read(trained / "checkpoints" / "best")[0]
    paddle.save({name: paddle.to_tensor(array) for name, array in arrays.items()}, str(tmp_path / "plain.pdparams"))
    call = ["-c", str(trained / "config.yaml"), "--weights", str(tmp_path / "plain"), "--output", str(tmp_path)]
    assert main("eval", call) == 0
    assert main("eval", ["--run", str(trained)]) == 0
    assert metrics(tmp_path)["loss"] == metrics(trained / "eval")["loss"]


def test_eval_of_an_exported_model(trained, tmp_path, monkeypatch):
    """The predictor answers probabilities; the cross-entropy comes out the same."""
    from ppattn.engine.checkpoint import load_run

    given, model, classes, preprocess = load_run(trained)
    predictor = SimpleNamespace(classes=classes, preprocess=preprocess, source={"config": given.model_dump()})
    predictor.run = lambda images: nn.functional.softmax(model(paddle.to_tensor(images))).numpy()
    monkeypatch.setitem(vars(ppattn), "Predictor", lambda folder: predictor)
    assert main("eval", ["--run", str(trained)]) == 0
    assert main("eval", ["--model", str(tmp_path)]) == 0
    exported, own = metrics(tmp_path / "eval"), metrics(trained / "eval")
    assert exported["top1"] == own["top1"]
    assert exported["loss"] == pytest.approx(own["loss"], rel=1e-5)
    predictor.source = None
    assert main("eval", ["--model", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ([], "--run DIR, or -c YAML --weights FILE, or --model EXPORTED"),
        (["--run", "a", "--model", "b"], "--run DIR, or"),
        (["--weights", "a"], "needs the config of its model"),
        (["--run", "nowhere"], "No weights at 'nowhere'"),
    ],
)
def test_eval_refuses_in_a_sentence(call, words, capsys):
    assert main("eval", call) == 2
    assert words in capsys.readouterr().err


def test_eval_refuses_data_with_other_classes(trained, tmp_path, capsys):
    import cv2

    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            cv2.imwrite(str(tmp_path / split / name / "0.png"), np.zeros((9, 7, 3), np.uint8))
    assert main("eval", ["--run", str(trained), "-o", "data.name=folder", f"data.root={tmp_path}"]) == 2
    assert "knows 10 classes (0, 1, 2, ...), the data has 2 (cat, dog, ...)" in capsys.readouterr().err


# --- the loop ---


def tiny(folder, **changes) -> Config:
    """Digits with a model of a few thousand parameters; sections are merged."""
    tree = {
        "model": {"name": "deit_nano", "img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3},
        "data": {"name": "digits", "batch_size": 100},
        "train": {"epochs": 1, "threads": 1, "seed": 5},
        "optimizer": {"lr": 0.01, "name": "sgd", "weight_decay": 0.0},
    }
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return make_config(tree | {"output": str(folder)})


def state(folder) -> dict[str, np.ndarray]:
    return weights.read(folder / "checkpoints" / "latest")[0]


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
    given = tiny(
        tmp_path / "run", data={"batch_size": 479}, train={"epochs": 1, "accumulate": 2, "threads": 1, "seed": 5}
    )
    trainer.train(given)
    s = trainer.prepare(tiny(tmp_path / "by_hand", data={"batch_size": 479}), None, "")
    micro = list(trainer.batches(s, 0, 0))
    for step, group in enumerate((micro[:2], micro[2:])):
        s.optimizer.set_lr(0.01 * (1 + math.cos(math.pi * step / 2)) / 2)
        images, targets = (paddle.concat([m[i] for m in group]) for i in (1, 2))
        s.step_layer(images, targets).backward()
        s.optimizer.step()
        s.optimizer.clear_grad()
    s.book.close()
    for key, value in s.model.state_dict().items():
        np.testing.assert_allclose(state(tmp_path / "run")[key], value.numpy(), rtol=1e-4, atol=2e-6, err_msg=key)


def test_run_folder_holds_what_was_promised(tmp_path):
    summary = trainer.train(
        tiny(tmp_path, train={"epochs": 2, "max_steps": 20, "threads": 1, "log_every": 5}), command="me"
    )
    promised = {"config.yaml", "env.json", "log.txt", "metrics.csv", "curves.png", "summary.json", "vdl", "checkpoints"}
    assert {path.name for path in tmp_path.iterdir()} == promised
    wanted = ["top1", "best_top1", "best_epoch", "epochs", "steps", "seconds", "images_per_second", "params", "macs"]
    assert list(json.loads((tmp_path / "summary.json").read_text())) == wanted == list(summary)
    assert summary["steps"] == 20
    rows = table(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["14", "20"]
    assert float(rows[0]["data_ms"]) > 0 < float(rows[0]["backward_ms"])
    assert json.loads((tmp_path / "env.json").read_text())["command"] == "me"
    assert "epoch 2 step 6/14" in (tmp_path / "log.txt").read_text()
    assert list((tmp_path / "vdl").iterdir())


def test_a_run_starts_from_the_average_of_another(tmp_path):
    trainer.train(tiny(tmp_path, train={"max_steps": 3, "threads": 1, "ema": 0.5}))
    saved = state(tmp_path)
    for reset, names in ((False, ["head.weight", "blocks.0.attn.qkv.weight"]), (True, ["blocks.0.attn.qkv.weight"])):
        given = tiny(tmp_path, model={"weights": str(tmp_path / "checkpoints/latest"), "reset_head": reset})
        model, _ = session.build_model(given, list("0123456789"), fresh=True)
        for name in names:
            assert np.array_equal(model.state_dict()[name].numpy(), saved[f"ema/{name}"])
            assert not np.array_equal(saved[name], saved[f"ema/{name}"])
    assert not np.array_equal(model.state_dict()["head.weight"].numpy(), saved["ema/head.weight"])


def test_a_fresh_start_moves_an_earlier_run_aside(tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        trainer.train(tiny(run, train={"max_steps": 1, "threads": 1}))
    assert (tmp_path / "run.1" / "checkpoints" / "best.safetensors").exists()
    assert f"is now in {run}.1" in (run / "log.txt").read_text()


def pictures(root, train: int, val: int) -> None:
    """Class folders a and b, this many images in each."""
    import cv2

    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for name in "ab":
            for i in range(count):
                (root / part / name).mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(root / part / name / f"{i}.png"), rng.integers(0, 256, (9, 8, 3)).astype(np.uint8))


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_counted_per_epoch(tmp_path, workers, caplog):
    pictures(tmp_path / "data", train=6, val=2)
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


def test_the_log_says_that_one_folder_serves_for_both(tmp_path):
    pictures(tmp_path / "data", train=0, val=2)
    data = {"name": "imagenet", "root": str(tmp_path / "data"), "batch_size": 2}
    trainer.train(tiny(tmp_path / "run", data=data, train={"max_steps": 1}))
    assert "val serve as both" in (tmp_path / "run" / "log.txt").read_text()


def test_early_stopping(tmp_path):
    stop = {"epochs": 30, "threads": 1, "early_stop": {"patience": 2, "min_delta": 1.0}}
    assert trainer.train(tiny(tmp_path, train=stop))["epochs"] == 3  # the first counts as better, then two do not


def test_fine_tuning_resets_the_head_and_keeps_frozen_parts(tmp_path):
    short = {"max_steps": 2, "threads": 1}
    trainer.train(tiny(tmp_path / "first", train=short))
    before = weights.read(tmp_path / "first/checkpoints/best")[0]
    model = {"weights": str(tmp_path / "first/checkpoints/best"), "reset_head": True, "freeze": ["blocks.*", "pos*"]}
    s = trainer.prepare(
        tiny(tmp_path / "zero", model=tiny("x").model.arguments() | {"name": "deit_nano"} | model), None, ""
    )
    s.book.close()
    start = {key: t.numpy() for key, t in s.model.state_dict().items()}
    assert all(np.array_equal(start[key], before[key]) != key.startswith("head.") for key in start)
    second = tiny(tmp_path / "second", train=short, model=tiny("x").model.arguments() | {"name": "deit_nano"} | model)
    trainer.train(second)
    after = state(tmp_path / "second")
    moved = {key for key in before if not np.array_equal(after[key], before[key])}
    assert moved and not any(key.startswith(("blocks.", "pos")) for key in moved)


# --- losses that are not finite ---


def poison(monkeypatch, at: int, labels: bool = False):
    """NaN in one image, or one target, of micro-batch `at` of every epoch."""
    honest = trainer.batches

    def batches(s, epoch, start):
        for micro, images, *rest in honest(s, epoch, start):
            if micro == at and labels:
                rest[0][3, 1] = float("nan")
            elif micro == at:
                images[3, 1, 2, 4] = float("nan")
            yield micro, images, *rest

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


def test_a_late_reading_still_finds_the_step(tmp_path, monkeypatch):
    """As on a GPU, where the loss is read every tenth step: the step is right, and nothing damaged was saved."""
    poison(monkeypatch, at=5)
    monkeypatch.setattr(session, "READ_EVERY", 10)
    honest = session.Session
    monkeypatch.setattr(session, "Session", lambda **fields: honest(**fields | {"read_every": 10}))
    with pytest.raises(UserError, match="epoch 1, step 6 is not finite"):
        trainer.train(tiny(tmp_path, train={"save_every_steps": 4, "threads": 1}))
    assert all(np.isfinite(value).all() for value in state(tmp_path).values())


def test_the_first_layer_that_overflows_is_named():
    from ppattn import create_model

    model = create_model("deit_nano", img_size=8, patch_size=2, embed_dim=12, depth=3, num_heads=3, num_classes=4)
    model.train()
    images = paddle.randn([2, 3, 8, 8])
    assert first_nonfinite(model, images) == "every layer's output is finite"
    weight = model.state_dict()["blocks.1.mlp.fc1.weight"]
    weight.set_value(paddle.full(weight.shape, 3e38))
    named = first_nonfinite(model, images)
    assert named.startswith("the first layer whose output is not finite is blocks.1.mlp")  # one operator when compiled
    weight.set_value(paddle.full(weight.shape, float("inf")))
    assert first_nonfinite(model, images) == "parameter blocks.1.mlp.fc1.weight was no longer finite before this step"


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"amp": "bf16"}}, "needs a GPU"),
        ({"model": {"name": "deit_nano", "num_classes": 7}}, "num_classes = 7, but the data has 10"),
        ({"data": {"batch_size": 1438}}, "1437 training images"),
        ({"model": {"name": "deit_nano", "weights": "nowhere"}}, "No weights at 'nowhere'"),
    ],
)
def test_refused_in_a_sentence(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        trainer.train(tiny(tmp_path, **changes))
