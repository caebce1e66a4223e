"""Learning from a teacher: losses against numpy, what is copied, resumed runs, two processes, refusals."""

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights
from ppattn.cli import main
from ppattn.config import to_yaml
from ppattn.data.splits import Splits
from ppattn.engine import trainer
from ppattn.engine.build import build_model
from ppattn.engine.loss import ModelWithLoss
from ppattn.errors import UserError
from ppattn.settings import Config, Distill
from ppattn.trained import load_run
from tests.engine.test_distributed import finish, train
from tests.helpers.data_sets import numbered
from tests.helpers.runs import state, table, tiny

pytestmark = pytest.mark.slow


def random(*shape, seed=0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype("float32")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype("float64")
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def divergence(student: np.ndarray, teacher: np.ndarray, temperature: float) -> float:
    ours, theirs = log_softmax(student / temperature), log_softmax(teacher / temperature)
    return temperature**2 * (np.exp(theirs) * (theirs - ours)).sum(axis=1).mean()


def relative_error(student: list[np.ndarray], teacher: list[np.ndarray]) -> float:
    terms = [
        ((s - t).astype("float64") ** 2).sum() / (t.astype("float64") ** 2).sum()
        for ours, theirs in zip(student, teacher, strict=True)
        for s, t in zip(ours, theirs, strict=True)
    ]
    return float(np.mean(terms))


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_of_training_is_the_sum_of_its_parts(backbone, recompute):
    student, teacher = (ppattn.create_model(backbone, attention=name, num_classes=4) for name in ("linear", "softmax"))
    student.recompute = recompute
    teacher.eval()
    images, targets = paddle.to_tensor(random(2, 3, 32, 32)), np.eye(4, dtype="float32")[[1, 3]]
    kept: dict[str, list] = {"student": [], "teacher": []}
    for name, model in (("student", student), ("teacher", teacher)):
        blocks = [layer for key, layer in model.named_sublayers() if key in model.block_names()]
        assert len(blocks) == len(model.block_names())
        for block in blocks:
            block.register_forward_post_hook(lambda _, __, out, kept=kept[name]: kept.append(out[0].numpy()))
    settings = Distill(teacher="x", temperature=2.0, labels=0.25, logits=0.5, blocks=3.0, features=2.0)
    layer = ModelWithLoss(student, teacher, settings)
    loss = layer(images, paddle.to_tensor(targets))
    blocks = relative_error(kept["student"], kept["teacher"])
    with paddle.no_grad():
        ours, theirs = student(images).numpy(), teacher(images).numpy()  # in training mode: the same batch statistics
        last = [[part.numpy() for part in model.final_features(images)[:2]] for model in (student, teacher)]
    labels = -(targets * log_softmax(ours)).sum(axis=1).mean()
    assert loss.item() == pytest.approx(
        0.25 * labels + 0.5 * divergence(ours, theirs, 2.0) + 3 * blocks + 2 * relative_error(*last), rel=1e-4
    )
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
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert not any("teacher" in name for name in one)
    losses = [[row["train_loss"] for row in table(tmp_path / run / "metrics.csv")] for run in ("one", "two")]
    assert losses[0] == losses[1]


def test_another_teacher_is_refused_on_resuming(teacher, tmp_path):
    trainer.train(student(tmp_path / "run", teacher, train={"epochs": 1, "max_steps": 2}))
    trainer.train(tiny(tmp_path / "other", train={"max_steps": 1}))
    for other in (str(tmp_path / "other"), None):
        config = student(tmp_path / "run", teacher, train={"epochs": 1})
        config.distill.teacher = other
        with pytest.raises(UserError, match="the SHA-256 of distill.teacher was"):
            trainer.train(config, resume="auto")


def test_two_processes_are_one_with_the_double_batch(teacher, tmp_path):
    changes = {"model": {"attention": "inline"}, "optimizer": {"lr": 0.05}}
    two = student(tmp_path / "two", teacher, **changes, data={"batch_size": 30}, train={"max_steps": 25})
    assert finish(train(tmp_path, two), tmp_path) == 0
    trainer.train(student(tmp_path / "one", teacher, **changes, data={"batch_size": 60}, train={"max_steps": 25}))
    one, both = state(tmp_path / "one"), state(tmp_path / "two")
    for name in (name for name in one if "/" not in name):
        assert np.abs(both[name] - one[name]).max() <= 1e-5 * np.abs(one[name]).max(), name


def test_another_mechanism_takes_over_what_fits(teacher, tmp_path, caplog):
    before = load_run(teacher)[1].state_dict()
    config = student(tmp_path, teacher)
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
    shape = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 10}
    model = ppattn.create_model("deit_tiny", **shape)
    weights.save(tmp_path / "t.safetensors", model.state_dict(), {"config": {"model": {"name": "deit_tiny", **shape}}})
    config = student(tmp_path / "run", tmp_path / "t", train={"max_steps": 1})
    config.data.mean, config.data.std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    trainer.train(config)
    assert "the teacher is" in (tmp_path / "run" / "log.txt").read_text()


