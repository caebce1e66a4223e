"""Shipped configs are loaded, built and stepped once, shrunk by rule: 8 channels per head, two small images."""

import re
from itertools import cycle

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import zoo
from ppattn.config import load_config
from ppattn.data import mix, smooth_targets
from ppattn.engine.loss import ModelWithLoss
from ppattn.engine.optim import build_optimizer, lr_at

FILES = sorted(p for p in ppattn.CONFIGS.rglob("*.yaml") if p.parent.name != "base")


def shrunk(config) -> dict:
    """Arguments that make the model of a config small without changing its structure."""
    entry, arguments = zoo.model_entry(config.model.name), config.model.arguments()
    if "nano" in config.model.name:
        return arguments
    heads = entry.arguments.get("num_heads", [1, 2, 5, 8])
    if entry.backbone.startswith(("pvt", "soft")):
        return arguments | {"embed_dims": [8 * h for h in heads], "img_size": 64}
    return arguments | {"embed_dim": 8 * (heads if entry.backbone == "deit" else heads[0]), "img_size": 64}


LARGER = re.compile("(?<=_)(small|medium|large|huge|b[1-5])$")  # of a family: the base has layers of several attentions
CASES = {f"{path.parent.name}/{path.stem}": [] for path in FILES if not LARGER.search(path.stem)}
# Each attention on one backbone, in turn; test_contract.py has them all on all.
for attention, backbone in zip(zoo.list_attentions(), cycle(["deit", "pvt", "swin"]), strict=False):
    CASES[f"cifar10/{backbone}_nano with {attention}"] = [f"model.attention={attention}"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_config_builds_and_steps(case):
    config, _ = load_config(case.split()[0], CASES[case])
    model = ppattn.create_model(config.model.name, **shrunk(config))
    optimizer = build_optimizer(config, model)
    mean, std = config.data.mean or [0.5] * 3, config.data.std or [0.25] * 3
    transform = model.train_transform(config.augment, model.preprocess(config, mean, std))
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (45, 37, 3)).astype(np.uint8) for _ in range(2)]
    images = np.stack([transform(picture, rng) for picture in pictures])
    targets = smooth_targets(np.array([1, 3]), model.num_classes, config.loss.label_smoothing)
    targets = mix(images, targets, config.augment, np.random.default_rng(0))
    middle = min(500, 50 * config.train.epochs)
    optimizer.set_lr(lr_at(middle, config, steps_per_epoch=100, total_batch=config.data.batch_size * 8))
    before = model.parameters()[-2].numpy()
    loss = ModelWithLoss(model)(paddle.to_tensor(images), paddle.to_tensor(targets))
    loss.backward()
    optimizer.step()
    assert np.isfinite(loss.item()) and 0 < loss.item() < 3 * np.log(model.num_classes)
    after = model.parameters()[-2].numpy()
    assert np.isfinite(after).all() and np.abs(after - before).max() > 0


def test_every_zoo_entry_has_a_recipe():
    names = {f"{p.parent.name}/{p.stem}" for p in FILES}
    published = [row for row in zoo.model_entries().values() if row.published and "file" not in row.weights]
    assert {f"imagenet/{row.name}" for row in published} <= names
    assert {f"cifar10/{name}_nano" for name in ("deit", "pvt", "swin")} <= names


def test_the_notebook_recipe_is_the_notebook():
    config, _ = load_config(ppattn.CONFIGS / "cifar10/notebook_inline_deit_tiny.yaml")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adam", 3e-4, 1e-5)
    found = (config.data.batch_size, config.train.epochs, config.train.seed, config.model.img_size)
    assert found == (256, 100, 42, 224) and config.loss.label_smoothing == 0.1 and config.schedule.warmup_epochs == 0
    rates = [lr_at(step, config, 195, 256) for step in (0, 9750, 19499)]
    expected = [3e-4 * 0.5 * (1 + np.cos(np.pi * step / 19500)) for step in (0, 9750, 19499)]
    assert np.allclose(rates, expected, rtol=1e-12)


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_deit_recipe_is_the_authors(size):
    """Their loop is range(start, epochs), so the cooldown in their settings never runs; the PVTs' recipes do run it."""
    config, _ = load_config(ppattn.CONFIGS / f"imagenet/deit_{size}.yaml")
    assert config.train.epochs + config.schedule.cooldown_epochs == 300
    assert config.data.crop_keep_aspect and config.data.crop_ratio == 0.875
    assert load_config(ppattn.CONFIGS / "imagenet/inline_pvt_tiny.yaml")[0].schedule.cooldown_epochs == 10


def test_the_configs_of_the_grid_differ_in_the_backbone_alone():
    configs = [load_config(f"cifar10/{name}_nano")[0] for name in ("deit", "pvt", "swin")]
    assert all(config.model.attention == "softmax" for config in configs)
    trees = [config.model_dump(exclude={"model", "output"}) for config in configs]
    assert trees[0] == trees[1] == trees[2]
