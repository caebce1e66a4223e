"""The state dict inside a checkpoint: shards, moving averages, teacher and student, prefixes of wrapping modules."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ppattn.errors import UserError, reading_untrusted
from ppattn.files.pickles import from_bfloat16

logger = logging.getLogger("ppattn.weights")

BLOCK = re.compile(  # the first of a prefix, and the name of a parameter in a block of any library
    r"(?P<prefix>(?:[^./]+[./])*?)(?:(?:vit|deit|dinov2\w*|swin|pvt|pvt_v2)\.)?(?:encoder\.)?"
    r"(?:blocks|layers?|layers\.encoder_layer_|stages|block\d?|features)\.?\d+\."
)
CLASSIFIER = re.compile(r"(?:linear_head|head|classifier|fc)\.(?:fc\.)?(?:weight|bias)")
USUAL = {"model", "state_dict", "model_state", "model_state_dict", "module", "_orig_mod", "net", "backbone"}
NESTED = re.compile(r"(?:\w*(?:model|state_dict|module|ema|teacher|student)\w*/)*(?:(?:module|_orig_mod)\.)*")
RANKS = ("student", "ema|average|averaged", "teacher")  # from the last choice to the second; then what is neither
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")


def weight_shards(path: Path) -> list[Path]:
    """All files of a checkpoint that is kept in several, of which `path` is the index or one; else `path` alone."""
    if path.name.endswith(".index.json"):
        with reading_untrusted(path, "the index of a checkpoint in several files"):
            names = sorted({Path(str(name)).name for name in json.loads(path.read_bytes())["weight_map"].values()})
    elif found := SHARD.fullmatch(path.name):
        begin, _, count, end = found.groups()
        names = [f"{begin}-{number:05}-of-{count}{end}" for number in range(1, min(int(count), 9999) + 1)]
    else:
        return [path]
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise UserError(f"{path} belongs to a checkpoint of {len(names)} files, and {missing[0]} is not beside it.")
    return [path.with_name(name) for name in names]


def flat_arrays(tree: object, path: Path) -> dict[str, np.ndarray]:
    """The arrays of nested dictionaries, by their keys with slashes between them; each dictionary counts once."""
    if not isinstance(tree, Mapping):
        raise UserError(f"{path} holds a {type(tree).__name__}, not a state dict.")
    seen: set[int] = set()

    def walk(tree: Mapping, above: str) -> Iterator[tuple[str, np.ndarray]]:
        seen.add(id(tree))
        for name, value in tree.items():
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
                value = value[1]  # paddle.save keeps (name, array)
            if isinstance(value, np.ndarray) and value.dtype == np.uint16:
                value = from_bfloat16(value.tobytes()).reshape(value.shape)  # bfloat16, from Paddle too
            if isinstance(value, np.ndarray):
                yield f"{above}{name}", value
            elif isinstance(value, Mapping) and id(value) not in seen:
                yield from walk(value, f"{above}{name}/")

    return dict(walk(tree, ""))


def select_model(arrays: dict[str, np.ndarray], path: Path, part: str | None = None) -> dict[str, np.ndarray]:
    """One model of a checkpoint, see `flat_arrays`, without the prefix of its names.

    `part` is a component of the prefix, such as `teacher`; default: the trained weights, else the teacher's, else their
    moving average. Other contents are logged. Raises `UserError` for no arrays, and where `part` has to choose.
    """
    arrays = {name: array for name, array in arrays.items() if array.size}
    if not arrays:
        raise UserError(f"{path} holds no arrays.")
    names = [name for name in arrays if not re.search(r"optim|sched|scaler", name.rpartition("/")[0])]
    found = {match["prefix"] for name in names if (match := BLOCK.match(name))}
    found = found or {match[0] for name in names if (match := NESTED.match(name)) and match[0]} or {""}
    words = {prefix: re.split(r"[./]", prefix)[:-1] for prefix in found}

    def rank(prefix: str) -> int:
        marks = (i for i, mark in enumerate(RANKS) for word in words[prefix] if re.search(rf"(?i)(^|_)({mark})", word))
        return min(marks, default=len(RANKS))

    last = max(map(rank, found))
    best = [one for one in found if ({*part.split(".")} <= {*words[one]} if part else rank(one) == last)]
    best = best if len(best) == 1 else [prefix for prefix in best if USUAL.issuperset(words[prefix])] or best
    if len(best) != 1:
        known = sorted({".".join(word for word in one if word not in USUAL) for one in words.values()} - {""})
        choice = f"{', '.join(known)}: choose one with --part NAME" if known else "one model: leave out --part"
        raise UserError(f"{path} holds {choice}.")
    prefix, others = best[0], tuple(found - {best[0], ""})
    inner, above = tuple(one for one in others if one.startswith(prefix)), prefix[: prefix.rfind("/") + 1]
    chosen = {name.removeprefix(prefix): arrays[name] for name in names if name.startswith(prefix)}
    chosen = {name: array for name, array in chosen.items() if not f"{prefix}{name}".startswith(inner)}
    rest = {name.removeprefix(above): arrays[name] for name in names if not name.startswith((prefix, *others))}
    heads = {name: array for name, array in rest.items() if CLASSIFIER.fullmatch(name)}
    if others:
        text = "%s: %r is read; the file holds %s, too"
        shown = [one.replace("/", ".").rstrip(".") for one in (prefix, *sorted(others))]
        logger.warning(text, path, shown[0] or "the model", ", ".join(shown[1:]))
    if left := sorted(rest.keys() - heads):
        logger.warning("%s: left out is what is no part of the model, such as %s", path, ", ".join(left[:3]))
    return heads | chosen
