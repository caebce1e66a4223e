"""Tables in Markdown, and their words in Chinese."""

import re
from collections.abc import Sequence
from pathlib import Path

from ppattn.files.tables import read_table
from scripts.run_grid import ROOT

CHINESE: dict[str, str] = read_table(ROOT / "docs/zh/tables.yaml")


def table(head: list[str], rows: Sequence[Sequence[object]]) -> str:
    """A table, None as an empty cell; a sentence where it would have no rows."""
    if not rows:
        return "Not run yet.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |\n" for line in lines)


def number(value: object, form: str) -> str | None:
    """A number, or the text of one, in this format; None for None and for no text."""
    return None if value in (None, "") else f"{float(str(value)):{form}}"


def in_language_of(page: Path, text: str) -> str:
    """A table for a page at this place in the repository; `text` is the one for README.md or docs/guide."""
    if page.name != "README.zh.md" and page.parts[:2] != ("docs", "zh"):
        return text
    if page.parts[0] == "docs":
        text = text.replace("](../", "](../../")
    known = "|".join(map(re.escape, CHINESE))
    return re.sub(rf"(?<=\| )({known})(?= \||\(|\d)", lambda match: CHINESE[match[0]], text)
