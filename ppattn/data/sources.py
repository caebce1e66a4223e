"""The data set that a config names, whatever its kind."""

from __future__ import annotations

import math

from ppattn.config import Config
from ppattn.data.cifar import CIFAR, cifar
from ppattn.data.digits import digits
from ppattn.data.folders import folders
from ppattn.data.lists import lists
from ppattn.data.shards import shards
from ppattn.data.splits import Splits
from ppattn.errors import UserError

KINDS = {  # data.name: a function of the config and the name
    "digits": lambda config, name: digits(),
    "cifar10": cifar,
    "cifar100": cifar,
    "folder": folders,
    "imagenet": folders,
    "list": lists,
    "shards": shards,
}


def build_datasets(config: Config) -> Splits:
    """The data set that `config.data` names, with `data.mean` and `data.std` in place of its own where given.

    Raises:
        UserError: where it is not there, damaged, or not laid out as its kind is; the message says what to put where.
    """
    data = config.data
    if data.name in ("digits", *CIFAR):
        for key in ("train", "val"):
            if getattr(data, key) is not None:
                raise UserError(
                    f"data.{key} = {getattr(data, key)!r}: {data.name} has two fixed splits; leave it at null."
                )
    splits = KINDS[data.name](config, data.name)
    for key in ("mean", "std"):
        given = getattr(data, key) or getattr(splits, key)
        if len(given) != 3 or not all(map(math.isfinite, given)) or (key == "std" and min(given) <= 0):
            raise UserError(f"data.{key} = {given} is not allowed: three numbers (red, green, blue; pixels in 0..1).")
        setattr(splits, key, given)
    return splits
