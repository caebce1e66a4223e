"""Train a model from a YAML file; leaves a run folder behind."""

import shlex
import sys
from argparse import ArgumentParser, Namespace

from ppattn.cli import options


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-c", "--config", required=True, metavar="YAML", help="configuration file")
    options.add_override(parser, "train.epochs=3")
    text = "resume from a checkpoint; auto: from the run folder, or start fresh"
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", metavar="auto|DIR|FILE", help=text)
    text = "a new run from the weights, average and optimizer state of another, under any schedule"
    start.add_argument("--extend", metavar="DIR|FILE", help=text)
    parser.add_argument("--print-config", action="store_true", help="print every setting and its origin, then exit")


def run(args: Namespace) -> None:
    from ppattn.config import load_config, to_yaml

    config, origins = load_config(args.config, args.override)  # reports a wrong path before the engine is imported
    if args.print_config:
        print(to_yaml(config, origins), end="")
        return
    import ppattn

    ppattn.train(config, args.resume, shlex.join(sys.argv), extend=args.extend)
