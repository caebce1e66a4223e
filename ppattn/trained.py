"""Trained models out of run folders, checkpoints and weights files, ready for inference."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from ppattn import weights
from ppattn.backbones import Backbone
from ppattn.config import import_config_modules, load_config, make_config, override_config
from ppattn.data import IMAGENET_MEAN, IMAGENET_STD, Preprocess, Splits, build_datasets
from ppattn.data.classes import imagenet_names
from ppattn.data.sources import leaked_images
from ppattn.errors import UserError
from ppattn.settings import Config
from ppattn.validation import validated
from ppattn.weights import Metadata
from ppattn.zoo import create_model, find_weights, other_attention
from ppattn.zoo.table import model_entry


class Trained(NamedTuple):
    config: Config
    model: Backbone  # in eval mode
    classes: list[str]
    preprocess: Preprocess  # what the model's method of this name gives


class Provenance(BaseModel):
    """Where weights were trained: both splits, and how the held-out images were drawn."""

    data: dict[str, weights.SplitDigest]
    holdout: int | float | str
    seed: int

    def leaked_images(self, splits: Splits) -> int:
        """How many of the validation images the weights were trained on, as far as the digests tell."""
        digests = {part: one.sha256 for part, one in self.data.items()}
        return leaked_images(splits, digests, self.holdout, self.seed) if "train" in digests else 0


def load_run(run: str | Path, which: str = "best", overrides: Sequence[str] = ()) -> Trained:
    """The trained model of a run folder, ready for inference.

    `run` may also be a checkpoint file that training wrote, a file that `convert` wrote, or the name of a model with
    published weights. A thousand classes of the latter two get ImageNet's names, others numbers; images are prepared as
    in the evaluation of the model's recipe. Of a run folder the modules are imported that its config.yaml names, and
    `which` is "best", "latest" (EMA weights where the run kept them) or "previous".
    """
    return open_run(run, which, overrides)[0]


def open_run(run: str | Path, which: str = "best", overrides: Sequence[str] = ()) -> tuple[Trained, Provenance | None]:
    """`load_run`, and where its weights were trained if the file says so."""
    path = Path(run)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        path = folder / f"{which}.safetensors"
        if not path.exists():
            raise UserError(f"{run} is not a run folder with a checkpoint {which!r}: there is no {path}.")
        import_config_modules(folder.parent)
    path = find_weights(path)
    tensors, metadata = weights.read_with_metadata(path)
    if "name" in metadata.model and metadata.config.keys() <= {"model", "data"}:
        metadata = _converted(metadata, tensors)
    if not metadata.model_fields_set >= {"config", "classes", "preprocess"}:
        advice = "`ppattn convert` adds it, or a config with -c and the file with --weights where the command has them"
        raise UserError(f"{path} does not say how its model is built: {advice}.")
    return _built(override_config(metadata.config, overrides), tensors, metadata, path)


def open_weights(config: Config, path: str | Path) -> tuple[Trained, Provenance | None]:
    """The model of a config with the weights of a file ("pretrained": the published ones), for inference.

    Class names come from the file where training wrote it, and so do mean and standard deviation of the pixels where
    the config gives none; otherwise from the config's data set.
    """
    tensors, metadata = weights.read_with_metadata(find_weights(path, config.model.name))
    if differs := other_attention(metadata, config.model.model_dump()):
        raise UserError(f"{path} {differs}.")
    if not metadata.model_fields_set >= {"classes", "preprocess"}:
        splits = build_datasets(config)
        given = make_config(metadata.config).data  # of converted weights
        pixels = {"mean": given.mean or splits.mean, "std": given.std or splits.std}
        classes = metadata.classes or list(splits.classes)
        metadata = metadata.model_copy(update={"classes": classes, "preprocess": pixels})
    return _built(config, tensors, metadata, path)


def _converted(metadata: Metadata, tensors: dict) -> Metadata:
    """Fill in the metadata that training would have written, for converted weights."""
    given = make_config(metadata.config)
    model, data = given.model, given.data.model_dump(exclude_unset=True)
    recipe = f"imagenet/{model.name}" if model_entry(model.name).published else "base/imagenet"
    count = tensors["head.bias"].size if "head.bias" in tensors else 0
    names = imagenet_names() if count == 1000 else [*map(str, range(count))]
    config = load_config(recipe)[0].model_dump()
    config |= {"model": model.model_dump(), "data": config["data"] | data}
    pixels = {"mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
    return metadata.model_copy(update={"config": config, "classes": metadata.classes or names, "preprocess": pixels})


def _built(config: Config, tensors: dict, metadata: Metadata, path: str | Path) -> tuple[Trained, Provenance | None]:
    if metadata.untrained:
        names = f"{', '.join(metadata.untrained[:3])}, which have random values"
        raise UserError(f"{path} was converted without {names}: train the model with -o model.weights={path}.")
    arguments = weights.stored_constants(metadata) | config.model.arguments() | {"num_classes": len(metadata.classes)}
    model = create_model(config.model.name, **arguments)
    weights.assign(model, tensors, str(path), metadata)
    model.eval()
    mean, std = (getattr(config.data, key) or metadata.preprocess.get(key) for key in ("mean", "std"))
    return Trained(config, model, metadata.classes, model.preprocess(config, mean, std)), provenance(metadata)


def provenance(metadata: Metadata) -> Provenance | None:
    """Where the weights were trained; None if the file does not say so."""
    if not metadata.data:
        return None
    config = make_config(metadata.config)
    return Provenance(data=metadata.data, holdout=config.data.held, seed=config.holdout_seed)


def exported_provenance(source: dict, where: str) -> Provenance | None:
    """The same of what an exported folder says of its source."""
    return validated(Provenance, origin, f"{where}: origin") if (origin := source.get("origin")) else None
