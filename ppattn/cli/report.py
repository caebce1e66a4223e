"""Compare runs in one HTML file: results, differences of the configs, curves, classes, predictions, environment."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ppattn.cli import options


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", required=True, metavar="FILE.html", help="the file to write")
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of headings (default: en)")


def run(args: Namespace) -> None:
    from ppattn.engine.report import write_report

    options.check_output(args.output, args.runs, ".html")
    write_report(args.runs, Path(args.output), args.language)
    print(f"written to {args.output}")
