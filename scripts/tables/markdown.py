"""Tables in Markdown, and their words in Chinese."""

from __future__ import annotations

import re
from pathlib import Path

# headings, cells and beginnings of cells in README.zh.md and docs/zh
CHINESE = {
    "attention": "注意力",
    "paper": "论文",
    "cost in N": "计算量",
    "training speed, 196 tokens": "训练速度，196 个 token",
    "training speed, 3,136 tokens": "训练速度，3,136 个 token",
    "top-1 %": "top-1（%）",
    "as `soft`": "同 `soft`",
    "2 h N³ up to 256 tokens, else 2 N² C": "不超过 256 个 token 时 2 h N³，否则 2 N² C",
    "[Linear attention]": "[线性注意力]",
    "[SOFT's full kernel]": "[SOFT 的完整核]",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table, or a sentence where it would have no rows."""
    if not rows:
        return "Not run yet.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_language_of(page: Path, text: str) -> str:
    """A table for a page at this place in the repository; `text` is the one for README.md or docs/guide."""
    if page.name != "README.zh.md" and page.parts[:2] != ("docs", "zh"):
        return text
    if page.parts[0] == "docs":
        text = text.replace("](../", "](../../")
    known = "|".join(map(re.escape, CHINESE))
    return re.sub(rf"(?<=\| )({known})(?= \||\(|\d)", lambda match: CHINESE[match[0]], text)
