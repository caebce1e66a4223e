"""Runs side by side in one HTML file that needs nothing else: `ppattn report RUN [RUN ...] --output FILE.html`."""

import base64
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ppattn.config import flat_settings, parse_yaml
from ppattn.errors import UserError, did_you_mean, optional_package, reading_untrusted
from ppattn.files.atomic import check_links, write_text
from ppattn.files.tables import read_table
from ppattn.plots.curves import plot_column
from ppattn.plots.figure import LINES, RUNS, legend_below, open_figure, run_names
from ppattn.zoo.table import model_attention, model_entries

CURVES = {"training loss": "train_loss", "validation loss": "val_loss", "top-1 %": "top1", "learning rate": "lr"}
CHINESE = Path(__file__).with_name("report_zh.yaml")  # every text of the report: {English: Chinese}
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass
class RunFolder:
    """Content of a run folder; classes, pictures and `evaluated_top1` of the summary come with `ppattn eval --run`."""

    name: str
    config: dict[str, Any]
    attention: str  # empty where another package has the model
    environment: dict[str, Any]
    history: list[dict[str, float]]
    summary: dict[str, float]
    classes: dict[str, float]
    pictures: dict[str, str]  # PNG files in base64, empty where there are none
    style: dict[str, str] = field(default_factory=dict)  # of its lines


def write_report(runs: list[str], output: Path, language: str = "en") -> None:
    """Write the report of run folders; one that is still training is shown as far as it has come.

    `en` and `zh` share keys, names and values. Raises `UserError` for a folder that is no run or cannot be read.
    """
    with optional_package("train"):
        from jinja2 import Environment, PackageLoader

    names = run_names(runs)
    found = [_read_run(Path(run), name) for run, name in zip(runs, names, strict=True)]
    for i, run in enumerate(found):
        run.style = {"color": RUNS[i % len(RUNS)], "linestyle": LINES[i // len(RUNS) % len(LINES)]}
    configs = _side_by_side([flat_settings(run.config) for run in found])
    texts = read_table(CHINESE) if language == "zh" else {}

    def words(text: str) -> str:
        return texts.get(text, text)

    template = Environment(loader=PackageLoader(__package__, ""), autoescape=True).get_template("report.html")
    text = template.render(
        language=language,
        words=words,
        title=", ".join(names),
        runs=found,
        different={key: row for key, row in configs.items() if key != "output" and len({*map(repr, row)}) > 1},
        curves=_curves(found, words),
        classes=_side_by_side([run.classes for run in found if run.classes]),
        environment=_side_by_side([flat_settings(run.environment) for run in found], ""),
    )
    write_text(output, text)


def _read_run(folder: Path, name: str) -> RunFolder:
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.csv").is_file():
        raise UserError(f"{folder} is not a run folder with config.yaml and metrics.csv.{did_you_mean(folder)}")

    def read(path: str, kind: Any, parse: Callable[[str], Any], missing: Any) -> Any:
        if not (folder / path).exists():
            return missing
        check_links(folder, [folder / path])
        with reading_untrusted(folder / path, "a file of a run"):
            return TypeAdapter(kind).validate_python(parse((folder / path).read_text(encoding="utf-8-sig")))

    def rows(text: str) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(text)))

    def filled(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if value not in (None, "")}

    def per_class(text: str) -> dict[str, Any]:
        return filled({r["class"]: r["average_precision" if "f1_at_half" in r else "accuracy"] for r in rows(text)})

    def attention(text: str) -> str:
        model = parse_yaml(text, "config.yaml")[0].get("model", {})
        known = model.get("attention") or model.get("name") in model_entries()
        return model_attention(model["name"], model) if known else ""

    def png(picture: str) -> str:
        check_links(folder, [path := folder / "eval" / picture])
        data = path.read_bytes() if path.is_file() else b""
        return base64.b64encode(data).decode() if data.startswith(PNG) else ""

    numbers = dict[str, float]
    summary = read("summary.json", numbers, lambda text: filled(json.loads(text)), {})
    evaluated = read("eval/metrics.json", numbers, lambda text: filled(json.loads(text)), {})
    return RunFolder(
        name,
        read("config.yaml", dict[str, Any], lambda text: parse_yaml(text, "config.yaml")[0], {}),
        read("config.yaml", str, attention, ""),
        read("env.json", dict[str, Any], json.loads, {}),
        read("metrics.csv", list[numbers], lambda text: [*map(filled, rows(text))], []),
        summary | {f"evaluated_{key}": value for key, value in evaluated.items()},
        read("eval/per_class.csv", numbers, per_class, {}),
        {picture: png(picture) for picture in ("confusion_matrix.png", "predictions.png")},
    )


def _side_by_side(values: list[dict[str, Any]], missing: Any = None) -> dict[str, list]:
    """A row per key with the value of every run."""
    keys = dict.fromkeys(key for own in values for key in own)
    return {key: [own.get(key, missing) for own in values] for key in keys}


def _curves(runs: list[RunFolder], words: Callable[[str], str]) -> str:
    text = io.StringIO()
    with optional_package("train"):
        from matplotlib import rc_context
    with rc_context({"svg.fonttype": "none"}), open_figure(text, 12, 7) as figure:
        for axes, (title, key) in zip(figure.subplots(2, 2).ravel(), CURVES.items(), strict=True):
            for run in runs:
                plot_column(axes, run.history, key, 100 if "%" in title else 1, label=run.name, **run.style)
            axes.set(title=words(title), xlabel=words("epoch"))
            axes.grid(alpha=0.3)
        legend_below(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]
