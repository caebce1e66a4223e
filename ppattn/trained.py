"""Trained models out of run folders, checkpoints and weights files, ready for inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppattn import weights
from ppattn.config import import_as_run, load_config, make_config, override
from ppattn.errors import UserError
from ppattn.settings import Config
from ppattn.zoo import create_model, find_weights, other_attention
from ppattn.zoo.table import entry

if TYPE_CHECKING:
    from paddle import nn

    from ppattn.data import Preprocess


def load_run(
    run: str | Path, which: str = "best", overrides: list[str] | None = None
) -> tuple[Config, nn.Layer, list[str], Preprocess]:
    """The trained model of a run folder, ready for inference.

    Args:
        run: a run folder, a checkpoint file that training wrote, a file that `convert` wrote, or the name of a model
            with published weights. A thousand classes of the latter two get ImageNet's names, others numbers; images
            are prepared as in the evaluation of the model's recipe. Of a run folder the modules are imported that its
            config.yaml names.
        which: "best", "latest" (EMA weights where the run kept them) or "previous"; ignored for a file or name.
        overrides: `section.key=value` items on the run's config.

    Returns:
        (config, model in eval mode, class names, what the model's `preprocess` gives).

    Raises:
        UserError: no such run or checkpoint, or a file that does not say how its model is built.
    """
    path = Path(run)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        path = folder / f"{which}.safetensors"
        if not path.exists():
            raise UserError(f"{run} is not a run folder with a checkpoint {which!r}: there is no {path}.")
        import_as_run(folder.parent)
    path = find_weights(path)
    tensors, metadata = weights.read(path)
    if "name" in metadata.get("config", {}).get("model", {}) and "classes" not in metadata:
        metadata = _converted(metadata, tensors)
    if not metadata.keys() >= {"config", "classes", "preprocess"}:
        raise UserError(
            f"{path} does not say how its model is built: give the config with -c and the file with --weights."
        )
    config = override(metadata["config"], overrides or [])
    return config, *_built(config, tensors, metadata, str(path))


def _converted(metadata: dict, tensors: dict) -> dict:
    """Fill in the metadata that training would have written, for converted weights."""
    from ppattn.data.classes import imagenet_names
    from ppattn.data.images import IMAGENET_MEAN, IMAGENET_STD

    model = make_config(metadata["config"]).model
    recipe = f"imagenet/{model.name}" if entry(model.name).published else "base/imagenet"
    config = load_config(recipe)[0].model_dump() | {"model": model.model_dump()}
    count = tensors["head.bias"].size if "head.bias" in tensors else 0
    classes = imagenet_names() if count == 1000 else [str(number) for number in range(count)]
    return metadata | {
        "config": config,
        "classes": classes,
        "preprocess": {"mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)},
    }


def load_weights(config: Config, path: str | Path) -> tuple[nn.Layer, list[str], Preprocess]:
    """The model of a config with the weights of a file ("pretrained": the published ones), for inference.

    Class names come from the file where training wrote it, and so do mean and standard deviation of the pixels where
    the config gives none; otherwise from the config's data set.

    Returns:
        (model in eval mode, class names, what the model's `preprocess` gives).
    """
    from ppattn.data import build_datasets

    tensors, metadata = weights.read(find_weights(path, config.model.name))
    if differs := other_attention(metadata, config.model.model_dump()):
        raise UserError(f"{path} {differs}.")
    if not metadata.keys() >= {"classes", "preprocess"}:
        splits = build_datasets(config)
        metadata |= {"classes": list(splits.classes), "preprocess": {"mean": splits.mean, "std": splits.std}}
    return _built(config, tensors, metadata, str(path))


def _built(config: Config, tensors: dict, metadata: dict, source: str):
    arguments = weights.constants(metadata) | config.model.arguments() | {"num_classes": len(metadata["classes"])}
    model = create_model(config.model.name, **arguments)
    weights.assign(model, tensors, source, metadata)
    model.eval()
    model.provenance = provenance(metadata)
    mean, std = (getattr(config.data, key) or metadata["preprocess"].get(key) for key in ("mean", "std"))
    return model, metadata["classes"], model.preprocess(config, mean, std)


def provenance(metadata: dict) -> dict:
    """Where the weights were trained: digests of both splits and how the held-out images were drawn."""
    if not metadata.get("data"):
        return {}
    config = make_config(metadata["config"])
    return {"data": metadata["data"], "holdout": config.data.holdout, "seed": config.holdout_seed}
