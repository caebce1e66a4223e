"""Starting from trained models: teachers (losses against scipy, resumed runs) and the fine-tuning recipes."""

import numpy as np
import paddle
import pytest
from scipy.special import log_softmax, rel_entr, softmax

import ppattn
from ppattn import weights, zoo
from ppattn.cli import main
from ppattn.config import make_config
from ppattn.data.cifar import CIFAR
from ppattn.data.classes import _imagenet
from ppattn.data.splits import Splits
from ppattn.engine import trainer
from ppattn.engine.build import build_model, compare_weights
from ppattn.engine.loss import ModelWithLoss
from ppattn.errors import UserError
from ppattn.settings import Config, Distill
from ppattn.trained import load_run
from tests.helpers.data_sets import fill, numbered
from tests.helpers.rounding import relative_error
from tests.helpers.runs import state, table, tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_of_training_is_the_sum_of_its_parts(backbone, recompute):
    student, teacher = (ppattn.create_model(backbone, attention=name, num_classes=4) for name in ("linear", "softmax"))
    student.recompute = recompute
    teacher.eval()
    images, targets = paddle.randn([2, 3, 32, 32]), np.eye(4, dtype="float32")[[1, 3]]
    kept: dict[str, list] = {"student": [], "teacher": []}
    for name, model in (("student", student), ("teacher", teacher)):
        for block in model.blocks_flat():
            block.register_forward_post_hook(lambda _, __, out, kept=kept[name]: kept.append(out[0].numpy()))
    settings = Distill(teacher="x", temperature=2.0, labels=0.25, logits=0.5, blocks=3.0, features=2.0)
    layer = ModelWithLoss(student, teacher, settings)
    loss = layer(images, paddle.to_tensor(targets))
    blocks = relative_error(kept["student"], kept["teacher"])
    with paddle.no_grad():
        ours, theirs = student(images).numpy(), teacher(images).numpy()  # in training mode: the same batch statistics
        last = [[part.numpy() for part in model.final_features(images)[:2]] for model in (student, teacher)]
    labels = -(targets * log_softmax(ours, axis=1)).sum(axis=1).mean()
    logits = 2.0**2 * rel_entr(softmax(theirs / 2.0, axis=1), softmax(ours / 2.0, axis=1)).sum(axis=1).mean()
    assert loss.item() == pytest.approx(0.25 * labels + 0.5 * logits + 3 * blocks + 2 * relative_error(*last), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in student.parameters() if not p.stop_gradient)
    assert {p.name for p in layer.parameters()} == {p.name for p in student.parameters()}
    assert layer.state_dict().keys() == {f"model.{key}" for key in student.state_dict()}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of a softmax model, three steps long."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    trainer.train(tiny(folder, train={"max_steps": 3}))
    return folder


def student(folder, teacher, **changes) -> Config:
    """Inline attention and dropout; 14 steps of 100 images."""
    changes = {
        "model": {"attention": "inline", "drop_path_rate": 0.2, "drop_rate": 0.1},
        "distill": {"teacher": str(teacher), "temperature": 2.0, "blocks": 0.5},
        "train": {"epochs": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3},
    } | changes
    return tiny(folder, **changes)


def test_a_stopped_run_goes_on_bit_for_bit(teacher, tmp_path):
    trainer.train(student(tmp_path / "one", teacher))
    moved = tmp_path / "moved"
    moved.symlink_to(teacher)
    for resume, last, place in ((None, 5, teacher), ("auto", 17, moved), ("auto", None, moved)):
        config = student(tmp_path / "two", place)
        config.train.max_steps = last
        trainer.train(config, resume=resume)
    np.testing.assert_equal(state(tmp_path / "one"), state(tmp_path / "two"))
    assert not any("teacher" in name for name in state(tmp_path / "one"))
    losses = [[row["train_loss"] for row in table(tmp_path / run / "metrics.csv")] for run in ("one", "two")]
    assert losses[0] == losses[1]


def test_another_teacher_is_refused_on_resuming(teacher, tmp_path):
    trainer.train(student(tmp_path / "run", teacher, train={"epochs": 1, "max_steps": 2}))
    trainer.train(tiny(tmp_path / "other", train={"max_steps": 1}))
    for other, words in ((str(tmp_path / "other"), "the SHA-256 of distill.teacher"), (None, "set distill.teacher")):
        config = student(tmp_path / "run", teacher, train={"epochs": 1})
        config.distill.teacher = other
        with pytest.raises(UserError, match=words):
            trainer.train(config, resume="auto")


