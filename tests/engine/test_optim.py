"""Schedule, loss, optimizers and moving average, each against an independent truth."""

import math
from typing import get_args

import numpy as np
import paddle
import pytest
from paddle import nn
from scipy.special import log_expit, log_softmax

import ppattn
from ppattn.config import make_config
from ppattn.data.loader import balanced_order
from ppattn.engine.loss import criterion
from ppattn.engine.optim import build_optimizer, freeze, load_optimizer, lr_at, optimizer_tensors
from ppattn.engine.state import Ema
from ppattn.errors import UserError
from ppattn.settings import Config, Optimizer

MATRICES = [f"blocks.0.{layer}.weight" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
DECAYED = ["patch_embed.proj.weight", "head.weight", *MATRICES]


def config(**sections) -> Config:
    return make_config(sections)


def toy(stem: str = "patch") -> nn.Layer:
    """Always the same weights."""
    paddle.seed(3)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 4, "stem": stem}
    return ppattn.create_model("deit_tiny", **shape)


def test_position_tables_of_agent_attention_are_decayed_and_biases_are_not():
    """As in agent_transformer/optimizer.py of the official code: 1-D parameters and names that end with ".bias"."""
    for name, words in {"agent": ("an_bias", "ha_bias"), "inline": ()}.items():
        model = ppattn.create_model("deit_nano", attention=name, num_classes=2)
        optimizer = build_optimizer(config(optimizer={"name": "adamw"}), model)
        kept = {n for n, p in model.named_parameters() if "bias" in n and optimizer._apply_decay_param_fun(p.name)}
        assert {n.rpartition(".")[2] for n in kept} >= set(words) and bool(kept) == bool(words)


def value(logits, targets, counts=(3, 1, 2), **settings):
    loss = config(loss=settings).loss
    return float(criterion(loss, np.array(counts))(paddle.to_tensor(logits), paddle.to_tensor(targets)))


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0], "balanced"])
@pytest.mark.parametrize("name", ["ce", "focal", "bce"])
def test_losses_are_their_formulas(name, weights):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(5, 3)).astype("f4"), rng.dirichlet(np.ones(3), 5).astype("f4")
    w = np.array([6 / 9, 2, 1] if weights == "balanced" else weights or [1, 1, 1])
    log_p = log_softmax(logits, axis=1)
    expected = {
        "ce": -((w * targets).sum(1) * (targets * log_p).sum(1)).mean(),
        "focal": -((w * targets).sum(1) * (targets * (1 - np.exp(log_p)) ** 1.5 * log_p).sum(1)).mean(),
        "bce": -(w * (targets * log_expit(logits) + (1 - targets) * log_expit(-logits))).mean(),
    }
    found = value(logits, targets, name=name, gamma=1.5, class_weights=weights)
    assert found == pytest.approx(expected[name], rel=1e-5)


def test_the_focal_loss_of_a_sure_image_has_a_gradient():
    logits = paddle.to_tensor([[40.0, 0.0]], stop_gradient=False)
    loss = criterion(config(loss={"name": "focal", "gamma": 0.5}).loss, np.ones(2))
    loss(logits, paddle.to_tensor([[1.0, 0.0]])).backward()
    assert not logits.grad.isnan().any()


def test_class_weights_are_one_per_class():
    with pytest.raises(UserError, match="has 2 numbers, the data 3 classes"):
        value(np.zeros((1, 3), "f4"), np.zeros((1, 3), "f4"), class_weights=[1.0, 2.0])


def test_a_balanced_epoch_has_every_class_equally_often():
    labels = np.repeat([0, 1, 3], [90, 7, 3])
    order = balanced_order(labels, np.random.default_rng(1))
    assert order.shape == (100, 2) and sorted(np.bincount(labels[order[:, 0]])) == [0, 33, 33, 34]
    assert len(np.unique(order, axis=0)) == 100  # a copy has its own number, hence its own augmentation
    assert len(set(order[labels[order[:, 0]] == 0, 0].tolist())) >= 33


