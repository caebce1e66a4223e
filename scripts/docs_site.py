"""Pages of the documentation site that are made from the code.

python scripts/docs_site.py    # bring docs/zh/configuration.csv up to date: texts that changed lose their translation
"""

from __future__ import annotations

import csv
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import BaseModel, create_model

from ppattn import backbones
from ppattn.attention import ATTENTIONS
from ppattn.backbones import BACKBONES
from ppattn.config import to_line
from ppattn.files import write_rows
from ppattn.schema import arguments, section_of
from ppattn.settings import Config, Model

ROOT = Path(__file__).resolve().parents[1]
TRANSLATIONS = ROOT / "docs/zh/configuration.csv"
# Texts of the configuration page besides the meanings of the keys.
TEXTS = {
    "page.title": "Configuration",
    "page.intro": "Every key of a config, with type, default and meaning. `-o section.key=value` sets a key on the "
    "command line; `ppattn train -c CONFIG --print-config` prints all keys and where their values come from.",
    "page.top": "Top level",
    "page.backbones": "Arguments of the backbones",
    "page.backbones_intro": "They are keys of `model`, too. If a column is empty, the backbone has no such argument; "
    "its variants, such as `swin_tiny`, and the models of the zoo have their own values in `ppattn/models.yaml`.",
    "page.options": "Options of the attentions",
    "page.options_intro": "Keys of `model.attention_options`; the pages of the attentions explain them.",
    "page.key": "key",
    "page.type": "type",
    "page.default": "default",
    "page.meaning": "meaning",
    "page.attention": "attention",
    "type.integer": "integer",
    "type.number": "number",
    "type.string": "text",
    "type.object": "mapping",
    "type.array": "list of",
    "type.section": "section",
    "type.or": "or",
}


def schema_type(spec: dict, words: dict[str, str]) -> str:
    """A type of a JSON schema in words: integer ≥ 1 or `null`."""
    if "anyOf" in spec:
        return f" {words['type.or']} ".join(dict.fromkeys(schema_type(one, words) for one in spec["anyOf"]))
    if "$ref" in spec:
        return words["type.section"]
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    kind = spec.get("type", "object")
    if kind in ("boolean", "null"):
        return {"boolean": "`true`, `false`", "null": "`null`"}[kind]
    if kind == "array":
        inner = schema_type(spec.get("items", {}), words)
        inner = f"({inner})" if "anyOf" in spec.get("items", {}) else inner
        return " ".join([words["type.array"], *([f"{spec['minItems']} ×"] if "minItems" in spec else []), inner])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {spec[key]:g}" for key, sign in signs.items() if key in spec and abs(spec[key]) < 2**53]
    return f"{words[f'type.{kind}']} {', '.join(bounds)}".rstrip()


def signature(function: Any) -> dict[str, dict]:
    """JSON schemas of the arguments of a class by name, with their defaults."""
    fields: dict[str, Any] = {key: (hint, None) for key, hint in arguments(function).items() if key != "spec"}
    given = inspect.signature(function).parameters
    specs = create_model("Arguments", **fields).model_json_schema().get("properties", {})
    return {key: spec | {"default": given[key].default} for key, spec in specs.items()}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_yaml(default: object) -> str:
    return f"`{to_line(list(default) if isinstance(default, tuple) else default)}`"


def sections(section: type[BaseModel] = Config, name: str = "") -> dict[str, type[BaseModel]]:
    """The sections of a config by their dotted names; the top level has none."""
    found = {name: section}
    for key in section.model_fields:
        if inner := section_of(section, key):
            found |= sections(inner, f"{name}.{key}".lstrip("."))
    return found


def backbone_meanings() -> dict[str, str]:
    """Meanings of the arguments of the backbones that are no settings of `model` of their own."""
    found = re.findall(r"^    (\w+): (.*)$", backbones.__doc__ or "", re.MULTILINE)
    return {key: meaning for key, meaning in found if key not in Model.model_fields}


def texts() -> dict[str, str]:
    """Everything on the configuration page that is in English: sections and settings by their dotted names."""
    found = dict(TEXTS)
    for name, section in sections().items():
        if name:
            found[f"section.{name}"] = inspect.cleandoc(section.__doc__ or "")
        settings = {
            key: field.description or "" for key, field in section.model_fields.items() if name or key not in sections()
        }
        found |= {f"{name}.{key}".lstrip("."): meaning for key, meaning in settings.items()}
    return found | {f"model.{key}": meaning for key, meaning in backbone_meanings().items()}


def translations() -> dict[str, tuple[str, str]]:
    """English and Chinese text by name, as docs/zh/configuration.csv has them."""
    with TRANSLATIONS.open(encoding="utf-8", newline="") as file:
        return {row["key"]: (row["english"], row["chinese"]) for row in csv.DictReader(file)}


def configuration(chinese: bool = False) -> str:
    """The configuration page; a text without a translation stays English."""
    words = texts()
    if chinese:
        words |= {key: text for key, (english, text) in translations().items() if text and words.get(key) == english}
    head = [words[f"page.{column}"] for column in ("key", "type", "default", "meaning")]
    page = f"# {words['page.title']}\n\n{words['page.intro']}\n"
    for name, section in sections().items():
        specs = section.model_json_schema()["properties"]
        rows = [
            [
                f"`{key}`",
                schema_type(spec, words),
                in_yaml(spec["default"]) if "default" in spec else "",
                words[f"{name}.{key}".lstrip(".")],
            ]
            for key, spec in specs.items()
            if name or key not in sections()
        ]
        title, intro = (f"`{name}`", words[f"section.{name}"]) if name else (words["page.top"], "")
        page += f"\n## {title}\n\n{intro}\n\n{table(head, rows)}"
    built = {name: signature(BACKBONES.get(name)) for name in BACKBONES.list()}
    rows = []
    for key, meaning in backbone_meanings().items():
        having = {name: one[key] for name, one in built.items() if key in one}
        defaults = [in_yaml(having[name]["default"]) if name in having else "" for name in built]
        kind = schema_type(next(iter(having.values())), words)
        rows.append([f"`{key}`", kind, *defaults, words.get(f"model.{key}", meaning)])
    page += f"\n## {words['page.backbones']}\n\n{words['page.backbones_intro']}\n\n"
    page += table([*head[:2], *(f"`{name}`" for name in built), head[3]], rows)
    rows = [
        [
            f"[`{name}`]({'../' * (1 + chinese)}attentions/{name}.md)",
            f"`{key}`",
            schema_type(spec, words),
            in_yaml(spec["default"]),
        ]
        for name in sorted(ATTENTIONS.list())
        for key, spec in signature(ATTENTIONS.get(name)).items()
    ]
    page += f"\n## {words['page.options']}\n\n{words['page.options_intro']}\n\n"
    return page + table([words["page.attention"], *head[:3]], rows)


def main() -> None:
    known = translations() if TRANSLATIONS.is_file() else {}
    rows = [(key, text, known[key][1] if known.get(key, ("",))[0] == text else "") for key, text in texts().items()]
    TRANSLATIONS.parent.mkdir(exist_ok=True)
    write_rows(TRANSLATIONS, [("key", "english", "chinese"), *rows], "\n")
    print(
        f"{TRANSLATIONS.relative_to(ROOT)}: {sum(not row[2] for row in rows)} of {len(rows)} texts need a translation"
    )


if __name__ == "__main__":
    main()