def test_another_attention_takes_over_what_fits(teacher, tmp_path, caplog):
    before, config = load_run(teacher)[1].state_dict(), student(tmp_path, teacher)
    config.model.weights, config.model.allow = str(teacher), ["*.attn.*"]
    caplog.set_level("INFO", "ppattn")
    model = build_model(config, Splits(numbered(1), numbered(1), [*"0123456789"]), fresh=True)
    after = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    copied = [name for name in after if name in before]
    assert {"blocks.0.attn.qkv.weight", "blocks.1.attn.proj.bias", "head.weight"} <= {*copied} < {*after}
    assert all(np.array_equal(after[name], before[name].numpy()) for name in copied)
    (fresh,) = [line for line in caplog.messages if line.startswith("left at initial values")]
    assert fresh.count(".attn.residual.") == 3 and "; and 5 more" in fresh
    config.model.allow = []
    with pytest.raises(UserError, match=r"residual\.hidden_weight is missing.*model\.allow=.*ppattn linearize"):
        build_model(config, Splits(numbered(1), numbered(1), [*"0123456789"]), fresh=True)


def test_a_teacher_may_be_a_file_that_convert_wrote(tmp_path):
    """Without losses of blocks it may have another shape."""
    shape = {"img_size": 8, "patch_size": 2, "embed_dim": 6, "depth": 3, "num_heads": 3, "num_classes": 10}
    model = ppattn.create_model("deit_tiny", **shape)
    weights.save(tmp_path / "t.safetensors", model.state_dict(), {"config": {"model": {"name": "deit_tiny", **shape}}})
    config = student(tmp_path / "run", "", train={"max_steps": 1}, distill={"teacher": str(tmp_path / "t")})
    config.data.mean, config.data.std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    trainer.train(config)
    assert "the teacher is" in (tmp_path / "run" / "log.txt").read_text()


def test_an_exported_folder_teaches_by_its_logits(teacher, tmp_path):
    out = tmp_path / "exported"
    assert main(["export", "--run", str(teacher), "--output", str(out)]) == 0
    for name, source in (("one", teacher), ("two", out)):
        trainer.train(student(tmp_path / name, source, distill={"teacher": str(source)}, train={"max_steps": 4}))
    one, two = (load_run(tmp_path / name)[1].state_dict() for name in ("one", "two"))
    assert all(np.abs(one[name].numpy() - two[name].numpy()).max() < 1e-4 for name in one)
    for changes, words in (
        ({"distill": {"teacher": str(out), "blocks": 1.0}}, "which gives logits only"),
        ({"distill": {"teacher": str(out)}, "model": {"img_size": 16}}, r"for images of \[3, 8, 8\]: export"),
        ({"distill": {"teacher": str(out)}, "model": {"in_chans": 1}}, r"a classifier for \[1, 8, 8\]"),
        ({"distill": {"teacher": str(out)}, "augment": {"progressive_resize": {"img_size": 6, "epochs": 1}}}, "size:"),
    ):
        with pytest.raises(UserError, match=words):
            trainer.train(student(tmp_path / "run", out, **changes))


