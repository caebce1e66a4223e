"""YAML files to a typed configuration: one `base:` level, `-o a.b=c`, and an error for everything that is not known.

`ppattn.settings` documents every key; pydantic checks them. This module only merges, and knows where a value was set.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Optional

import yaml
from pydantic import ValidationError, create_model

from ppattn import CONFIGS, zoo
from ppattn.data.sources import DATA_SETS
from ppattn.errors import UserError, nearest_name
from ppattn.runtime.plugins import IMPORTED, import_modules
from ppattn.settings import Config, Model
from ppattn.text import printable
from ppattn.validation import check_options, validation_error


def find_config(path: str | Path) -> Path:
    """The file itself, or one of the configs that ship with the package: `digits/inline_deit_nano`."""
    shipped = re.sub(r"^(configs/|(\.\./)+)", "", str(path))
    given = Path(path).expanduser()
    for candidate in (given, Path(f"{given}.yaml"), CONFIGS / shipped, CONFIGS / f"{shipped}.yaml"):
        if candidate.exists() and not candidate.is_dir():  # a pipe, too
            return candidate
    names = [f"configs/{p.relative_to(CONFIGS)}" for p in sorted(CONFIGS.rglob("*.yaml"))]
    raise UserError(f"No config file {str(path)!r}.{nearest_name(f'configs/{shipped}', names)}")


LARGEST, LARGEST_FILE = 100_000, 1 << 24  # values and bytes of a YAML file


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: 3e-4 and 010 are the numbers 0.0003 and 10; `on`, 1:30 and 2024-01-31 are text."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else than text."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


for _kind, _pattern in {
    "null": "|~|null|Null|NULL",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
}.items():
    for _user in (_Loader, _Dumper):
        _user.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def _size(node: Any, known: dict[int, float]) -> float:
    """How many values a node stands for; infinite if an alias leads to itself. `known`: those of nodes."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        parts = node.value if isinstance(node, yaml.SequenceNode) else (part for pair in pairs for part in pair)
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def parse_yaml(text: str | bytes, name: str) -> tuple[Any, yaml.Node | None]:
    """The value of one YAML document, and its tree, which knows the lines; `name` is what errors call the text."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if _size(node, {}) > LARGEST:
            raise ValueError(f"its aliases stand for more than {LARGEST:,} values")
        return (None if node is None else loader.construct_document(node)), node
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = re.sub("<(unicode|byte) string>", lambda _: name, " ".join(str(error).split()))
        raise UserError(f"{name}: {reason}.") from None


def _read(path: Path) -> tuple[dict, dict[str, str]]:
    """The mapping in a YAML file and, for every key of it, `file:line`."""
    with path.open("rb") as file:
        tree, node = parse_yaml(file.read(LARGEST_FILE), str(path))
    origins: dict[str, str] = {}

    def walk(node, prefix):
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            origins[f"{prefix}{key.value}"] = f"{path}:{key.start_mark.line + 1}"
            walk(value, f"{prefix}{key.value}.")

    walk(node, "")
    return _mapping(tree, str(path)), origins


def _mapping(tree: object, name: str) -> dict:
    if not isinstance(tree, dict):
        raise UserError(f"{name} is {f'a {type(tree).__name__}' if tree else 'empty'}, not a mapping of settings.")
    return tree


def _merge(under: dict, over: dict) -> dict:
    """Deep-merge `over` into `under`; an empty mapping replaces, as all but mappings do."""
    both = {k for k, value in over.items() if value and isinstance(value, dict) and isinstance(under.get(k), dict)}
    return under | over | {key: _merge(under[key], over[key]) for key in both}


def dotted_settings(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of everything in a tree, with the values."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from dotted_settings(value, f"{prefix}{key}.")


def flat_settings(tree: dict) -> dict[str, Any]:
    """Dotted names of the settings in a tree, with their values."""
    return {name: value for name, value in dotted_settings(tree) if not isinstance(value, dict) or not value}


def config_differences(before: dict, now: dict) -> list[tuple[str, Any, Any]]:
    """Settings in which two trees differ: (name, value before, value now). Null or empty equals absent."""
    one, other = ({k: v for k, v in flat_settings(tree).items() if v not in (None, [], {})} for tree in (before, now))
    names = sorted(one.keys() | other.keys())
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def merged_config(tree: dict, changes: dict) -> dict:
    """A config tree with changed sections; keys that are not named stay."""
    return tree | {key: tree[key] | new if isinstance(new, dict) else new for key, new in changes.items()}


def parse_override(item: str) -> dict:
    """`section.key=value` as a mapping; the value is YAML, but as it is with a ` #`, which would begin a comment."""
    key, sign, text = item.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise UserError(f"Override {item!r} is not of the form section.key=value.")
    quoted = text.lstrip()[:1] in ("'", '"', "[", "{")
    value: Any = text.strip() if " #" in f" {text}" and not quoted else parse_yaml(text, f"-o {item}")[0]
    for part in reversed(parts):
        value = {part: value}
    return value


def load_config(source: str | Path | dict | Config, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """A config file or mapping, its base and `section.key=value` overrides, checked; and where each key was set."""
    path, origins = Path("config"), dict[str, str]()
    if isinstance(source, (str, Path)):
        path = find_config(source)
        source, origins = _read(path)
    tree = dict(_mapping(source.model_dump() if isinstance(source, Config) else source, "The config"))
    if (base := tree.pop("base", None)) is not None:
        beside = path.parent / str(base)
        with _set_at(origins, "base"):
            below, below_origins = _read(beside if beside.is_file() else find_config(str(base)))
        if "base" in below:
            raise UserError(f"{below_origins['base']}: a base file has no base of its own (one level only).")
        tree, origins = _merge(below, tree), {**below_origins, **origins}
    tree = _overridden(tree, overrides, origins)
    _import(tree, origins, path.parent if (path.parent / "checkpoints").is_dir() else None)
    return make_config(tree, origins), origins


def import_config_modules(folder: Path) -> None:
    """Import the modules that the config.yaml of a run folder names, if there is one."""
    if (file := folder / "config.yaml").is_file():
        _import(*_read(file), folder)


def _import(tree: dict, origins: dict[str, str], run: Path | None) -> None:
    """Import what a config names; `run`: the run folder that it lies in."""
    given = tree.get("imports")
    if isinstance(given, list) and all(isinstance(name, str) for name in given):  # otherwise make_config reports it
        with _set_at(origins, "imports"):
            import_modules(given, run=run)


def override_config(tree: dict, overrides: Sequence[str]) -> Config:
    """Apply `section.key=value` overrides to a mapping and check it; imports no modules."""
    origins: dict[str, str] = {}
    return make_config(_overridden(tree, overrides, origins), origins)


def _overridden(tree: dict, overrides: Sequence[str], origins: dict[str, str]) -> dict:
    for item in overrides:
        change = parse_override(item)
        tree = _merge(_mapping(tree, "The config"), change)
        origins |= {name: f"-o {item}" for name, _ in dotted_settings(change)}
    return tree


def make_config(tree: dict, origins: dict[str, str] | None = None) -> Config:
    """Check a mapping of settings, with a line for every error; a key of another backbone than the model's may be null.

    `imports` loads nothing, since the mapping may come from a file of weights; it becomes what is imported already.
    """
    origins, schema = origins or {}, Config
    given = _mapping(tree, "The config").get("imports", [])
    if isinstance(given, list):
        if missing := [str(name) for name in given if str(name) not in IMPORTED]:
            options = " ".join(f"--imports {printable(name)}" for name in missing)
            raise UserError(f"This needs modules of its author, which a file cannot load by itself: add {options}.")
        tree = tree | {"imports": [*IMPORTED]}
    model = tree.get("model", {})
    if isinstance(model, dict) and isinstance(name := model.get("name", Model().name), str):
        name = zoo.table.known(name) or name
        with _set_at(origins, "model.name"):
            schema = _with_backbone(name)
        foreign = zoo.backbone_arguments().keys() - type(schema.model_fields["model"].default).model_fields.keys()
        model = {key: value for key, value in model.items() if value is not None or key not in foreign}
        tree = tree | {"model": model | {"name": name}}
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        raise validation_error(error, schema, lambda key: origins.get(key, "defaults")) from None
    with _set_at(origins, "model.attention"):
        zoo.check_attention(config.model.attention or [])
    with _set_at(origins, "data.name"):
        data_set = DATA_SETS.get(config.data.name)
    with _set_at(origins, "data.options"):
        check_options(data_set, config.data.options, config.data.name)
    return config


@contextmanager
def _set_at(origins: dict[str, str], key: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{origins.get(key, 'defaults')}: {error}") from None


@cache
def _with_backbone(name: str) -> type[Config]:
    """`Config` with the arguments of a model's backbone as keys of its model section."""
    own = {key: hint for key, hint in zoo.backbone_arguments(name).items() if key not in Model.model_fields}
    fields: dict[str, Any] = {key: (Optional[hint], None) for key, hint in own.items()}  # noqa: UP045
    model = create_model("Model", __base__=Model, **fields)
    return create_model("Config", __base__=Config, model=(model, model(name=name)))


def to_yaml(config: Config, origins: dict[str, str] | None = None) -> str:
    """The resolved configuration as YAML; with `origins`, every line says where its value came from."""
    lines = []

    def add(tree: dict, above: list[str]) -> None:
        for key, value in tree.items():
            section = isinstance(value, dict) and value  # keys of `lr_scale` may hold dots and stars
            line = f"{'  ' * len(above)}{to_line(key)}:" + ("" if section else f" {to_line(value)}")
            if origins is not None and not section:
                line = f"{line:<60}  # {origins.get('.'.join([*above, key]), 'default')}"
            lines.append(line)
            if section:
                add(value, [*above, key])

    add(config.model_dump(), [])
    return "\n".join(lines) + "\n"


def to_line(value: object) -> str:
    """A value as YAML in one line."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6).strip().removesuffix("\n...")
