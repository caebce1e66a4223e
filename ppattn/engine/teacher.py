"""The model that a run learns from: found, built for the run's images, and compared with the run before it starts."""

import hashlib
from typing import NamedTuple

import paddle

from ppattn.backbones.base import Backbone, recording
from ppattn.data import Splits
from ppattn.data.classes import same_classes
from ppattn.errors import UserError
from ppattn.layers import evaluating
from ppattn.settings import Config
from ppattn.trained import Provenance, open_run


class Teacher(NamedTuple):
    """The model that a run learns from."""

    model: Backbone  # in eval mode
    digest: str  # SHA-256 of its weights
    provenance: Provenance | None


def build_teacher(config: Config, student: Backbone, splits: Splits) -> Teacher | None:
    """The teacher that `config.distill` names; None without one.

    Raises `UserError` if its classes, pixel statistics or blocks do not fit the run.
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
    keys = [f"distill.{key}" for key in ("blocks", "attention") if getattr(wanted, key)]
    own, others = (_block_shapes(model, student) for model in (student, teacher))
    if keys and own != others:
        raise UserError(
            f"{name} has {_in_words(others)}, the model {_in_words(own)}. Blocks are compared one by one: "
            f"set {' and '.join(keys)} to 0, or take a teacher on the same backbone."
        )
    return Teacher(teacher, weights_digest(teacher), provenance)


def weights_digest(model: Backbone) -> str:
    """SHA-256 of all names and weights."""
    digest = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _block_shapes(model: Backbone, like: Backbone) -> list[list[int]]:
    """[N, C] of every block's output for an image of the size that `like` takes."""
    with evaluating(model), paddle.no_grad(), recording([model]) as blocks:
        model(paddle.zeros([1, like.in_chans, *like.img_size]))
    return [block.shape[1:] for block in blocks]


def _in_words(shapes: list[list[int]]) -> str:
    return f"{len(shapes)} blocks, the last of {shapes[-1][0]} tokens and {shapes[-1][1]} channels"
