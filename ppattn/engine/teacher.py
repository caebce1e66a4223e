"""The model that a run learns from: found, built for the run's images, and compared with the run before it starts."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from ppattn.backbones.base import Backbone, recording_blocks
from ppattn.data import Preprocess, Splits
from ppattn.data.classes import same_classes, warn_of_order
from ppattn.deploy.folder import ABOUT
from ppattn.deploy.predictor import Predictor, exported_runner
from ppattn.errors import UserError
from ppattn.files.atomic import checksum
from ppattn.layers import evaluating
from ppattn.settings import Config, Distill
from ppattn.trained import Provenance, exported_provenance, open_run


class Teacher(NamedTuple):
    """The model that a run learns from."""

    model: Any  # a backbone in eval mode, or a function from images to logits
    digest: str  # SHA-256 of its weights
    provenance: Provenance | None


def build_teacher(config: Config, student: Backbone, splits: Splits) -> Teacher | None:
    """The teacher that `config.distill` names, or None; `UserError` where classes, pixels or blocks do not fit."""
    wanted = config.distill
    if not config.data.labels and (wanted.teacher is None or wanted.labels or wanted.logits):
        rest = "set distill.teacher and distill.features, and distill.labels and distill.logits to 0"
        raise UserError(f"data.labels = false leaves a teacher's features to learn from: {rest}.")
    if wanted.teacher is None:
        if wanted != Distill():
            raise UserError("The settings of distill are for a teacher: set distill.teacher.")
        return None
    if Path(wanted.teacher).resolve() == Path(config.output).resolve():
        raise UserError("distill.teacher is the run folder itself: set another output.")
    if not (wanted.logits or wanted.blocks or wanted.attention or wanted.features):
        raise UserError("distill.logits, blocks, attention and features are all 0: the teacher would have no effect.")
    student.check_images()
    if (Path(wanted.teacher) / ABOUT).is_file():
        return exported_teacher(config, student, splits)
    trained, provenance = open_run(wanted.teacher, overrides=[f"model.img_size={list(student.img_size)}"])
    _, teacher, classes, preprocess = trained
    name = f"The teacher {wanted.teacher}"
    compare_data(name, config, splits, classes, preprocess)
    keys = [f"distill.{key}" for key in ("blocks", "attention", "features") if getattr(wanted, key)]
    shapes = [_block_shapes(model, student) for model in (student, teacher)]
    if keys and shapes[0] != shapes[1]:
        own, others = (f"{len(s)} blocks, the last of {s[-1][0]} tokens and {s[-1][1]} channels" for s in shapes)
        advice = f"set {' and '.join(keys)} to 0, or take a teacher on the same backbone"
        raise UserError(f"{name} has {others}, the model {own}: {advice}.")
    return Teacher(teacher, weights_digest(teacher), provenance)


def weights_digest(model: Backbone) -> str:
    """SHA-256 of all names and weights."""
    digest = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def compare_data(name: str, config: Config, splits: Splits, classes: list[str], preprocess: Preprocess) -> None:
    """Raise `UserError` for a teacher of other classes, if its logits are wanted, or other pixel statistics."""
    if config.distill.logits and splits.train.table is not None:
        raise UserError("A teacher's logits are compared by softmax, for one label per image: set distill.logits to 0.")
    if config.distill.logits and not same_classes(classes, splits.classes):
        own, others = (f"{len(some)} ({', '.join([*some[:3], '...'])})" for some in (classes, splits.classes))
        raise UserError(f"{name} knows other classes, {own}, than the data, {others}: set distill.logits to 0.")
    if config.distill.logits:
        warn_of_order(classes, splits.classes)
    if [*preprocess.mean, *preprocess.std] != [*map(float, splits.mean), *map(float, splits.std)]:
        mean, std = list(preprocess.mean), list(preprocess.std)
        raise UserError(f"{name} was trained with other pixel statistics: set data.mean={mean} and data.std={std}.")


def exported_teacher(config: Config, student: Backbone, splits: Splits) -> Teacher:
    """A teacher out of an exported folder, of any kind: it gives logits only."""
    name = f"The teacher {config.distill.teacher}"
    if config.distill.blocks or config.distill.attention or config.distill.features:
        raise UserError(f"{name} is an exported program, which gives logits only: set the other factors to 0.")
    predictor = Predictor(str(config.distill.teacher))
    shape, own = ([some.in_chans, *some.img_size] for some in (predictor.preprocess, student))
    if predictor.output == "features" or shape != own:
        raise UserError(f"{name} gives {predictor.output} for images of {shape}: export a classifier for {own}.")
    compare_data(name, config, splits, predictor.classes, predictor.preprocess)
    if config.augment.progressive_resize and not predictor.stride:
        raise UserError(f"{name} takes one image size: export it with --dynamic-size for augment.progressive_resize.")
    run, provenance = exported_runner(predictor), exported_provenance(predictor.source, name)
    return Teacher(lambda images: paddle.to_tensor(run(images.numpy())), checksum(predictor.folder / ABOUT), provenance)


def _block_shapes(model: Backbone, like: Backbone) -> list[list[int]]:
    """[N, C] of every block's output for an image of the size that `like` takes."""
    with evaluating(model), paddle.no_grad(), recording_blocks([model]) as blocks:
        model(paddle.zeros([1, like.in_chans, *like.img_size]))
    return [block.shape[1:] for block in blocks]
