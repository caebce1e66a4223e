"""Text for people: untrusted names made printable, tables, a progress line."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def is_text(name: str) -> bool:
    """Whether a name holds no control characters, line ends or bytes that are not UTF-8."""
    return not any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in name)


def printable(text: str) -> str:
    """The text with control characters (terminal codes, line ends, NUL) and undecoded bytes as escapes."""
    hidden = {sign for sign in text if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return "".join(sign.encode("unicode_escape").decode() if sign in hidden else sign for sign in text)


def csv_cell(text: str) -> str:
    """The text as a cell of a CSV file: one that a spreadsheet would run as a formula gets an apostrophe in front."""
    text = printable(text)
    number = re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not number else text


def aligned_table(rows: list[list[str]]) -> list[str]:
    """Lines of a table, columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@contextmanager
def progress_line(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A progress line on a terminal; call the yielded function with the name of each step before it."""
    from tqdm import tqdm

    form = "{desc}, {n_fmt} of {total_fmt} [{elapsed}]"
    with tqdm(total=steps, desc=title, bar_format=form, leave=False, disable=None) as bar:

        def begin(what: str) -> None:
            bar.n += 1
            bar.set_description_str(f"{title}: {what}")  # and shows it

        yield begin
