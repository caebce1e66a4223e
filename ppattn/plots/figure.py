"""Figures: size, format, legends, and one colour per attention in every picture."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import StringIO
from os.path import commonprefix
from pathlib import Path
from textwrap import fill
from typing import IO, Any

from ppattn.errors import UserError, optional_package
from ppattn.text import printable
from ppattn.zoo.table import attentions

OWN = "#222222"  # an attention of the user's own
# Colours of runs beside each other, whatever their attention: matplotlib's own.
RUNS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"]
LINES = ("-", "--", ":", "-.")
warn_once = cache(logging.getLogger("ppattn.plots").warning)
CHINESE = re.compile("[\u4e00-\u9fff]")
CHINESE_FONTS = re.compile("CJK|Source Han|WenQuanYi|YaHei|SimHei|PingFang")


def colour_of(attention: str) -> str:
    """The colour of an attention in every picture."""
    return facts.colour if (facts := attentions().get(attention)) else OWN


def line_styles(labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Arguments of `plot` per label: the colour of its attention; labels of one colour differ in line style."""
    seen: Counter[str] = Counter()
    found = {}
    for label, attention in labels.items():
        found[label] = {"color": colour_of(attention), "linestyle": LINES[seen[attention] % len(LINES)]}
        seen[attention] += 1
    return found


def run_names(runs: list[str]) -> list[str]:
    """The shortest trailing path of each run that is unique."""
    parts = [Path(run).resolve().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = [printable("/".join(part[-count:])) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("The same run is named twice.")


def shorten_labels(names: list[str]) -> tuple[list[str], str]:
    """Names without common words at their ends, and these: (['inline', 'less'], 'deit_nano')."""
    if len(names) == 1:
        return names, ""
    words = [name.split("_") for name in names]
    common = commonprefix([one[:0:-1] for one in words])  # backwards, without the first word
    return ["_".join(one[: len(one) - len(common)]) for one in words], "_".join(reversed(common))


def legend_below(figure: Any) -> None:
    """A legend of all labels under the panels, with as many columns as fit."""
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(fill(label, 50), handle)
    for columns in range(min(4, len(labels)), 0, -1):
        legend = figure.legend(labels.values(), labels, loc="outside lower center", ncols=columns)
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


@contextmanager
def open_figure(path: Path | IO, width: float, height: float, title: str = "") -> Iterator[Any]:
    """A matplotlib figure of width x height inches, written at the end of the block.

    Into a file as PNG with an SVG beside it, into bytes as PNG, into `StringIO` as SVG. Texts are drawn as they are:
    `$` begins no formula, and Chinese glyphs come from a Chinese font if one is installed; otherwise they are boxes,
    with a warning. Ticks of logarithmic axes are plain numbers.
    """
    import warnings

    with optional_package("train"):
        from matplotlib import rc_context, rcParams
        from matplotlib.figure import Figure
        from matplotlib.font_manager import get_font_names
        from matplotlib.text import Text
        from matplotlib.ticker import NullFormatter

    chinese = filter(CHINESE_FONTS.search, get_font_names())
    fonts = [*rcParams["font.family"], *sorted(chinese, key=lambda name: (not name.endswith(" SC"), name))[:1]]
    settings = {"text.parse_math": False, "svg.hashsalt": "ppattn", "font.family": fonts}
    with warnings.catch_warnings(), rc_context(settings):
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            if axis.get_scale() in ("log", "symlog"):
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(NullFormatter())
        if title:
            figure.suptitle(title)
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(path, StringIO):
            figure.savefig(path, format="png", dpi=200)
        if isinstance(path, Path | StringIO):
            beside = path.with_suffix(".svg") if isinstance(path, Path) else path
            figure.savefig(beside, format="svg", metadata={"Date": None})
        texts = "".join(text.get_text() for text in figure.findobj(Text))
        drawn = rcParams["svg.fonttype"] == "path"  # otherwise by whatever shows the SVG, in its fonts
        if drawn and CHINESE.search(texts) and not any(map(CHINESE_FONTS.search, fonts)):
            warn_once("no font here has Chinese characters: apt install fonts-noto-cjk, then rm -r ~/.cache/matplotlib")
