"""What several verbs do with their options."""

import glob
import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppattn import zoo
from ppattn.errors import UserError, did_you_mean


def check_writable(folder: Path) -> None:
    """Raise `UserError` before the work, not after it, if nothing can be written to a folder, made if need be."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        problem = "read-only" if place.is_dir() else "not a directory"
        raise UserError(f"Nothing can be written to {folder}: {place} is {problem}.")


def check_output(path: str, inputs: Iterable[str | Path | None], suffix: str) -> None:
    """Refuse a place that cannot be written, an input, and in a folder that is read metrics.csv or another `suffix`."""
    target = Path(os.path.realpath(path))
    if target.is_file() or not os.path.exists(path):  # no device, pipe or terminal
        check_writable(target.parent)
    for one in inputs if target.exists() else ():
        source = Path(os.path.realpath(one)) if one else None
        inside = source in target.parents and (target.suffix != suffix or target.name == "metrics.csv")
        if source and (target == source or inside):
            raise UserError(f"{path} would be overwritten, and {one} is what this call reads; name another file.")


def is_name(model: str | None) -> bool:
    """Whether `--model` is the name of a model, which `--run` takes too, and no folder."""
    return model is not None and zoo.table.known(model) is not None and not os.path.exists(model)


def open_export(model: str, engine: str | None = None) -> Any:
    """The predictor of an exported folder; where there is no such folder, the error has the nearest name."""
    from ppattn import Predictor

    if not os.path.exists(model):
        raise UserError(f"There is no exported model {model!r}.{did_you_mean(model, zoo.table.with_weights())}")
    return Predictor(model, engine=engine)


def load_trained(args: Namespace) -> tuple:
    """The model that `--run`, or `-c` and `--weights`, name, and where it was trained."""
    from ppattn.config import load_config
    from ppattn.trained import open_run, open_weights

    if args.run:
        if args.config or (args.checkpoint and os.path.isfile(args.run)):
            raise UserError("-c is for --weights, --checkpoint for a run folder; -o changes the settings of a run.")
        return open_run(args.run, args.checkpoint or "best", args.override)
    if not args.config or args.checkpoint:
        raise UserError("--weights needs the config of its model, -c YAML, and no --checkpoint, which is for --run.")
    return open_weights(load_config(args.config, args.override)[0], args.weights)


def image_files(given: list[str]) -> tuple[list[str], list[str]]:
    """Image files named by paths, folders and patterns, in order; and error messages for missing paths."""
    from ppattn.data import folders
    from ppattn.data.images import SUFFIXES

    files, missing = [], []
    for item in given:
        path = Path(item)
        if path.is_dir():
            everything = sorted(folders.files_in(path))
            found = [str(file) for file in everything if folders.is_image(file)]
            if found and len(found) < len(everything):
                print(f"{path}: {len(everything) - len(found)} files are left out, no images", file=sys.stderr)
            problem = f"holds no images ({', '.join(SUFFIXES)})"
        else:
            names = [item] if path.exists() else sorted(glob.glob(item, recursive=True))
            found, problem = [name for name in names if not Path(name).is_dir()], "does not exist"
        files += found
        if not found:
            missing.append(f"{item} {problem}.")
    if not files:
        raise UserError(" ".join(missing))
    return files, missing
