"""Replay a training from its last checkpoint and find the first step, micro-batch and layer that is not finite."""

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--run", required=True, metavar="DIR", help="run folder; the micro-batch is written into it")
    parser.add_argument("--steps", type=int, metavar="N", help="replay at most N steps (default: to the end)")


def run(args: Namespace) -> None:
    from ppattn.engine.debug import debug

    print(debug(Path(args.run), args.steps))
