"""Sequences in the place of images: a backbone and data sets of one's own, known by `imports: [examples.lra]`."""

from examples.lra import backbone, data
from ppattn.zoo import add_model

add_model("sequence", "sequence", max_len=1024)
