"""`python -m ppattn VERB ...`."""

import sys

# -m puts the current folder first: a random.py there would run instead of Python's own.
if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False) and not __file__.startswith(sys.path[0]):
    del sys.path[0]

from ppattn.cli import console

if __name__ == "__main__":
    console()
