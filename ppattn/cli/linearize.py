"""Replace the attention of a trained model by a cheaper one, block by block, and measure what it costs.

The result in --output is an ordinary run folder; linearize/report.json in it has all figures. A stopped call continues
where it was when it is repeated.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from ppattn.cli import options
from ppattn.errors import UserError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME|RUN|FILE", help="the trained model, the teacher")
    parser.add_argument("--to", required=True, metavar="ATTENTION", help="the new one, see `ppattn list attentions`")
    parser.add_argument("--options", default="{}", metavar="JSON", help="of the new attention, e.g. '{\"alpha\": 4}'")
    parser.add_argument("--budget", type=float, metavar="POINTS", help="points of top-1 that may be lost")
    parser.add_argument("--blocks", default="all", metavar="K|all", help="how many blocks to replace (default: all)")
    parser.add_argument("--data", metavar="DIR", help="images or archive (default: those of the model's config)")
    parser.add_argument("-c", "--config", metavar="YAML", help="data and training instead of the model's own config")
    parser.add_argument("--epochs", type=int, default=3, metavar="E", help="of the training at the end (default: 3)")
    parser.add_argument("--align-epochs", type=int, default=1, metavar="E", help="of the alignment (default: 1)")
    parser.add_argument("--images", type=int, default=2000, help="held-out images for the choice (default: 2000)")
    parser.add_argument("--new-lr", type=float, default=1.0, help="learning rate factor of new parameters (default: 1)")
    parser.add_argument("--output", required=True, metavar="DIR", help="the run folder to write")
    options.add_override(parser, "optimizer.lr=0.001")


def run(args: Namespace) -> None:
    if args.blocks != "all" and not args.blocks.isdecimal():
        raise UserError(f"--blocks {args.blocks} is not allowed: a number of blocks, or all.")
    if args.budget is not None and args.blocks != "all":
        raise UserError("--budget and --blocks exclude each other.")
    try:
        given = json.loads(args.options)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UserError(f"--options {args.options} is not allowed: write a JSON object, such as '{{\"alpha\": 4}}'.")
    import ppattn

    ppattn.setup()
    from ppattn.linearize import Request, base_config, linearize

    same = ("model", "to", "budget", "epochs", "align_epochs", "images", "new_lr")
    blocks = None if args.blocks == "all" else int(args.blocks)
    request = Request(**{name: getattr(args, name) for name in same}, blocks=blocks, options=given)
    base = base_config(args.model, args.config, args.data, args.output, args.override)
    report = linearize(request, base, " ".join(sys.argv), lambda line: print(line, flush=True))
    print(summary(report))


def summary(report: dict) -> str:
    """The result as a table for people."""
    measured, count = report["measured"], len(report["blocks"])
    lines = [
        f"{len(report['chosen'])} of {count} blocks have {report['request']['to']} attention: "
        + ", ".join(str(i + 1) for i in report["chosen"]),
        f"top-1 on the held-out images: {100 * measured['teacher, every image']:.2f} % before, "
        f"{100 * measured['final']:.2f} % after",
    ]
    if report["teacher_saw_held_out_images"]:
        lines.append("The teacher may have been trained on the held-out images; the first figure is then too high.")
    lines.append(f"{'':8} {'size':>9} {'parameters':>12} {'GMACs':>8} {'images/s':>9} {'memory':>9}")
    for row in report["cost"]:
        lines.append(
            f"{row['name']:8} {row['img_size']:>9} {row['params']:>12,} {row['macs'] / 1e9:>8.3f} "
            f"{row['images_per_second']:>9.1f} {row['peak_mb']:>6.0f} MB"
        )
    return "\n".join(lines)
