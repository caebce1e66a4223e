"""Runs side by side in one HTML file that needs nothing else: `ppattn report RUN [RUN ...] --output FILE.html`."""

import base64
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from ppattn.config import flat, parse_yaml
from ppattn.errors import UserError, did_you_mean, optional, reading
from ppattn.files.atomic import check_links, write_text
from ppattn.plots.curves import plot_column
from ppattn.plots.figure import LINES, RUNS, legend_below, picture, run_names
from ppattn.zoo.table import attention_of, entries

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1c2024; }
h1, h2 { line-height: 1.2; } h2 { border-bottom: 1px solid #d0d7de; margin-top: 2.5rem; padding-bottom: .3rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #d0d7de; text-align: left; vertical-align: top; }
td { max-width: 30rem; overflow-wrap: anywhere; } td:first-child, td.number { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.best { font-weight: bold; } .runs { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: 0; max-width: 100%; } figcaption { font-weight: bold; } img, svg { max-width: 100%; height: auto; }
.marker { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em; }
"""
CURVES = [
    ("training loss", "train_loss", 1),
    ("validation loss", "val_loss", 1),
    ("top-1 %", "top1", 100),
    ("learning rate", "lr", 1),
]
SUMMARY = [
    ("best top-1 %", "best_top1", 100, "{:.2f}"),
    ("last top-1 %", "top1", 100, "{:.2f}"),
    ("best epoch", "best_epoch", 1, "{:.0f}"),
    ("epochs", "epochs", 1, "{:.0f}"),
    ("steps", "steps", 1, "{:,.0f}"),
    ("seconds", "seconds", 1, "{:,.0f}"),
    ("images/s", "images_per_second", 1, "{:,.0f}"),
    ("parameters", "params", 1, "{:,.0f}"),
    ("MACs", "macs", 1, "{:,.0f}"),
    ("evaluated top-1 %", "evaluated_top1", 100, "{:.2f}"),
]
CHINESE = Path(__file__).with_name("report_zh.yaml")  # every text above and below: {English: Chinese}
Words = Callable[[str], str]  # the text in the language of the report
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass
class RunFolder:
    """Content of a run folder; `classes` and `evaluated_top1` of the summary come with `ppattn eval --run`."""

    name: str
    folder: Path
    config: dict[str, Any]
    attention: str  # empty where another package has the model
    environment: dict[str, Any]
    history: list[dict[str, float]]
    summary: dict[str, float]
    classes: dict[str, float]
    style: dict[str, str] = field(default_factory=dict)  # of its lines


def write_report(runs: list[str], output: Path, language: str = "en") -> None:
    """Write the report of run folders; one that is still training is shown as far as it has come.

    Args:
        language: `en` or `zh`. Keys, names and values stay as they are.

    Raises:
        UserError: a folder that no training wrote, or a file in it that cannot be read.
    """
    names = run_names(runs)
    found = [_read_run(Path(run), name) for run, name in zip(runs, names, strict=True)]
    for i, run in enumerate(found):
        run.style = {"color": RUNS[i % len(RUNS)], "linestyle": LINES[i // len(RUNS) % len(LINES)]}
    texts = yaml.safe_load(CHINESE.read_text("utf-8")) if language == "zh" else {}

    def words(text: str) -> str:
        return texts.get(text, text)

    sections = [
        ("Results", _summary_table(found, words)),
        ("Differences of the configs", _config_table(found, words)),
        ("Curves", _curves(found, words)),
        ("Accuracy per class", _class_table(found, words)),
        ("Confusion matrices", _pictures(found, "confusion_matrix.png", words)),
        ("Predictions", _pictures(found, "predictions.png", words)),
        ("Environment", _side_by_side(found, [flat(run.environment) for run in found], words)),
    ]
    title = escape(", ".join(names))
    body = "\n".join(f"<h2>{words(heading)}</h2>\n{content}" for heading, content in sections)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        output,
        f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n",
    )


def _read_run(folder: Path, name: str) -> RunFolder:
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.csv").is_file():
        raise UserError(f"{folder} is not a run folder with config.yaml and metrics.csv.{did_you_mean(folder)}")

    def read(path: str, kind: Any, parse: Callable[[str], Any], missing: Any) -> Any:
        if not (folder / path).exists():
            return missing
        check_links(folder, [folder / path])
        with reading(folder / path, "a file of a run"):
            return TypeAdapter(kind).validate_python(parse((folder / path).read_text(encoding="utf-8-sig")))

    def rows(text: str) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(text)))

    def numbers(*keys: str) -> Callable[[dict], dict]:
        return lambda row: {key: row[key] for key in keys if row.get(key) not in (None, "")}

    def attention(text: str) -> str:
        model = parse_yaml(text, "config.yaml")[0].get("model", {})
        return attention_of(model["name"], model) if model.get("attention") or model.get("name") in entries() else ""

    epochs, figures = numbers("epoch", *(key for _, key, _ in CURVES)), numbers(*(entry[1] for entry in SUMMARY))
    summary = read("summary.json", dict[str, float], lambda text: figures(json.loads(text)), {})
    evaluated = read("eval/metrics.json", dict[str, float], lambda text: numbers("top1")(json.loads(text)), {})
    return RunFolder(
        name,
        folder,
        read("config.yaml", dict[str, Any], lambda text: parse_yaml(text, "config.yaml")[0], {}),
        read("config.yaml", str, attention, ""),
        read("env.json", dict[str, Any], json.loads, {}),
        read("metrics.csv", list[dict[str, float]], lambda text: [epochs(row) for row in rows(text)], []),
        summary | {f"evaluated_{key}": value for key, value in evaluated.items()},
        read("eval/per_class.csv", dict[str, float], lambda t: {row["class"]: row["accuracy"] for row in rows(t)}, {}),
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML. The first column names the rows; one that holds numbers only is aligned to the right."""
    numbers = [all(map(_is_number, filter(None, column))) for column in zip(*rows, strict=True)]
    classes = ["", *(" class=number" if numeric else "" for numeric in numbers[1:])]
    lines = []
    for tag, row in [("th", map(escape, head)), *(("td", row) for row in rows)]:
        cells = "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(classes, row, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join(["<table>", *lines, "</table>"])


def _marked(cell: str, best: bool) -> str:
    return f"<span class=best>{cell}</span>" if best else cell


def _is_number(cell: str) -> bool:
    text = cell.removeprefix("<span class=best>").removesuffix("</span>")
    return bool(text) and all(sign in "0123456789.,-+e" for sign in text)


def _titled(run: RunFolder) -> str:
    return f'<span class="marker" style="background:{run.style["color"]}"></span>{escape(run.name)}'


def _summary_table(runs: list[RunFolder], words: Words) -> str:
    columns = [entry for entry in SUMMARY if any(run.summary.get(entry[1]) is not None for run in runs)]
    best = max(run.summary.get("best_top1") or 0 for run in runs)
    rows = []
    for run in runs:
        row = [_titled(run), escape(run.attention)]
        for _, key, factor, form in columns:
            value = run.summary.get(key)
            text = "" if value is None else form.format(factor * value)
            row.append(_marked(text, key == "best_top1" and value == best))
        rows.append(row)
    return _table([words(title) for title in ("run", "attention", *(title for title, *_ in columns))], rows)


def _config_table(runs: list[RunFolder], words: Words) -> str:
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "output")
    different = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    if not different:
        return f"<p>{words('One run.' if len(runs) == 1 else 'The configs differ in `output` only.')}</p>"
    return _side_by_side(runs, [{key: config.get(key) for key in different} for config in configs], words)


def _side_by_side(runs: list[RunFolder], values: list[dict[str, Any]], words: Words) -> str:
    keys = dict.fromkeys(key for own in values for key in own)
    rows = [[f"<code>{escape(key)}</code>", *(escape(str(own.get(key, ""))) for own in values)] for key in keys]
    return _table([words("key"), *(run.name for run in runs)], rows)


def _curves(runs: list[RunFolder], words: Words) -> str:
    text = io.StringIO()
    with optional("train"):
        from matplotlib import rc_context
    with rc_context({"svg.fonttype": "none"}), picture(text, 12, 7) as figure:
        for axes, (title, key, factor) in zip(figure.subplots(2, 2).ravel(), CURVES, strict=True):
            for run in runs:
                plot_column(axes, run.history, key, factor, label=run.name, **run.style)
            axes.set(title=words(title), xlabel=words("epoch"))
            axes.grid(alpha=0.3)
        legend_below(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _class_table(runs: list[RunFolder], words: Words) -> str:
    shown = [run for run in runs if run.classes]
    if not shown:
        return f"<p>{words('No run is evaluated yet.')} <code>ppattn eval --run RUN</code></p>"
    accuracy = [run.classes for run in shown]
    rows = []
    for name in dict.fromkeys(name for table in accuracy for name in table):
        found = [table.get(name) for table in accuracy]
        best = max(value for value in found if value is not None)
        cells = ("" if value is None else f"{100 * value:.1f}" for value in found)
        marked = [len(shown) > 1 and value == best for value in found]
        rows.append([escape(name), *map(_marked, cells, marked)])
    return _table([words("class, accuracy %"), *(run.name for run in shown)], rows)


def _pictures(runs: list[RunFolder], name: str, words: Words) -> str:
    figures = []
    for run in runs:
        path = run.folder / "eval" / name
        check_links(run.folder, [path])
        if path.is_file() and path.read_bytes()[:8] == PNG:
            data = base64.b64encode(path.read_bytes()).decode()
            image = f'<img alt="{name} of {escape(run.name)}" src="data:image/png;base64,{data}">'
            figures.append(f"<figure><figcaption>{_titled(run)}</figcaption>{image}</figure>")
    none = f"<p>{words('No run is evaluated yet.')}</p>"
    return f'<div class="runs">{"".join(figures)}</div>' if figures else none
