"""From a softmax model to a linear one: the parts in numbers, and the command from teacher to result."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import benchmark, linearize, weights
from ppattn.attention import LayerState
from ppattn.backbones.base import recording_blocks
from ppattn.cli import main
from ppattn.config import make_config, merged_config
from ppattn.data import build_datasets
from ppattn.engine.evaluate import compare_features
from ppattn.engine.loss import ModelWithLoss
from ppattn.engine.trainer import train
from ppattn.errors import UserError
from ppattn.linearize import TRAINING, Move, Request, alignment, base_config, choose, model_section, search, swapped
from ppattn.settings import Distill
from ppattn.trained import load_run
from tests.helpers.abridged import whole
from tests.helpers.data_sets import fill, write_image
from tests.helpers.rounding import relative_error
from tests.helpers.runs import read_json, state, tiny


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(tiny(folder, data={"holdout": 143}, train={"epochs": 3}, optimizer={"name": "adamw", "lr": 0.005}))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A model without classifier, as `convert --num-classes 0` leaves it."""
    shape = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3}
    path = tmp_path_factory.mktemp("encoder") / "encoder.safetensors"
    model = ppattn.create_model("deit_tiny", num_classes=0, **shape)
    weights.save(path, model.state_dict(), {"config": {"model": {"name": "deit_tiny", "num_classes": None, **shape}}})
    return path


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A small random DeiT of timm with seven classes, as `convert` writes it."""
    source = Path(__file__).with_name("foreign")
    about = read_json(source / "timm_deit.json")
    model = ppattn.create_model(about["model"], **about["arguments"])
    weights.convert(model, source / "timm_deit.pth")
    section = {"name": about["model"], **about["arguments"], "num_classes": None}
    path = tmp_path_factory.mktemp("foreign") / "timm.safetensors"
    weights.save(path, model.state_dict(), {"config": {"model": section}})
    return path


def line(teacher, output, *more) -> list[str]:
    given = ["linearize", "--model", teacher, "--to", "linear", "--output", output, "--epochs", "1", *more]
    return [str(argument) for argument in given]


def call(teacher, output, *more) -> dict:
    """The report of a call that succeeds."""
    assert main(line(teacher, output, *more)) == 0
    return read_json(output / "linearize/report.json")


def assert_continues(teacher, whole, *more):
    """A call that is stopped before its training and called again ends with the weights of one that was not."""
    stopped = whole.with_name("stopped")
    with patch.object(linearize, "choose", side_effect=KeyboardInterrupt):
        assert main(line(teacher, stopped, *more)) == 1
    call(teacher, stopped, *more)
    np.testing.assert_equal(state(stopped), state(whole))


def pair(name: str, other: str, **arguments) -> list:
    """A model with softmax and one with another attention, for evaluation."""
    models = [ppattn.create_model(name, attention=attention, **arguments) for attention in ("softmax", other)]
    for model in models:
        model.eval()
    return models


V2 = {"img_size": 32, "embed_dims": [8, 16], "depths": [1, 2], "num_heads": [1, 2], "mlp_ratios": [2, 2],
      "sr_ratios": [2, 1], "init": "xavier"}  # fmt: skip


@pytest.mark.parametrize("name, to, arguments", [("deit_nano", "inline", {}), ("deit_nano", "less", {}),
                         ("swin_nano", "inline", {}), ("pvt_v2_b0", "inline", V2)])  # fmt: skip
def test_the_attention_loss_on_the_inputs_of_the_teacher(name, to, arguments):
    """Against the definition, block by block in numpy."""
    softmax, student = pair(name, to, num_classes=4, **arguments)
    images = paddle.randn([3, 3, 32, 32])
    settings = Distill(teacher="x", labels=0, logits=0, attention=2.0, inputs="teacher")
    loss = ModelWithLoss(student, softmax, settings)(images, paddle.zeros([3, 4]))
    with paddle.no_grad(), recording_blocks(softmax.blocks_flat()) as calls:
        softmax(images)
    assert len(calls) == len(softmax.block_names())
    found, kept = [], LayerState()
    for block, (x, hw, _) in zip(student.blocks_flat(), calls, strict=True):
        y, kept = block.attend(x, hw, kept)
        found.append(y.numpy())
    assert float(loss) == pytest.approx(2 * relative_error(found, [y.numpy() for *_, y in calls]), rel=1e-4)
    loss.backward()
    assert student.blocks_flat()[-1].attn.proj.weight.grad is not None
    assert student.head.weight.grad is None and softmax.head.weight.grad is None


@pytest.mark.parametrize("inputs", ["student", "teacher"])
def test_the_attention_loss_has_the_same_gradients_with_recomputed_blocks(inputs):
    settings = Distill(teacher="x", labels=0, logits=0, attention=1.0, inputs=inputs)
    softmax, linear = pair("deit_nano", "linear", num_classes=4)
    linear.train()
    images, found = paddle.randn([2, 3, 32, 32]), []
    for linear.recompute in (False, True):
        ModelWithLoss(linear, softmax, settings)(images, paddle.zeros([2, 4])).backward()
        found.append({name: p.grad.numpy() for name, p in linear.named_parameters() if p.grad is not None})
        linear.clear_gradients()
    plain, recomputed = found
    assert plain.keys() == recomputed.keys() and any(np.abs(gradient).max() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        assert np.abs(recomputed[name] - gradient).max() <= 1e-5 * np.abs(gradient).max() + 1e-9, name


def test_a_swapped_model_takes_the_named_blocks_from_the_student():
    teacher, student = pair("pvt_nano", "linear", num_classes=3)
    names, images = teacher.block_names(), paddle.randn([2, 3, 32, 32])
    before = teacher(images).numpy()
    attention = [["linear" if f"stages.{i}.blocks.{j}" in (names[0], names[-1]) else "softmax"
                  for j in range(len(stage.blocks))] for i, stage in enumerate(teacher.stages)]  # fmt: skip
    mixed = ppattn.create_model("pvt_nano", attention=attention, num_classes=3)
    mixed.eval()
    last, blocks = len(names) - 1, student.blocks_flat()
    with swapped(teacher, {0: blocks[0], last: blocks[last]}) as hybrid:
        mixed.set_state_dict(hybrid.state_dict())
        assert np.array_equal(hybrid(images).numpy(), mixed(images).numpy())
        assert not np.array_equal(hybrid(images).numpy(), before)
    assert np.array_equal(teacher(images).numpy(), before)


def step(blocks, **figures):
    return {"blocks": dict.fromkeys(blocks, "linear"), "milliseconds": 10.0 - len(blocks), **figures}


def test_search_and_choice():
    alone, costs, measured = [0.9, 0.5, 0.8, 0.7], {0: 0.0, 1: 0.5, 2: 0.05, 3: 0.2}, []

    def score(blocks):
        measured.append(sorted(blocks))
        return 0.9 - sum(costs[i] for i in blocks)

    moves = [Move(i, "linear", value, -1.0) for i, value in enumerate(alone)]  # slower ones count like others
    path = list(search(moves, 0.9, False, score))
    assert [sorted(step["blocks"]) for step in path] == [[0], [0, 2], [0, 2, 3], [0, 1, 2, 3]]
    assert [0, 1] in measured  # a beam of three looks at the worst block, too, and leaves it
    path = [step(one["blocks"], loss=100 * (0.9 - one["score"])) for one in path]
    one = Request("m", ["linear"])
    assert sorted(choose(one, path, 10.0)) == [0, 1, 2, 3]
    assert sorted(choose(replace(one, blocks=2), path, 10.0)) == [0, 2]
    assert sorted(choose(replace(one, budget=6.0), path, 10.0)) == [0, 2]
    assert sorted(choose(replace(one, speed=1.25), path, 10.0)) == [0, 2]
    even = [step([0], loss=1e-9), step([0, 1, 2], loss=2e-9)]  # equal but for rounding: the faster one
    assert sorted(choose(replace(one, speed=1.1), even, 10.0)) == [0, 1, 2]
    times = {"model": 10.0, "teacher": [4.0, 3.0], "a": [2.0, 4.0], "b": [3.0, 5.0]}
    linearize.check_speed(1.25, times, ("a", "b"))
    with pytest.raises(UserError, match=r"--speed 2 is not reached: 1.25 is the most"):
        linearize.check_speed(2.0, times, ("a", "b"))
    path = [step([2], loss=2.0), step([2, 0], loss=7.0)]
    with pytest.raises(UserError, match=r"budget of 1.5 is not met by any block: block 3 costs least, 2"):
        choose(replace(one, budget=1.5), path, 10.0)
    assert choose(replace(one, budget=2.5), path, 10.0) == {2: "linear"}


def test_a_hybrid_takes_least_loss_for_the_time_saved_and_then_gets_faster():
    loss, saved = {(0, "a"): 0.1, (1, "a"): 0.4, (0, "b"): 0.1, (1, "b"): 0.2}, {"a": 3.0, "b": 1.0}
    moves = [Move(i, name, 1.0 - lost, saved[name]) for (i, name), lost in loss.items()]
    path = list(search(moves, 1.0, True, lambda blocks: 1.0 - sum(loss[one] for one in blocks.items())))
    assert [step["blocks"] for step in path] == [{0: "a"}, {0: "a", 1: "a"}]
    loss[1, "a"] = 0.9  # 0.3 for a millisecond
    moves = [Move(i, name, 1.0 - lost, saved[name]) for (i, name), lost in loss.items()]
    path = list(search(moves, 1.0, True, lambda blocks: 1.0 - sum(loss[one] for one in blocks.items())))
    assert [step["blocks"] for step in path] == [{0: "a"}, {0: "a", 1: "b"}, {0: "a", 1: "a"}]
    assert [step["saved"] for step in path] == [3.0, 4.0, 6.0]


def test_another_seed_holds_out_the_same_images(teacher, tmp_path):
    def held_out(*overrides):
        return build_datasets(base_config(str(teacher), None, None, str(tmp_path), [*overrides])).val.indices

    images = held_out()
    assert len(images) == 143 and np.array_equal(images, held_out("train.seed=6"))
    assert not np.array_equal(images, held_out("data.holdout_seed=6"))
    fill(tmp_path, ["train", "val"], ("bee", "wasp"), 6, (9, 9, 3))
    assert base_config("softmax_deit_nano_cifar10", None, str(tmp_path), "run", []).data.name == "folder"


@pytest.mark.slow
def test_an_encoder_on_a_plain_folder_becomes_a_hybrid_and_continues(encoder, tmp_path, monkeypatch, capsys, refused):
    def fixed(teacher, students, size):
        assert size == (16, 16)
        return {"model": 9.0, "teacher": [4.0, 4.0], "inline": [2.0, 2.0], "window": [3.0, 3.0]}

    for i in range(24):
        write_image(tmp_path / f"flat/{i}.png", i)
    run, photos = tmp_path / "whole", ["--data", tmp_path / "flat", "-o", "data.num_workers=0", "train.threads=1"]
    given = ["--to", "inline,window", "--options", '{"window_size": 2}', "--size", "16", "--images", "4"]
    assert "a window of 7 covers the 4 x 4 tokens" in refused(*line(encoder, run, "--to", "window", *photos))
    assert "set img_size" in refused(*line(encoder, run, "--to", "linformer", *given[-4:], *photos))
    monkeypatch.setattr(linearize, "milliseconds", fixed)
    assert "--speed 2 is not reached: 1.80 is the most" in refused(*line(encoder, run, *given, "--speed", "2", *photos))
    report = call(encoder, run, *given, "--speed", "1.2", *photos)
    assert "cosine of the features to the teacher's" in capsys.readouterr().out
    front = report["front"]
    assert front[0] == {"blocks": {}, "loss": 0.0, "milliseconds": 9.0} and front[-1]["milliseconds"] == 5.0
    (chosen,) = (step for step in front if step["blocks"] == report["chosen"])
    assert 9.0 / chosen["milliseconds"] >= 1.2
    _, model, classes, _ = load_run(run)
    assert classes == [] and model.num_classes == 0
    assert report["metric"] == "features" and report["measured"]["teacher"] == pytest.approx(1.0)
    assert_continues(encoder, run, *given, "--speed", "1.2", *photos)
    assert "A model without classifier has no accuracy" in refused("eval", "--run", run)


@pytest.mark.slow
def test_labels_of_an_encoder_serve_its_neighbours(encoder, tmp_path, capsys):
    digits = ["data.name=digits", "data.num_workers=0", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"]
    given = ["--blocks", "1", "--images", "20", "-o", "train.max_steps=3", *digits]
    measured = call(encoder, tmp_path / "run", *given)["measured"]
    before, after = (measured[f"20 nearest neighbours, {key}"] for key in ("teacher", "result"))
    assert before > 0.25 and after > 0.25 and "20 nearest neighbours" in capsys.readouterr().out


@pytest.mark.parametrize("classes", [(0, 0), (0, 5), (5, 0)])
def test_the_features_are_compared_image_by_image(classes):
    """Classifiers of DINO take the class token and the mean; beside an encoder the class token is compared."""
    shape = {"img_size": 28, "embed_dim": 12, "depth": 1, "num_heads": 3}
    teacher, student = (pair("dinov2_small", "linear", num_classes=n, **shape)[i] for i, n in enumerate(classes))
    batches = [(np.random.default_rng(i).standard_normal((2, 3, 28, 28), "float32"), [0, 0], [0, 1]) for i in range(2)]
    found = compare_features(teacher, student, batches, range(5)).metrics
    images = paddle.to_tensor(np.concatenate([images for images, *_ in batches]))
    ours, theirs = ([x.numpy()[:, :12].astype("f8") for x in m.final_features(images)[:2]] for m in (student, teacher))
    settings = Distill(teacher="x", labels=0, logits=0, features=1.0)
    loss = float(ModelWithLoss(student, teacher, settings)(images, paddle.zeros([4, 0])))
    assert found["loss"] == pytest.approx(error := relative_error(ours, theirs))
    assert loss == pytest.approx(error, rel=1e-5)
    cosines = [(s * t).sum(1) / np.sqrt((s**2).sum(1) * (t**2).sum(1)) for s, t in zip(ours, theirs, strict=True)]
    assert found["cosine"] == pytest.approx(np.mean([x.mean() for x in cosines])) and found["unreadable"] == 1
    assert compare_features(teacher, teacher, batches, range(4)).metrics["cosine"] == pytest.approx(1.0)


def test_data_without_images_to_hold_out_gets_a_sentence(foreign, tmp_path, refused):
    fill(tmp_path / "photos", ["train"], "abcdefg", 1)
    said = refused(*line(foreign, tmp_path / "run", "--data", tmp_path / "photos"))
    assert "must leave one of each class on both sides" in said and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_result_of_a_training_that_loses_accuracy_is_its_start(teacher, tmp_path, monkeypatch, capsys):
    models = []

    def top1(measure, model, every_image=False):
        models.append(model)  # the first is the teacher, which has the aligned blocks in turn
        return 0.9 if model is models[0] else 0.8

    monkeypatch.setattr(linearize.Measure, "score", top1)
    assert call(teacher, tmp_path / "run", "--blocks", "1")["measured"]["final"] == 0.9
    assert "the training lost, top-1 90.00 % to top-1 80.00 %" in capsys.readouterr().out
    best, about = weights.read(tmp_path / "run/checkpoints/best")
    start, latest = weights.read(tmp_path / "run/linearize/start")[0], state(tmp_path / "run")
    assert all(np.array_equal(best[name], start[name]) for name in start) and about["metrics"] == {"top1": 0.9}
    assert not all(np.array_equal(latest[name], start[name]) for name in start)


@pytest.mark.slow
def test_a_budget_that_the_result_does_not_meet_is_an_error_with_the_result(teacher, tmp_path, monkeypatch, refused):
    """All blocks are chosen although they cost more, and the training does not repair it."""

    def top1(measure, model, every_image=False):
        return 0.90 - 0.01 * sum(type(block.attn).__name__ == "LinearAttention" for block in model.blocks_flat())

    monkeypatch.setattr(linearize.Measure, "score", top1)
    monkeypatch.setattr(linearize, "choose", lambda request, path, time: path[-1]["blocks"])
    message = refused(*line(teacher, tmp_path / "run", "--budget", "0.5"))
    assert "The budget of 0.5 is not met: with 2 blocks replaced" in message
    assert str(tmp_path / "run") in message and (tmp_path / "run" / "linearize" / "report.json").exists()


@pytest.mark.slow
def test_a_model_of_another_library_on_own_images(foreign, tmp_path, capsys):
    fill(tmp_path / "photos", ["train", "val"], "abcdefg", 6)
    small = ["data.batch_size=16", "data.num_workers=0", "train.threads=1", "train.accumulate=3"]
    report = call(foreign, tmp_path / "run", "--data", tmp_path / "photos", "--to", "inline", "-o", *small)
    assert "2 of 2 blocks have inline attention" in capsys.readouterr().out
    assert report["teacher_saw_held_out_images"] and main(["eval", "--run", str(tmp_path / "run")]) == 0
    assert f"{100 * report['measured']['final']:.2f} %" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stopped_call_continues_to_the_same_result(teacher, tmp_path, capsys):
    with patch.object(benchmark, "PIXELS", (2,)), whole():
        report = call(teacher, tmp_path / "whole", "--blocks", "1")
    printed = capsys.readouterr().out
    assert (tmp_path / "whole/linearize/report.png").stat().st_size > 10_000
    assert_continues(teacher, tmp_path / "whole", "--blocks", "1")
    assert len(report["chosen"]) == 1 and not report["teacher_saw_held_out_images"]
    assert [row["img_size"] for row in report["cost"]] == ["12x12"] * 2
    kinds = [type(block.attn).__name__ for block in load_run(tmp_path / "whole")[1].blocks_flat()]
    assert kinds.count("LinearAttention") == 1
    capsys.readouterr()
    assert main(["eval", "--run", str(tmp_path / "whole")]) == 0
    top1 = f"{100 * report['measured']['final']:.2f} %"
    assert top1 in capsys.readouterr().out and f"{top1} after" in printed


@pytest.mark.parametrize(
    "arguments, words",
    [(["--to", "less"], "less cannot be swapped"), (["--to", "softmax"], "has softmax attention already"),
     (["--to", "lineer"], "Did you mean 'linear'"), (["--blocks", "9"], "has 2 blocks"),
     (["--blocks", "some"], "--blocks some"), (["--budget", "1", "--blocks", "1"], "not allowed with"),
     (["--speed", "2", "--blocks", "1"], "not allowed with"), (["--speed", "-1"], "--speed -1.0 is not allowed"),
     (["--to", "linear,linear"], "every attention once"), (["--options", "alpha=4"], "write a JSON object"),
     (["--epochs", "0"], "--epochs 0 is not allowed"), (["--align-epochs", "-1"], "--align-epochs -1 is not allowed"),
     (["--options", '{"alpa": 4}'], "alpa"), (["--options", "5"], "JSON"), (["--budget", "nan"], "--budget nan"),
     (["--images", "0"], "--images 0"), (["--new-lr", "nan"], "--new-lr nan"),
     (["-o", "model.cpe=false"], "-o model.cpe=false has no effect"), (["-o", "train.epochs=9"], "see --to"),
     (["-o", "distill.inputs=teacher"], "no effect")],
)  # fmt: skip
def test_what_cannot_be_swapped_is_an_error(teacher, arguments, words, tmp_path, refused):
    assert words in refused(*line(teacher, tmp_path / "run", *arguments)) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_run_is_not_taken_for_the_result(teacher, refused):
    before = (teacher / "summary.json").read_bytes()
    assert "holds another run: name another --output" in refused(*line(teacher, teacher))
    assert (teacher / "summary.json").read_bytes() == before and not (teacher / "linearize").exists()


def test_learning_rates_of_the_teacher_are_not_taken_over(tmp_path):
    """A schedule by the epoch, a cool-down, decay by the layer and small images are made for another training."""
    given = {
        "optimizer": {"layer_decay": 0.75, "lr_batch": 512, "lr_scale": {"*.attn.qkv.*": 5.0}},
        "schedule": {"per": "epoch", "warmup_lr": 1e-6, "cooldown_epochs": 10, "warmup_epochs": 5},
        "augment": {"progressive_resize": {"img_size": 4, "epochs": 2}},
    }
    settings = tiny(tmp_path / "run", **given)
    teacher = ppattn.create_model(settings.model.name, **settings.model.arguments(), num_classes=10)
    changes = [alignment(Request("teacher", ["linear"]), "linear", settings, teacher)[1], TRAINING]
    for config in (make_config(merged_config(settings.model_dump(), change)) for change in changes):
        optimizer, schedule = config.optimizer, config.schedule
        assert (optimizer.layer_decay, optimizer.lr_batch, optimizer.lr_scale) == (None, None, {})
        assert (schedule.per, schedule.warmup_lr, schedule.cooldown_epochs) == ("step", 0.0, 0)
        assert config.augment.progressive_resize is None and schedule.warmup_epochs <= 0.1


def test_kept_blocks_have_the_options_of_the_published_model():
    settings = make_config({"model": {"name": "mhla_deit_tiny", "depth": 2}})
    teacher = ppattn.create_model("mhla_deit_tiny", depth=2)
    section = model_section(Request("teacher", ["softmax"]), settings, teacher, {1: "softmax"})
    student = ppattn.create_model("mhla_deit_tiny", **settings.model.model_copy(update=section).arguments())
    first, second = (dict(model.blocks_flat()[0].named_parameters()) for model in (teacher, student))
    assert {name: p.shape for name, p in first.items()} == {name: p.shape for name, p in second.items()}
    assert type(student.blocks_flat()[1].attn).__name__ == "SoftmaxAttention"


@pytest.mark.parametrize("given,said", [({}, "'relu'"), ({"kernel": "exp"}, "kernel = "), ({"kernel": "relu"}, "")])
def test_new_and_kept_attentions_with_an_option_of_one_name(given, said):
    relu = {"attention_options": {"kernel": "relu"}}
    settings = make_config({"model": {"name": "deit_nano", "attention": "inline"} | relu})
    teacher = ppattn.create_model("deit_nano", attention="inline", **relu)
    request, every = Request("teacher", ["linear"], options=given), dict.fromkeys(range(6), "linear")
    assert model_section(request, settings, teacher, every)["attention_options"] == given  # not the teacher's
    with pytest.raises(UserError, match=f"The blocks with .*{said}.*from the others") if said else nullcontext():
        assert model_section(request, settings, teacher, {2: "linear"})["attention_options"] == given


def test_the_time_of_a_block_is_that_of_its_own_attention():
    teacher = ppattn.create_model("deit_nano", attention=["softmax", "inline"] * 3, num_classes=2)
    found = linearize.milliseconds(teacher, {"linear": ppattn.create_model("deit_nano", attention="linear")}, (32, 32))
    for name in ("teacher", "linear"):
        assert len({*found[name][::2]}) == len({*found[name][1::2]}) == 1 and len({*found[name]}) == 2


def changed(teacher, folder, factor=1.0, **data):
    """The teacher's run folder with other weights, or made from other training images."""
    shutil.copytree(teacher, folder, dirs_exist_ok=True)
    tensors, metadata = weights.read(path := folder / "checkpoints/best.safetensors")
    metadata["data"]["train"] |= data
    weights.save(path, {name: array * factor for name, array in tensors.items()}, metadata)


def test_another_teacher_or_other_images_are_not_the_same_request(teacher, tmp_path, monkeypatch, refused):
    copy, output = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(teacher, copy)
    monkeypatch.setattr(linearize, "train", Mock(side_effect=UserError("stopped in the first training")))
    for _ in range(2):
        assert "stopped in the first training" in refused(*line(copy, output))
    changed(teacher, copy, 1.01)
    assert "was begun with SHA-256 of.teacher = " in refused(*line(copy, output))
    shutil.copytree(teacher, copy, dirs_exist_ok=True)
    images = linearize.build_datasets(make_config({"data": {"name": "digits", "holdout": 144}}))
    monkeypatch.setattr(linearize, "build_datasets", lambda config: images)
    assert "was begun with SHA-256 of.images" in refused(*line(copy, output))


@pytest.mark.slow
def test_a_teacher_trained_on_other_images_may_have_seen_the_held_out_ones(teacher, tmp_path):
    changed(teacher, tmp_path / "teacher", images=1200, sha256="0" * 64)  # as where images were added since
    assert call(tmp_path / "teacher", tmp_path / "run", "--blocks", "1")["teacher_saw_held_out_images"]
