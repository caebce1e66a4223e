"""YAML as settings need it: mappings of names, lists, text, finite numbers, true, false and null, nothing else."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

import yaml

from ppattn.errors import UserError

LONGEST = 1_000_000  # characters of a text
DEEPEST = 50  # levels
LARGEST = 100_000  # values, with those that an alias repeats


class _Refused(yaml.constructor.ConstructorError):
    def __init__(self, problem: str, node: yaml.Node):
        super().__init__(None, None, problem, node.start_mark)


class _Loader(yaml.SafeLoader):
    """`3e-4` is a number; a repeated key is an error, and so is a date, which no setting takes."""

    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "seq", "map")
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Refused("a key is one word", key)
            if key.value in seen:
                raise _Refused(f"key {key.value[:100]!r} stands twice", key)
            seen.add(key.value)
        found = super().construct_mapping(node, deep)
        for key in found:
            if not isinstance(key, str):
                raise _Refused(f"key {key!r} is not a name", node)
        return found

    def text(self, node: yaml.ScalarNode) -> str:
        value = str(self.construct_scalar(node))
        if any(unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t" for sign in value):
            raise _Refused("text with control characters", node)
        return value

    def whole(self, node: yaml.ScalarNode) -> int:
        if len(str(node.value)) > 100:
            raise _Refused(f"a whole number of {len(node.value)} digits", node)
        value = int(self.construct_yaml_int(node))
        if re.match("[-+]?0[0-9_]", node.value) or ":" in node.value:
            raise _Refused(f"{node.value} reads as {value}, to base 8 or 60; write the number itself", node)
        return value

    def number(self, node: yaml.ScalarNode) -> float:
        if ":" in node.value:
            raise _Refused(f"{node.value[:100]} reads as a number to base 60; write the number itself", node)
        value = float(self.construct_yaml_float(node))
        if not math.isfinite(value):
            raise _Refused(f"{node.value[:100]} is not a finite number", node)
        return value

    def date(self, node: yaml.ScalarNode) -> None:
        raise _Refused(f"{node.value[:100]} reads as a date; put it in quotes if it is text", node)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.text)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.date)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)


def parse(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """The value that a text stands for, and the tree that says on which line everything is.

    Args:
        text: one YAML document.
        name: what to call it in a message.

    Raises:
        UserError: for a text that is not YAML, or holds more than the module says.
    """
    if len(text) > LONGEST:
        raise UserError(f"{name} is not valid YAML for settings: it has {len(text):,} characters.")
    try:
        _check_depth(text, name)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _count(node, name, [])
            return loader.construct_document(node), node
        finally:
            loader.dispose()
    except UserError:
        raise
    except Exception as error:  # PyYAML lets through whatever its constructors meet
        reason = " ".join(str(error).split()).replace('in "<unicode string>", line', "in line")[:300].rstrip(".")
        raise UserError(f"{name} is not valid YAML: {reason}.") from None


def _check_depth(text: str, name: str) -> None:
    """Count levels without building anything: the steps after this one call themselves for every level."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise UserError(f"{name} is not valid YAML for settings: it nests deeper than {DEEPEST} levels.")


def _count(node: yaml.Node, name: str, above: list[yaml.Node], count: int = 0) -> int:
    """Values below a node, every alias followed; refuses a tree that contains itself or grows too large."""
    if any(node is one for one in above) or len(above) > DEEPEST:
        raise UserError(f"{name} is not valid YAML for settings: an anchor contains itself, or nests too deep.")
    count += 1
    if count > LARGEST:
        raise UserError(f"{name} is not valid YAML for settings: it holds more than {LARGEST:,} values.")
    if isinstance(node, yaml.CollectionNode):
        for item in node.value:
            for part in item if isinstance(item, tuple) else (item,):
                count = _count(part, name, [*above, node], count)
    return count
