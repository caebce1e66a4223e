"""Weights: files, formats of other libraries, and strict assignment to a model."""

from ppattn.weights.assign import assign, constants, load
from ppattn.weights.files import find, read, save
from ppattn.weights.official import from_official, load_official
from ppattn.weights.sources import convert