def test_cosines_are_timms():
    # t_initial=210, lr=2e-3, lr_min=4e-5, warmup_t=21, warmup_lr_init=2e-6, t_in_epochs=False
    truth = {0: 2e-06, 1: 9.714285714285715e-05, 20: 0.0019048571428571433, 21: 0.0019520353859692507}
    truth |= {22: 0.0019474008361231808, 105: 0.00102, 209: 4.0109660225932036e-05, 210: 4e-05, 215: 4e-05}
    schedule = {"warmup_epochs": 3, "warmup_lr": 1e-6, "min_lr": 2e-5}
    given = config(train={"epochs": 30}, optimizer={"lr": 1e-3, "lr_batch": 512}, schedule=schedule)
    for step, lr in truth.items():
        assert lr_at(step, given, steps_per_epoch=7, total_batch=1024) == pytest.approx(lr, rel=1e-12)
    # only the peak is scaled: t_initial=30, lr=1e-3, lr_min=5e-5, warmup_t=10, warmup_lr_init=1e-6, t_in_epochs=True
    truth = {0: 1e-06, 1: 0.00010090000000000001, 9: 0.0009001000000000001, 10: 0.0007625, 15: 0.0005250000000000001}
    truth |= {29: 5.2602099700070135e-05, 30: 5e-05, 33: 5e-05}
    schedule = {"warmup_epochs": 10, "warmup_lr": 1e-6, "min_lr": 5e-5, "per": "epoch"}
    optimizer = {"lr": 1e-3 * 1024 / 384, "lr_batch": 1024, "lr_batch_scales": "peak"}
    given = config(train={"epochs": 30}, optimizer=optimizer, schedule=schedule)
    for step, lr in ((7 * epoch + within, lr) for epoch, lr in truth.items() for within in (0, 6)):
        assert lr_at(step, given, steps_per_epoch=7, total_batch=384) == pytest.approx(lr, rel=1e-12)


def test_the_rate_drops_in_steps():
    schedule = {"name": "step", "decay_epochs": 2, "decay_rate": 0.5, "warmup_epochs": 1.0, "min_lr": 0.15}
    given = make_config({"schedule": schedule, "train": {"epochs": 8}, "optimizer": {"lr": 0.8}})
    rates = [lr_at(10 * epoch + 5, given, 10, 1) for epoch in range(9)]
    assert rates == pytest.approx([0.4, 0.8, 0.4, 0.4, 0.2, 0.2, 0.15, 0.15, 0.15])


def test_muon_takes_the_weights_of_linear_layers_in_the_blocks():
    """Not the matrix that mixes the blocks of MHLA, nor the classifier."""
    model = ppattn.create_model("deit_nano", attention="mhla", depth=1)
    optimizer = build_optimizer(config(optimizer={"name": "muon"}), model)
    assert {name for name, p in model.named_parameters() if p.name in optimizer.matrices} == {*MATRICES}


def muon_direction(matrix):
    """Newton-Schulz steps act on the singular values alone: s <- a s + b s^3 + c s^5, from s of Euclidean norm 1."""
    u, s, v = np.linalg.svd(matrix.reshape(len(matrix), -1), full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * math.sqrt(max(len(u), len(v.T))) * (u * s @ v).reshape(matrix.shape)


def reference(name, values, grads, state, step, lr, options, scales, clip):
    """One step of Adam (coupled L2), AdamW, Muon or SGD with momentum (coupled L2), after the clipping."""
    factor = min(1.0, clip / math.sqrt(sum(float((g**2).sum()) for g in grads.values())))
    for key, p in values.items():
        g, rate = grads[key] * factor, lr * scales[key]
        if name in ("adam", "sgd"):
            g = g + options["weight_decay"] * p
        m, v = state.setdefault(key, (np.zeros_like(p), np.zeros_like(p)))
        if name == "sgd":
            m = options["momentum"] * m + g
            p = p - rate * m
        elif name == "muon" and (key in MATRICES or (p.ndim == 4 and p.shape[1] != 3)):
            m = options["momentum"] * m + (1 - options["momentum"]) * g
            ahead = options["momentum"] * m + (1 - options["momentum"]) * g
            p = p * (1 - rate * options["weight_decay"]) - rate * muon_direction(ahead)
        else:
            if name != "adam" and (key in DECAYED or p.ndim == 4):
                p = p * (1 - rate * options["weight_decay"])
            b1, b2 = options["betas"]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            p = p - rate * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + options["eps"])
        state[key], values[key] = (m, v), p


