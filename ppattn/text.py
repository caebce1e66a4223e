"""Names from files and folders, shown safely: on a terminal, in a table, in a picture."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ppattn.errors import optional


def is_text(name: str) -> bool:
    """Whether a name holds no control characters, line ends or bytes that are not UTF-8."""
    return not any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in name)


def printable(text: str) -> str:
    """The text with control characters (terminal codes, line ends, NUL) and undecoded bytes as escapes."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        sign.encode("unicode_escape").decode() if unicodedata.category(sign) in hidden else sign for sign in text
    )


def cell(text: str) -> str:
    """The text as a cell of a CSV file: one that a spreadsheet would run as a formula gets an apostrophe in front."""
    text = printable(text)
    number = re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not number else text


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of a table, columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def processor(environment: dict, threads: int | None = None) -> str:
    """What a result was measured on, from an env.json: `2 cores of an AMD EPYC`.

    Args:
        threads: how many of its cores were used; default: all.
    """
    cores = threads or environment["cores"]
    return f"{cores} core{'s' * (cores > 1)} of an {environment['device_name'].removesuffix(' Processor')}"


@contextmanager
def picture(path: Path | BinaryIO, width: float, height: float, title: str = "") -> Iterator[Any]:
    """A matplotlib figure of width x height inches, written as PNG to `path` at the end of the block.

    Texts are drawn as they are (`$` begins no formula), without a warning about glyphs that the font does not have.
    Ticks of logarithmic axes are plain numbers.
    """
    import warnings

    with optional("train"):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter

    with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            if axis.get_scale() in ("log", "symlog"):
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(NullFormatter())
        if title:
            figure.suptitle(title)
        figure.savefig(path, format="png", dpi=120)
