"""What a constructor is given, against the annotations of its arguments."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable

from ppattn.errors import UserError

UNIONS = (types.UnionType, typing.Union)
WORDS = {bool: "true or false", float: "a number", str: "a name", dict: "a mapping", type(None): "null"}


def check_arguments(function: Callable, given: dict[str, object], where: str, least: int | None = None) -> None:
    """Refuse a value that does not fit the annotation of its argument; without one of the kinds below anything does.

    Args:
        function: what takes the arguments.
        given: their names and values.
        where: the beginning of the message.
        least: the smallest whole number that is allowed.

    Raises:
        UserError: naming the argument, its value and what is allowed.
    """
    hints = typing.get_type_hints(function)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name], least):
            raise UserError(f"{where}: {name} = {value!r} is not allowed: {_words(hints[name], least)}.")


def _fits(value, hint, least: int | None) -> bool:
    if typing.get_origin(hint) in UNIONS:
        return any(_fits(value, kind, least) for kind in hint.__args__)
    if (typing.get_origin(hint) or hint) is list:
        items = typing.get_args(hint)
        return isinstance(value, (list, tuple)) and all(_fits(v, item, least) for item in items for v in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return hint not in WORDS or isinstance(value, hint)


def _words(hint, least: int | None) -> str:
    if typing.get_origin(hint) in UNIONS:
        return " or ".join(_words(kind, least) for kind in hint.__args__)
    if (typing.get_origin(hint) or hint) is list:
        items = [item for item in typing.get_args(hint) if typing.get_origin(item) not in UNIONS]
        return "a list, one per stage" + "".join(f" (each {_words(item, least)})" for item in items)
    if hint is int:
        return "a whole number" + (f", at least {least}" if least is not None else "")
    return WORDS[hint]