OPTIMIZERS = get_args(Optimizer.model_fields["name"].annotation)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layer_decay", [None, 0.65])
def test_optimizer_against_float64(name, layer_decay):
    model = toy("pool" if layer_decay else "patch")
    options = {"name": name, "lr": 1e-2, "weight_decay": 0.3, "betas": [0.8, 0.95], "eps": 1e-6, "momentum": 0.7}
    more = {"layer_decay": layer_decay, "lr_scale": {"head.*": 3.0}, "muon_convs": bool(layer_decay)}
    optimizer = build_optimizer(config(optimizer=options | more, train={"clip_grad": 0.5}), model)
    scales = {key: (layer_decay or 1.0) ** (2 - i) for i, group in enumerate(model.layer_groups()) for key in group}
    scales |= {key: 3.0 * scale for key, scale in scales.items() if key.startswith("head.")}
    trained = {key: p for key, p in model.named_parameters() if not p.stop_gradient}  # BatchNorm has others
    values, state, rng = {k: p.numpy().astype("float64") for k, p in trained.items()}, {}, np.random.default_rng(1)
    for step in range(1, 8):
        (model(paddle.to_tensor(rng.normal(size=(6, 3, 8, 8)), "float32")) ** 2).sum().backward()
        grads = {key: p.grad.numpy().astype("float64") for key, p in trained.items()}
        optimizer.set_lr(1e-2 / step)
        optimizer.step()
        optimizer.clear_grad()
        reference(name, values, grads, state, step, 1e-2 / step, options, scales, 0.5)
        for key, p in trained.items():
            np.testing.assert_allclose(p.numpy(), values[key], rtol=2e-5, atol=2e-6, err_msg=f"{key}, step {step}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_saved_tensors(name):
    """Bit for bit, which a forgotten accumulator would change."""
    steps = np.random.default_rng(1).normal(size=(5, 6, 3, 8, 8)).astype("float32")

    def train(model, optimizer, images):
        for x in images:
            (model(paddle.to_tensor(x)) ** 2).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        return {key: p.numpy() for key, p in model.state_dict().items()}

    def new():
        model = toy()
        return model, build_optimizer(config(optimizer={"name": name, "lr": 1e-2}), model)

    first, second = new(), new()
    second[0].set_state_dict(train(*first, steps[:3]))
    load_optimizer(second[1], second[0], {n: t.numpy() for n, t in optimizer_tensors(first[1], first[0]).items()})
    np.testing.assert_equal(train(*second, steps[3:]), train(*new(), steps))


def test_frozen_running_statistics_do_not_change():
    for patterns, stays in ((["0*"], True), (["0.weight", "0.bias"], False)):
        model = nn.Sequential(nn.BatchNorm2D(3), nn.Conv2D(3, 2, 1))
        freeze(model, patterns)
        model.train()
        x = 5 + paddle.randn([4, 3, 7, 5])
        y = model[0](x)
        assert ((model[0]._mean == 0).all() and (model[0]._variance == 1).all()) == stays
        assert (np.abs((y - x).numpy()).max() < 1e-3) == stays  # normalised with mean 0 and variance 1


def test_freeze_takes_patterns_and_refuses_a_wrong_one():
    model = toy()
    assert freeze(model, ["head*", "pos_embed"]) == ["head.bias", "head.weight", "pos_embed"]
    assert len(build_optimizer(config(), model)._parameter_list) == len(model.parameters()) - 3
    with pytest.raises(UserError, match=r"'haed\.weight'.*Did you mean 'head\.weight'"):
        freeze(model, ["haed.weight"])
    with pytest.raises(UserError, match="no parameter to train"):
        freeze(model, ["*"])


@pytest.mark.parametrize("warmup", [False, True])
def test_ema_against_float64(warmup):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1D(5))
    ema = Ema(model, 0.9, warmup)
    truth = {key: t.numpy().astype("float64") for key, t in model.state_dict().items()}
    for t in range(25):
        decay = min(0.9, (1 + t) / (10 + t)) if warmup else 0.9
        for key, tensor in model.state_dict().items():
            tensor.set_value(paddle.randn(tensor.shape))
            truth[key] = decay * truth[key] + (1 - decay) * tensor.numpy()
        ema.update()
    own = {key: t.numpy() for key, t in model.state_dict().items()}
    with ema.applied():
        for key, tensor in model.state_dict().items():
            np.testing.assert_allclose(tensor.numpy(), truth[key], rtol=1e-5, atol=1e-6)
    np.testing.assert_equal({key: t.numpy() for key, t in model.state_dict().items()}, own)
    assert ema.updates == 25
