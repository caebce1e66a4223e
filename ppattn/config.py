"""YAML files to a typed configuration: one `base:` level, `-o a.b=c`, and an error for everything that is not known.

`ppattn.settings` documents every key, its default and its unit. Pydantic checks them; this module only merges files and
overrides, remembers where each value came from, and words the errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Optional

import yaml
from pydantic import ValidationError, create_model

from ppattn import zoo
from ppattn.errors import UserError, reading
from ppattn.runtime import import_paddle
from ppattn.safe_yaml import parse
from ppattn.schema import Names, Section, arguments, reasons
from ppattn.settings import Config, Model


def find_config(path: str | Path) -> Path:
    """The file itself, or one of the configs that ship with the package: `digits/inline_deit_nano`."""
    from ppattn import CONFIGS

    shipped = str(path).removeprefix("configs/")
    for candidate in (Path(path), Path(f"{path}.yaml"), CONFIGS / shipped, CONFIGS / f"{shipped}.yaml"):
        if candidate.is_file():
            return candidate
    names = [str(p.relative_to(CONFIGS)) for p in sorted(CONFIGS.rglob("*.yaml"))]
    near = difflib.get_close_matches(shipped, names, n=1, cutoff=0.4)
    raise UserError(f"No config file {str(path)!r}." + (f" Did you mean configs/{near[0]}?" if near else ""))


def _find_base(path: Path, base: str) -> Path:
    """The base file: relative to the file that names it, or one that ships with the package, as in base/imagenet."""
    beside = path.parent / base
    if beside.is_file():
        return beside
    try:
        return find_config(re.sub(r"^(\.\./)+", "", base))
    except UserError:
        raise UserError(
            f"{path}: base: {base} is neither a file ({beside}: No such file, relative to this one) nor a config that "
            "ships with the package, as in `base: base/imagenet.yaml`."
        ) from None


def _read(path: Path) -> tuple[dict, dict[str, str]]:
    """The mapping in a YAML file and, for every key of it, `file:line`."""
    with reading(path, "a text file in UTF-8"):
        text = path.read_text(encoding="utf-8")
    tree, node = parse(text, str(path))
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, not a mapping of sections to settings.")
    origins: dict[str, str] = {}

    def walk(node, prefix):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            origins[name] = f"{path}:{key.start_mark.line + 1}"
            if isinstance(value, yaml.MappingNode):
                walk(value, f"{name}.")

    walk(node, "")
    return tree, origins


def _merge(under: dict, over: dict) -> dict:
    """`over` laid on `under`, mapping by mapping; anything but a mapping replaces."""
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out


def dotted(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of everything in a tree, with the values."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def _override(item: str) -> dict:
    key, sign, text = item.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts) or len(parts) > 10:
        raise UserError(f"Override {item!r} is not of the form section.key=value.")
    value, _ = parse(text, f"The value of override {item[:200]!r}")
    for part in reversed(parts):
        value = {part: value}
    return value


def _section(root: type[Section], location: list[str]) -> type[Section] | None:
    """The section class at a dotted location of the schema."""
    section: Any = root
    for part in location:
        field = section.model_fields.get(part)
        options = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else []
        section = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        if section is None:
            return None
    return section


def _explain(error: ValidationError, schema: type[Config], origins: dict[str, str]) -> UserError:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    names = [part for part in first["loc"] if isinstance(part, str)]
    while len(names) > 1 and ".".join(names) not in origins and _section(schema, names[:-1]) is None:
        names.pop()  # pydantic appends the branch of a union that it tried
    key = ".".join(names)
    where = origins.get(key, "defaults")
    if first["type"] == "extra_forbidden":
        allowed = sorted((_section(schema, names[:-1]) or schema).model_fields)
        near = difflib.get_close_matches(names[-1], allowed, n=1, cutoff=0.5)
        prefix = ".".join([*names[:-1], ""])
        hint = f" Did you mean {prefix}{near[0]}?" if near else ""
        here = f"for {schema.model_fields['model'].default.name}" if names[0] == "model" else "here"
        return UserError(f"{where}: unknown key {key!r}.{hint} Allowed {here}: {', '.join(allowed)}.")
    return UserError(f"{where}: {key} = {first['input']!r} is not allowed: {reasons(error, tuple(names))}.")


@cache
def _with_backbone(name: str) -> type[Config]:
    """`Config` with the arguments of a model's backbone as keys of its model section."""
    own = _backbone_arguments(zoo.entry(name).backbone)
    fields: dict[str, Any] = {key: (Optional[own[key]], None) for key in own if key not in Model.model_fields}  # noqa: UP045
    model = create_model("Model", __base__=Model, **fields)
    return create_model("Config", __base__=Config, model=(model, model(name=name)))


