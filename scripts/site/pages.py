"""Pages of the documentation site that are made from the code.

python -m scripts.site.pages    # bring docs/zh/configuration.csv up to date: texts that changed lose their translation
"""

import csv
import html
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, create_model

import ppattn
from ppattn import backbones, zoo
from ppattn.attention import ATTENTIONS
from ppattn.backbones import BACKBONES
from ppattn.config import to_line
from ppattn.files.atomic import write_rows
from ppattn.files.tables import read_table
from ppattn.settings import Config, Model
from ppattn.validation import argument_types, section_of
from scripts.site import formulas

ROOT = Path(__file__).resolve().parents[2]
TRANSLATIONS = ROOT / "docs/zh/configuration.csv"
MOVED = {"ppattn/settings.py": "docs/guide/configuration.md"}
DEMO_MODEL = "long_inline_deit_nano_cifar10"
TEXTS = {
    f"{group}.{key}": text
    for group, own in read_table(Path(__file__).with_name("texts.yaml")).items()
    for key, text in own.items()
}
TYPES = {key: text for key, text in TEXTS.items() if key.startswith("type.")}


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
        return "`true`, `false`" if kind == "boolean" else "`null`"
    if kind == "array":
        inner = schema_type(spec.get("items", {}), words)
        last = words["type.array"].startswith("{") and " " in inner  # in Chinese the list comes after its items
        inner = f"({inner})" if last or "anyOf" in spec.get("items", {}) else inner
        several = "minItems" in spec
        return words["type.tuple"].format(spec["minItems"], inner) if several else words["type.array"].format(inner)
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {spec[key]:g}" for key, sign in signs.items() if key in spec and abs(spec[key]) < 2**53]
    return f"{words[f'type.{kind}']} {', '.join(bounds)}".rstrip()


def signature(function: Any) -> dict[str, dict]:
    """JSON schemas of the arguments of a class by name, with their defaults."""
    fields: dict[str, Any] = {key: (hint, None) for key, hint in argument_types(function).items() if key != "spec"}
    given = inspect.signature(function).parameters
    specs = create_model("Arguments", **fields).model_json_schema().get("properties", {})
    return {key: spec | {"default": given[key].default} for key, spec in specs.items()}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows)]
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
    found = read_table(Path(backbones.__file__).with_name("arguments.yaml"))
    return {key: meaning for key, meaning in found.items() if key not in Model.model_fields}


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
    with TRANSLATIONS.open(encoding="utf-8-sig", newline="") as file:
        return {row["key"]: (row["english"], row["chinese"]) for row in csv.DictReader(file)}


def configuration(chinese: bool = False) -> str:
    """The configuration page; a text without a translation stays English."""
    words = texts()
    if chinese:
        words |= {key: text for key, (english, text) in translations().items() if text and words.get(key) == english}
    keys = []
    for name, section in sections().items():
        rows = []
        for key, spec in section.model_json_schema()["properties"].items():
            if name or key not in sections():
                default = in_yaml(spec["default"]) if "default" in spec else ""
                meaning = prose(words[f"{name}.{key}".lstrip(".")])
                rows.append([f"`{key}`", schema_type(spec, words), default, meaning])
        title, intro = (f"`{name}`", words[f"section.{name}"]) if name else (words["page.top"], "")
        blocks = [block if block.startswith("    ") else prose(block) for block in intro.split("\n\n")]
        keys.append((title, "\n\n".join(blocks), rows))
    built = {name: signature(BACKBONES.get(name)) for name in BACKBONES.list()}
    rows = []
    for key, meaning in backbone_meanings().items():
        having = {name: one[key] for name, one in built.items() if key in one}
        owners: dict[str, list[str]] = {}
        for name, spec in having.items():
            owners.setdefault(in_yaml(spec["default"]), []).append(name)
        everywhere = len(owners) == 1 and len(having) == len(built)
        default = "<br>".join(value if everywhere else f"{value} {', '.join(names)}" for value, names in owners.items())
        kind = schema_type(next(iter(having.values())), words)
        rows.append([f"`{key}`", kind, default, prose(words.get(f"model.{key}", meaning))])
    keys.append((words["page.backbones"], words["page.backbones_intro"], rows))
    own = {name: options(ATTENTIONS.get(name), words) for name in sorted(ATTENTIONS.list())}
    return TEMPLATES.configuration(words, keys, own, "../" * (1 + chinese))


def options(function: Any, words: dict[str, str]) -> list[list[str]]:
    """Name, type and default of every argument of a class."""
    return [
        [f"`{key}`", schema_type(spec, words), in_yaml(spec["default"])] for key, spec in signature(function).items()
    ]


def attention_page(name: str) -> str:
    """The page of one attention: its docstring, options and map."""
    cls = ATTENTIONS.get(name)
    first, _, rest = (inspect.getdoc(sys.modules[cls.__module__]) or "").partition("\n")
    source = Path(inspect.getsourcefile(cls) or "").relative_to(ROOT)
    has_map = (ROOT / f"results/maps/{name}.png").is_file()
    return TEMPLATES.attention(name, zoo.attentions()[name], first, rest, options(cls, TYPES), source, has_map)


