"""Compare runs in one HTML file: results, differences of the configs, curves, classes, predictions, environment."""

from argparse import Namespace
from pathlib import Path

from ppattn.cli import options


def run(args: Namespace) -> None:
    from ppattn.engine.report import write_report

    options.check_output(args.output, args.runs, ".html")
    write_report(args.runs, Path(args.output), args.language)
    print(f"written to {args.output}")
