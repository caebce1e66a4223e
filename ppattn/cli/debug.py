"""Replay a training from its last checkpoint and find the first step, micro-batch and layer that is not finite."""

from argparse import Namespace
from pathlib import Path


def run(args: Namespace) -> None:
    from ppattn.engine.debug import debug

    print(debug(Path(args.run), args.steps))
