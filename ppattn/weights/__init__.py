"""Weights: files, formats of other libraries, and strict assignment to a model."""

from ppattn.weights.assign import assign, from_official, load, load_official, stored_constants
from ppattn.weights.files import Metadata, SplitDigest, find, read, read_with_metadata, save
from ppattn.weights.foreign import convert, to_timm
