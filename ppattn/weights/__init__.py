"""Weights: files, formats of other libraries, and strict assignment to a model."""

from ppattn.weights.assign import LoadReport, assign, built_size, constants, load, model_tensors
from ppattn.weights.files import find, read, save
from ppattn.weights.official import from_official, load_official
from ppattn.weights.sources import convert

__all__ = [
    "LoadReport",
    "assign",
    "built_size",
    "constants",
    "convert",
    "find",
    "from_official",
    "load",
    "load_official",
    "model_tensors",
    "read",
    "save",
]
