"""The model that a run learns from: found, built for the run's images, and compared with the run before it starts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from ppattn.backbones.base import Backbone, recording
from ppattn.data import Preprocess, Splits
from ppattn.data.classes import same_classes
from ppattn.deploy.folder import ABOUT
from ppattn.deploy.predictor import Predictor, exported_runner
from ppattn.errors import UserError
from ppattn.files.atomic import checksum
from ppattn.settings import Config
from ppattn.trained import Provenance, open_run


class Teacher(NamedTuple):
    """The model that a run learns from."""

    model: Any  # a backbone in eval mode, or a function from images to logits
    digest: str  # SHA-256 of its weights
    provenance: Provenance | None


def build_teacher(config: Config, student: Backbone, splits: Splits) -> Teacher | None:
    """The teacher that `config.distill` names; None without one.

    Raises `UserError` for one whose classes, pixel statistics or blocks are not those of the run.
    """
    wanted = config.distill
    unlabelled = not config.data.labels
    if unlabelled and (wanted.teacher is None or wanted.labels or wanted.logits):
        raise UserError(
            "data.labels = false leaves a teacher's features to learn from: set distill.teacher and distill.features, "
            "and distill.labels and distill.logits to 0."
        )
    if wanted.teacher is None:
        return None
    if not (wanted.logits or wanted.blocks or wanted.attention or wanted.features):
        raise UserError("distill.logits, blocks, attention and features are all 0: the teacher would have no effect.")
    student.check_images()
    if (Path(wanted.teacher) / ABOUT).is_file():
        return exported_teacher(config, student, splits)
    trained, provenance = open_run(wanted.teacher, overrides=[f"model.img_size={list(student.img_size)}"])
    _, teacher, classes, preprocess = trained
    name = f"The teacher {wanted.teacher}"
    compare_data(name, config, splits, classes, preprocess)
    shapes = []
    for model in (student, teacher):
        model.eval()
        with paddle.no_grad(), recording([model]) as blocks:
            model(paddle.zeros([1, student.in_chans, *student.img_size]))
        shapes.append([block.shape[1:] for block in blocks])
    student.train()
    keys = " and ".join(f"distill.{key}" for key in ("blocks", "attention", "features") if getattr(wanted, key))
    if keys and shapes[0] != shapes[1]:
        raise UserError(
            f"{name} has {_describe(shapes[1])}, the model {_describe(shapes[0])}. Blocks are compared one by one: "
            f"set {keys} to 0, or take a teacher on the same backbone."
        )
    digest = hashlib.sha256()
    for key, tensor in teacher.state_dict().items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    return Teacher(teacher, digest.hexdigest(), provenance)


def compare_data(name: str, config: Config, splits: Splits, classes: list[str], preprocess: Preprocess) -> None:
    """Raise `UserError` for a teacher of other classes, if its logits are wanted, or other pixel statistics."""
    if config.distill.logits and not same_classes(classes, splits.classes):
        raise UserError(
            f"{name} knows {len(classes)} classes ({', '.join(classes[:3])}, ...), the data has {len(splits.classes)} "
            f"({', '.join(splits.classes[:3])}, ...): its logits do not apply to them. Set distill.logits to 0 to "
            "learn from its blocks alone."
        )
    if [*preprocess.mean, *preprocess.std] != [*map(float, splits.mean), *map(float, splits.std)]:
        mean, std = list(preprocess.mean), list(preprocess.std)
        raise UserError(f"{name} was trained with other pixel statistics: set data.mean={mean} and data.std={std}.")


def exported_teacher(config: Config, student: Backbone, splits: Splits) -> Teacher:
    """A teacher out of an exported folder, of any kind: it gives logits only."""
    wanted = config.distill
    name = f"The teacher {wanted.teacher}"
    if wanted.blocks or wanted.attention or wanted.features:
        raise UserError(f"{name} is an exported program, which gives logits only: set the other factors to 0.")
    predictor = Predictor(str(wanted.teacher))
    compare_data(name, config, splits, predictor.classes, predictor.preprocess)
    if predictor.output == "features" or tuple(predictor.preprocess.img_size) != student.img_size:
        raise UserError(
            f"{name} gives {predictor.output} for images of {list(predictor.preprocess.img_size)}: export a classifier "
            f"for {list(student.img_size)}."
        )
    run = exported_runner(predictor)
    digest = checksum(Path(str(wanted.teacher)) / ABOUT)
    return Teacher(lambda images: paddle.to_tensor(run(images.numpy())), digest, None)


def _describe(shapes: list[list[int]]) -> str:
    return f"{len(shapes)} blocks, the last of {shapes[-1][0]} tokens and {shapes[-1][1]} channels"
