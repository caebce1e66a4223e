"""Replace the attention of a trained model by a cheaper one, block by block, and measure what it costs.

The result in --output is a run folder; linearize/report.json in it has all figures. A repeated call continues.
"""

import sys
from argparse import Namespace

from ppattn.errors import UserError


def run(args: Namespace) -> None:
    if args.blocks != "all" and not args.blocks.isdecimal():
        raise UserError(f"--blocks {args.blocks} is not allowed: a number of blocks, or all.")
    import ppattn
    from ppattn.config import parse_yaml

    given, _ = parse_yaml(args.options, "--options")  # JSON is YAML
    if not isinstance(given, dict):
        raise UserError(f"--options {args.options} is not allowed: write a JSON object, such as '{{\"alpha\": 4}}'.")
    ppattn.setup()
    from ppattn.linearize import Request, base_config, linearize

    same = ("model", "budget", "speed", "size", "metric", "epochs", "align_epochs", "images", "new_lr")
    blocks = None if args.blocks == "all" else int(args.blocks)
    names = [name.strip() for name in args.to.split(",")]
    request = Request(**{name: getattr(args, name) for name in same}, to=names, blocks=blocks, options=given)
    base = base_config(args.model, args.config, args.data, args.output, args.override)
    print(summary(linearize(request, base, " ".join(sys.argv), lambda line: print(line, flush=True))))


def summary(report: dict) -> str:
    """The result as a table for people."""
    measured, count, chosen = report["measured"], len(report["blocks"]), report["chosen"]
    lines = []
    for name in report["request"]["to"]:
        blocks = [str(int(i) + 1) for i, attention in chosen.items() if attention == name]
        lines.append(f"{len(blocks)} of {count} blocks have {name} attention: {', '.join(blocks) or 'none'}")
    before, after = measured["teacher, every image"], measured["final"]
    if report["metric"] == "features":
        lines.append(f"cosine of the features to the teacher's on the held-out images: {after:.4f}")
    else:
        lines.append(f"top-1 on the held-out images: {100 * before:.2f} % before, {100 * after:.2f} % after")
    neighbours = [measured.get(f"20 nearest neighbours, {key}") for key in ("teacher", "result")]
    if None not in neighbours:
        lines.append("20 nearest neighbours: {:.2f} % before, {:.2f} % after".format(*(100 * n for n in neighbours)))
    if report["teacher_saw_held_out_images"] and report["metric"] == "top1":
        lines.append("The teacher may have been trained on the held-out images; the first figure is then too high.")
    form = "{:8} {:>9} {:>12} {:>8} {:>9} {:>9}".format
    lines.append(form("", "size", "parameters", "GMACs", "images/s", "memory"))
    for row in report["cost"]:
        figures = f"{row['params']:,}", f"{row['macs'] / 1e9:.3f}", f"{row['images_per_second']:.1f}"
        lines.append(form(row["name"], row["img_size"], *figures, f"{row['peak_mb']:.0f} MB"))
    return "\n".join(lines)