SMALL = ["train.epochs=1", "train.max_steps=2", "data.batch_size=4", "data.num_workers=0", "train.log_every=1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes of noise, 41 x 37 pixels."""
    root = tmp_path_factory.mktemp("mine")
    fill(root, ["train", "val"], ("bee", "wasp"), 6, (41, 37, 3))
    return root


def tune(recipe: str, images, output, *overrides: str) -> tuple[dict, str]:
    """Weights and log of a short run."""
    given = [*SMALL, f"data.root={images}", f"output={output}", *overrides]
    assert main("train", ["-c", f"finetune/{recipe}", "-o", *given]) == 0
    return weights.read(output / "checkpoints" / "latest")[0], (output / "log.txt").read_text()


def test_a_run_folder_is_fine_tuned_with_a_new_head_at_another_size(images, tmp_path):
    source = ppattn.create_model("deit_nano", attention="inline", num_classes=10)
    tensors = {name: tensor.numpy() for name, tensor in source.state_dict().items()}
    weights.save(tmp_path / "run/checkpoints/best.safetensors", tensors, {"preprocess": {"img_size": [32, 32]}})
    given = [f"model.weights={tmp_path / 'run'}", "optimizer.lr=1.0e-12", "optimizer.weight_decay=0"]
    after, log = tune("from_run", images, tmp_path / "out", "model.img_size=40", *given)
    (width,) = source.feat_channels
    assert after["head.weight"].shape == (width, 2) and "left at initial values: head.weight" in log
    assert f"resized: pos_embed [1, 64, {width}] -> [1, 100, {width}]" in log
    body = [name for name in tensors if not name.startswith(("head.", "pos_embed")) and "._" not in name]
    assert all(np.abs(after[name] - tensors[name]).max() < 1e-9 for name in body), "the weights it starts from"


def test_recipes_take_the_published_weights(images, tmp_path, monkeypatch):
    """Frozen parameters stay and lower layers learn more slowly; at another size the positions are resized."""
    monkeypatch.setenv("PPATTN_CACHE", str(tmp_path / "cache"))
    source = ppattn.create_model("deit_tiny", img_size=64)
    tensors = {name: tensor.numpy() for name, tensor in source.state_dict().items()}
    weights.save(tmp_path / "cache/deit_tiny.safetensors", tensors, {})  # stands for the published file
    given = ("model.img_size=64", "schedule.warmup_epochs=0", "data.batch_size=2")
    after, log = tune("frozen_stem", images, tmp_path / "frozen", *given)
    moved = {name: np.abs(after[name] - tensors[name]).max() for name in tensors if not name.startswith("head.")}
    prefixes = ("patch_embed.", "cls_token", "pos_embed", *(f"blocks.{i}." for i in range(6)))
    frozen = [name for name in moved if name.startswith(prefixes)]
    assert f"{len(frozen)} parameters are frozen" in log and all(moved[name] == 0 for name in frozen)
    low, high = moved["blocks.6.mlp.fc1.weight"], moved["blocks.11.mlp.fc1.weight"]
    assert 0 < low < high and abs(low / high - 0.75**5) < 0.05  # Adam's first steps are as long as the rate
    after, log = tune("own_images", images, tmp_path / "out", "model.img_size=48", "data.batch_size=2")
    assert after["head.weight"].shape == (192, 2) and "deit_tiny.safetensors" in log and "resized: pos_embed" in log


def test_weights_of_another_attention_are_refused_or_told(caplog, tmp_path):
    """Linear attention has the parameters of softmax; the file says what it was trained with."""

    def lines(model: dict, **pixels) -> list[str]:
        config = make_config({"model": {"name": "deit_nano", "weights": "linear_deit_nano_cifar10"} | model})
        classes = ppattn.load_run("linear_deit_nano_cifar10")[2]
        caplog.clear()
        caplog.set_level("INFO", "ppattn")
        build_model(config, Splits(numbered(1), numbered(1), classes, **pixels), fresh=True)
        return caplog.messages

    other = "was trained with attention linear, and deit_nano is built with attention softmax"
    with pytest.raises(UserError, match=f"{other};"):
        lines({})
    cifar = {"mean": CIFAR["cifar10"].mean, "std": CIFAR["cifar10"].std}
    assert not [line for line in lines({"attention": "linear"}, **cifar) if "trained" in line]
    (line,) = (line for line in lines({"attention": "softmax"}, **cifar) if "trained" in line)
    assert line == f"model.weights {other}"
    options = {"attention": "linear", "attention_options": {"kernel": "exp"}}
    assert any("built with attention_options {'kernel': 'exp'}" in line for line in lines(options, **cifar))
    assert any("trained on pixels of mean [0.4914" in line for line in lines({"attention": "linear"}))
    tensors, metadata = weights.read(zoo.weights_file("linear_deit_nano_cifar10"))
    metadata["config"]["data"] |= {"mean": [0.5, 0.5, 0.5]}
    weights.save(tmp_path / "w.safetensors", tensors, metadata | {"preprocess": {}})  # as `convert` writes it
    said = lines({"attention": "linear", "weights": str(tmp_path / "w")}, **cifar)
    assert any("trained on pixels of mean [0.5, 0.5, 0.5]" in line for line in said)


def test_the_classifier_of_other_classes_is_not_kept(caplog):
    """As many classes, by chance."""
    config = {"name": "linear_deit_nano_cifar10", "weights": "pretrained"}
    splits = Splits(numbered(1), numbered(1), [*"0123456789"])
    with pytest.raises(UserError, match=r"'airplane' where the data has '0'.*model.reset_head=true"):
        build_model(make_config({"model": config}), splits, fresh=True)
    caplog.set_level("INFO", "ppattn")
    model = build_model(make_config({"model": config | {"reset_head": True}}), splits, fresh=True)
    assert "left at initial values: head.weight; head.bias" in caplog.messages and model.num_classes == 10
    synsets, words = ([*names] for names in zip(*_imagenet(), strict=True))
    splits = Splits(numbered(1), numbered(1), synsets)
    assert not compare_weights(weights.Metadata(classes=words), make_config({"model": {"name": "deit_nano"}}), splits)
