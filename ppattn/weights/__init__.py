"""Weights: files, formats of other libraries, and strict assignment to a model."""

from ppattn.weights.assign import assign, constants, from_official, load, load_official
from ppattn.weights.files import Metadata, SplitDigest, find, read, read_typed, save
from ppattn.weights.foreign import convert, to_timm
