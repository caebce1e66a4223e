"""Pictures and numbers about the attention of trained models."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from ppattn.cli import options
from ppattn.errors import UserError, unknown_name
from ppattn.text import aligned_table, printable

# Images by default.
ANALYSES = {"maps": 6, "rollout": 6, "gradcam": 6, "injectivity": 20, "newton": 20}
ANALYSES |= {"locality": 50, "entropy": 50, "saturation": 50, "mask": 500, "embed": 500}


def run(args: Namespace) -> None:
    if args.analysis not in ANALYSES:
        raise unknown_name("analysis", args.analysis, ANALYSES)
    import ppattn

    ppattn.setup(args.device, seed=0)
    from ppattn.analysis import verbs
    from ppattn.data import build_datasets
    from ppattn.engine.evaluate import match_classes
    from ppattn.files.atomic import check_links, write_json
    from ppattn.plots.figure import run_names
    from ppattn.trained import load_run

    number = args.images[0] if len(args.images or []) == 1 and args.images[0].lstrip("-").isdecimal() else None
    own = _own_images(args.analysis, args.images) if args.images and number is None else None
    subjects = []
    for name, folder in zip(run_names(args.run), args.run, strict=True):
        config, model, classes, preprocess = load_run(folder, overrides=args.override)
        model.check_images()
        if own:
            own.val.reading = {"max_value": preprocess.max_value, "channels": preprocess.planes}
            subjects.append(verbs.Subject(name, model, preprocess, own, len(own.val)))
            subjects[-1].outputs = classes
            continue
        try:
            splits = build_datasets(config)
        except UserError as error:
            raise UserError(f"{error} Or name pictures of your own: --images PICTURE|FOLDER ...") from None
        if model.num_classes and splits.classes:
            match_classes(splits, classes)
        count = min(ANALYSES[args.analysis], len(splits.val)) if number is None else int(number)
        subjects.append(verbs.Subject(name, model, preprocess, splits, count))
    first = Path(args.run[0])
    folder = Path(args.output) if args.output else (first if first.is_dir() else Path()) / "analysis"
    options.check_writable(folder)
    if not args.output:
        check_links(folder.parent, [folder, *folder.glob("*")])
    path = folder / f"{args.analysis}.json"
    method = {"method": args.method} if args.analysis == "embed" else {}
    report = getattr(verbs, args.analysis)(subjects, path.with_suffix(".png"), **method)
    write_json(path, {"analysis": args.analysis, "images": len(subjects[0].images), "runs": report})
    for name, rows in report.items():
        print(name)
        print(_table(rows))
    print(f"written to {path} and {path.with_suffix('.png')}")


def _own_images(analysis: str, given: list[str]) -> Any:
    """Pictures of the user as a data set in which each is a class of its own, called as its file."""
    import numpy as np

    from ppattn.data import Splits
    from ppattn.data.splits import FileSplit

    if analysis in ("mask", "embed"):
        raise UserError(f"{analysis} needs images with labels, those of the data set: --images takes a number here.")
    files, missing = options.image_files(given)
    if missing:
        raise UserError(" ".join(missing))
    split = FileSplit(Path(), files, np.arange(len(files)))
    return Splits(split, split, [printable(Path(file).stem) for file in files])


def _table(rows: list[dict]) -> str:
    """Rows with headings; lists stay in the JSON file."""

    def cell(head: str, value: Any) -> str:
        if head.endswith("top1"):
            return f"{100 * value:.2f} %"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    heads = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    cells = [[cell(head, row.get(head, "")) for head in heads] for row in rows]
    return "\n".join(f"  {line}" for line in aligned_table([heads, *cells]))
