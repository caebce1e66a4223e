"""`python -m ppattn VERB ...`."""

from ppattn.cli import console

if __name__ == "__main__":
    console()
