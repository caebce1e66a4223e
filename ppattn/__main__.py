"""`python -m ppattn VERB ...`."""

import os
import sys

# -m puts the current folder first: a random.py there would run instead of Python's own.
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False) or __file__.startswith(sys.path[0] + os.sep)):
    del sys.path[0]

from ppattn.cli import console

if __name__ == "__main__":
    console()
