"""Options that several verbs have, declared once."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable

from ppattn import zoo
from ppattn.errors import UserError

MOST = 2**31 - 1


def whole(text: str) -> int:
    """A whole number of the command line; those that no setting can mean are refused."""
    try:
        value = int(text) if len(text) <= 20 else None
    except ValueError:
        value = None
    if value is None or abs(value) > MOST:
        raise ArgumentTypeError(f"{text[:30]!r} is not allowed: a whole number of at most {MOST}")
    return value


def check_output(path: str, inputs: Iterable[str | None]) -> None:
    """Refuse a file to write that is one of those to read, by whatever name."""
    for one in inputs:
        if one is not None and os.path.exists(path) and os.path.exists(one) and os.path.samefile(path, one):
            raise UserError(f"{path} would be overwritten, and {one} is what this call reads; name another file.")


def is_name(model: str | None) -> bool:
    """Whether `--model` is the name of a model, which `--run` takes too, and no folder."""
    return model in zoo.entries() and not os.path.exists(model)


def add_override(parser: ArgumentParser, example: str = "train.epochs=3") -> None:
    """`-o`, which may stand several times and take several items each time."""
    parser.add_argument(
        "-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=f"e.g. {example}"
    )


def add_checkpoint(parser: ArgumentParser) -> None:
    """`--run` and `--checkpoint`, which together name a trained model."""
    parser.add_argument("--run", metavar="DIR", help="run folder, checkpoint file, or name of a model with weights")
    parser.add_argument("--checkpoint", default="best", metavar="NAME", help="with --run: best (default) or latest")