def docstring(text: str) -> str:
    """Markdown of a docstring: its indented formulas rendered, everything else as it is."""
    out = []
    for block in re.split(r"\n\s*\n|\n(?=Options?:)|(?<=^Options:)\n", text.strip("\n"), flags=re.MULTILINE):
        if block.startswith("    ") and not re.match(r" +(- |\w+: )", block):
            out.append(rendered(block))
        elif re.match(r" +\w+: ", block):  # a list of options
            out.append(re.sub(r"^    (\w+): ", r"- `\1`: ", inspect.cleandoc("\n" + prose(block)), flags=re.MULTILINE))
        else:
            out.append(re.sub(r"^  - ", "\n- ", prose(block.strip("\n")), count=1, flags=re.MULTILINE))
    return "\n\n".join(out) + "\n"


def rendered(block: str) -> str:
    """HTML of an indented block: a row per line, which breaks on a narrow screen where the line has wide gaps."""
    spans = [[f"<span class='formula'>{html.escape(part)}</span>" for part in row] for row in formulas.rows(block)]
    return "<div class='formulas'>" + "".join(f"<div>{''.join(row)}</div>" for row in spans) + "</div>"


def prose(text: str) -> str:
    """A paragraph of a docstring as Markdown: nothing but code in it is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        part = re.sub(r"([*_|{}\[\]])", r"\\\1", html.escape(parts[i], quote=False))
        part = re.sub(r"\^(-?\w+(?:/\d+)?)", r"<sup>\1</sup>", part)
        part = re.sub(r"(?<![\d.])(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", part)
        link = lambda m: f"[{m[0]}]({m[1]}.md)" if m[1] in zoo.attentions() else m[0]  # noqa: E731
        parts[i] = re.sub(r"\b(\w+)\.py\b", link, part)
    return "".join(parts)


def recipes() -> str:
    """The configs and what their first lines say."""
    found: dict[str, list[list[str]]] = {"digits": [], "cifar10": [], "imagenet": []}
    for folder, rows in found.items():
        for path in sorted((ROOT / "configs" / folder).glob("*.yaml")):
            comments = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
            said = " ".join(line.lstrip("# ") for line in comments if "tools/train.py" not in line)
            rows.append([f"[`{folder}/{path.stem}`](../../{path.relative_to(ROOT)})", prose(said)])
    return TEMPLATES.recipes(*found.values())


def shown_by(place: str, page: str) -> str:
    """The page that shows a file to which `page` links: a page of the same language if there is one."""
    moved = MOVED.get(place, f"{place}.md")
    return twin(moved) if place in MOVED and is_chinese(page) else moved


def is_chinese(name: str) -> bool:
    return name == "README.zh.md" or name.startswith("docs/zh/")


def twin(name: str) -> str:
    """The place of the same page in the other language."""
    if is_chinese(name):
        return "README.md" if name == "README.zh.md" else name.replace("docs/zh/", "docs/")
    return "README.zh.md" if name == "README.md" else name.replace("docs/", "docs/zh/")


def overview() -> str:
    """The table of attentions in the README, with links to their pages."""
    section = re.search(r"## Attentions\n(.*?)\n## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    text = re.sub(r"^\| `(\w+)`", r"| [`\1`](\1.md)", section[1] if section else "", flags=re.MULTILINE)
    return "# Attentions\n" + re.sub(r"\]\((docs|results|ppattn)/", r"](../../\1/", text)


ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
ENVIRONMENT.globals |= {"docstring": docstring, "prose": prose, "table": table}
TEMPLATES: Any = ENVIRONMENT.from_string(Path(__file__).with_name("pages.md.jinja").read_text(encoding="utf-8")).module


def pages() -> dict[str, str]:
    """The pages that are made from code, by their places."""
    names = [f"{ppattn._HOME[name]}.{name}" for name in ppattn.__all__ if ppattn._HOME.get(name)]
    made = {
        "docs/guide/configuration.md": configuration(),
        "docs/zh/guide/configuration.md": configuration(chinese=True),
        "docs/guide/recipes.md": recipes(),
        "docs/guide/api.md": TEMPLATES.api(names),
        "docs/attentions/index.md": overview(),
        "docs/demo.md": TEMPLATES.demo(),
    }
    return made | {f"docs/attentions/{name}.md": attention_page(name) for name in zoo.attentions()}


def main() -> None:
    known = translations() if TRANSLATIONS.is_file() else {}
    rows = [(key, text, known[key][1] if known.get(key, ("",))[0] == text else "") for key, text in texts().items()]
    write_rows(TRANSLATIONS, [("key", "english", "chinese"), *rows], "\n")
    print(f"{TRANSLATIONS}: {sum(not row[2] for row in rows)} of {len(rows)} texts need a translation")


if __name__ == "__main__":
    main()
