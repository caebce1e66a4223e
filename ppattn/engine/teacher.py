"""The model that a run learns from: found, built for the run's images, and compared with the run before it starts."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import paddle

from ppattn.backbones.base import Backbone, recording
from ppattn.data import Splits
from ppattn.data.classes import same_classes
from ppattn.errors import UserError
from ppattn.settings import Config
from ppattn.trained import Provenance, open_run


class Teacher(NamedTuple):
    """The model that a run learns from."""

    model: Backbone  # in eval mode
    digest: str  # SHA-256 of its weights
    provenance: Provenance | None


def build_teacher(config: Config, student: Backbone, splits: Splits) -> Teacher | None:
    """The teacher that `config.distill` names; None without one.

    Raises `UserError` for one whose classes, pixel statistics or blocks are not those of the run.
    """
    wanted = config.distill
    if wanted.teacher is None:
        return None
    if not (wanted.logits or wanted.blocks or wanted.attention):
        raise UserError("distill.logits, blocks and attention are all 0: the teacher would have no effect.")
    student.check_images()
    trained, provenance = open_run(wanted.teacher, overrides=[f"model.img_size={list(student.img_size)}"])
    _, teacher, classes, preprocess = trained
    name = f"The teacher {wanted.teacher}"
    if wanted.logits and not same_classes(classes, splits.classes):
        raise UserError(
            f"{name} knows {len(classes)} classes ({', '.join(classes[:3])}, ...), the data has {len(splits.classes)} "
            f"({', '.join(splits.classes[:3])}, ...): its logits do not apply to them. Set distill.logits to 0 to "
            "learn from its blocks alone."
        )
    if [*preprocess.mean, *preprocess.std] != [*map(float, splits.mean), *map(float, splits.std)]:
        mean, std = list(preprocess.mean), list(preprocess.std)
        raise UserError(f"{name} was trained with other pixel statistics: set data.mean={mean} and data.std={std}.")
    shapes = []
    for model in (student, teacher):
        model.eval()
        with paddle.no_grad(), recording([model]) as blocks:
            model(paddle.zeros([1, student.in_chans, *student.img_size]))
        shapes.append([block.shape[1:] for block in blocks])
    student.train()
    if (wanted.blocks or wanted.attention) and shapes[0] != shapes[1]:
        keys = " and ".join(f"distill.{key}" for key in ("blocks", "attention") if getattr(wanted, key))
        raise UserError(
            f"{name} has {_describe(shapes[1])}, the model {_describe(shapes[0])}. Blocks are compared one by one: "
            f"set {keys} to 0, or take a teacher on the same backbone."
        )
    digest = hashlib.sha256()
    for key, tensor in teacher.state_dict().items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    return Teacher(teacher, digest.hexdigest(), provenance)


def _describe(shapes: list[list[int]]) -> str:
    return f"{len(shapes)} blocks, the last of {shapes[-1][0]} tokens and {shapes[-1][1]} channels"