def test_an_exported_folder_teaches_by_its_logits(teacher, tmp_path):
    exported = tmp_path / "exported"
    assert main(["export", "--run", str(teacher), "--output", str(exported)]) == 0
    for name, source in (("one", teacher), ("two", exported)):
        trainer.train(student(tmp_path / name, source, distill={"teacher": str(source)}, train={"max_steps": 4}))
    one, two = (load_run(tmp_path / name)[1].state_dict() for name in ("one", "two"))
    assert all(np.abs(one[name].numpy() - two[name].numpy()).max() < 1e-4 for name in one)
    for changes, words in (
        ({"distill": {"teacher": str(exported), "blocks": 1.0}}, "which gives logits only"),
        ({"distill": {"teacher": str(exported)}, "model": {"img_size": 16}}, r"for images of \[8, 8\]: export a class"),
    ):
        with pytest.raises(UserError, match=words):
            trainer.train(student(tmp_path / "run", exported, **changes))


def test_without_labels_there_are_features_to_learn(teacher, tmp_path):
    with pytest.raises(UserError, match="leaves a teacher's features to learn from"):
        trainer.train(student(tmp_path / "run", teacher, data={"labels": False}))


def test_teachers_that_do_not_fit_get_a_sentence(teacher, tmp_path, folder):
    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            trainer.train(student(tmp_path / "run", teacher, **changes))
        assert not (tmp_path / "run").exists()

    distill = {"teacher": str(teacher), "blocks": 1.0}
    refused("are all 0: the teacher would have no effect", distill=distill | {"logits": 0.0, "blocks": 0.0})
    refused("No weights at", distill={"teacher": str(tmp_path / "none")})
    refused("was trained with other pixel statistics: set data.mean=", data={"mean": [0.5] * 3})
    refused(
        "has 2 blocks, the last of 17 tokens and 12 channels, the model 3 blocks, .* set distill.blocks to 0",
        model={"attention": "inline", "depth": 3},
    )
    photos = {"name": "folder", "root": str(folder), "batch_size": 4}
    refused(r"other classes, 10 \(0, 1, 2, ...\), than the data, 3 \(ant, bee, cat, ...\)", data=photos)


def test_the_command_line_trains_with_a_teacher_of_another_host(teacher, tmp_path, capsys):
    path = tmp_path / "student.yaml"
    path.write_text(to_yaml(tiny(tmp_path / "run", train={"max_steps": 1})))
    changes = ["model.depth=3", "model.embed_dim=6", f"distill.teacher={teacher}", "distill.logits=2"]
    assert main(["train", "-c", str(path), "-o", *changes]) == 0
    assert main(["train", "-c", str(path), "-o", *changes, "distill.temprature=2"]) == 2
    assert "Did you mean 'distill.temperature'?" in capsys.readouterr().err