def _backbone_arguments(*backbones: str) -> dict[str, Any]:
    """Arguments and annotations of the named backbones' constructors, or of all backbones."""
    import_paddle()
    from ppattn.backbones import BACKBONES

    return {key: hint for name in backbones or BACKBONES.list() for key, hint in arguments(BACKBONES.get(name)).items()}


def load_config(path: str | Path, overrides: list[str] | None = None) -> tuple[Config, dict[str, str]]:
    """Read a config file, its base and the overrides.

    Returns:
        The checked configuration, and for every key that was set the place it was set at (`file:line` or `-o`).

    Raises:
        UserError: for a file that is missing or not YAML, an unknown key, a wrong type or an impossible value.
    """
    path = find_config(path)
    tree, origins = _read(path)
    base = tree.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{origins['base']}: base must be one file name, not {base!r}.")
        below, below_origins = _read(_find_base(path, base))
        if "base" in below:
            raise UserError(f"{below_origins['base']}: a base file has no base of its own (one level only).")
        tree, origins = _merge(below, tree), {**below_origins, **origins}
    return override(tree, overrides or [], origins)


def _check_mapping(tree: object) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"The settings are a {type(tree).__name__}, not a mapping of sections to settings.")


def override(tree: dict, overrides: list[str], origins: dict[str, str] | None = None) -> tuple[Config, dict[str, str]]:
    """Lay `section.key=value` items on a mapping and check it, as `load_config` does with a file."""
    _check_mapping(tree)
    origins = dict(origins or {})
    for item in overrides:
        change = _override(item)
        tree = _merge(tree, change)
        origins |= {name: f"-o {item}" for name, _ in dotted(change)}
    return make_config(tree, origins), origins


def make_config(tree: dict, origins: dict[str, str] | None = None) -> Config:
    """Check a mapping against the schema; a key of another backbone than the model's may stand there as null.

    Raises:
        UserError: with the origin of the key or value that does not fit.
    """
    _check_mapping(tree)
    origins, model, schema = origins or {}, tree.get("model", {}), Config
    if isinstance(model, dict):
        name, where = model.get("name", Model().name), origins.get("model.name", "defaults")
        if not isinstance(name, str):
            raise UserError(f"{where}: model.name = {name!r} is not allowed: should be text.")
        try:
            schema = _with_backbone(name)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        own = type(schema.model_fields["model"].default).model_fields
        foreign = {key for key, value in model.items() if value is None and key not in own} & {*_backbone_arguments()}
        tree = tree | {"model": {key: value for key, value in model.items() if key not in foreign}}
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, schema, origins) from None
    try:
        _check_attention(config.model.attention or [])
    except UserError as error:
        raise UserError(f"{origins.get('model.attention', 'defaults')}: {error}") from None
    return config


def _check_attention(names: Names) -> None:
    from ppattn.attention import ATTENTIONS

    for part in [names] if isinstance(names, str) else names:
        for name in [part] if isinstance(part, str) else part:
            ATTENTIONS.get(name)


def to_yaml(config: Config, origins: dict[str, str] | None = None) -> str:
    """The resolved configuration as YAML; with `origins`, every line says where its value came from."""
    lines: list[str] = []

    def emit(tree: dict, prefix: str, indent: str) -> None:
        for key, value in tree.items():
            name = prefix + key
            if isinstance(value, dict) and value:
                lines.append(f"{indent}{key}:")
                emit(value, f"{name}.", indent + "  ")
                continue
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...")
            line = f"{indent}{key}: {text}"
            if origins is not None:
                line = f"{line:<60}  # {origins.get(name, 'default')}"
            lines.append(line)

    emit(config.model_dump(), "", "")
    return "\n".join(lines) + "\n"
