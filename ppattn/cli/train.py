"""Train a model from a YAML file; leaves a run folder behind."""

import shlex
import sys
from argparse import Namespace


def run(args: Namespace) -> None:
    from ppattn.config import load_config, to_yaml

    config, origins = load_config(args.config, args.override)  # reports a wrong path before the engine is imported
    if args.print_config:
        print(to_yaml(config, origins), end="")
        return
    import ppattn

    ppattn.train(config, args.resume, shlex.join(sys.argv), extend=args.extend)
