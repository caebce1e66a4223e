"""`predict`: names and scores for image files and folders."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from ppattn.cli import options
from ppattn.cli.streams import Lasting

if TYPE_CHECKING:
    import numpy as np

    from ppattn.data import Preprocess

HELP = "Predict images, folders and glob patterns with an exported model or a run."
BATCH = 32


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="exported folder")
    parser.add_argument("--run", metavar="DIR", help="run folder; its best checkpoint predicts")
    parser.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, folders (searched), or patterns")
    parser.add_argument("--topk", type=options.whole, default=5, help="names per image (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--csv", metavar="FILE", help="write image, rank, name, score to a file as well")


def run(args: Namespace) -> None:
    import numpy as np
    from tqdm import tqdm

    from ppattn.data import ImageError, read_image
    from ppattn.errors import UserError

    if bool(args.model) == bool(args.run):
        raise UserError("Say what to predict with: --model EXPORTED or --run DIR.")
    if args.topk < 1:
        raise UserError(f"--topk = {args.topk} is not allowed; it is 1 or more.")
    files, unreadable = _files(args.images)
    if args.csv:
        options.check_output(args.csv, files)
        sys.stdout = Lasting(sys.stdout)  # the file is wanted whoever reads the lines
    import ppattn

    ppattn.setup()
    predict, preprocess, classes = _model(args)
    from ppattn.deploy.predictor import best

    rows: list[tuple[str, list[tuple[str, float]]]] = []
    progress = tqdm(total=len(files), unit="img", leave=False, disable=None)  # on a terminal only
    for start in range(0, len(files), BATCH):
        names, pictures = [], []
        for file in files[start : start + BATCH]:
            try:
                pictures.append(preprocess(read_image(file)))
                names.append(file)
            except ImageError as error:
                unreadable.append(str(error))
        if pictures:
            found = best(predict(np.stack(pictures)), classes, args.topk)
            for name, scores in zip(names, found, strict=True):
                rows.append((name, scores))
                _tell(name, scores, args.json, max(map(len, files)))
        progress.update(len(files[start : start + BATCH]))
    progress.close()
    if args.csv:
        _write_csv(args.csv, rows)
    if unreadable:
        shown = " ".join(unreadable[:5]) + (f" And {len(unreadable) - 5} more." if len(unreadable) > 5 else "")
        raise UserError(f"{len(unreadable)} of {len(rows) + len(unreadable)} images could not be read: {shown}")


def _model(args: Namespace) -> tuple[Callable[[np.ndarray], np.ndarray], Preprocess, list[str]]:
    """(function from images [B, C, H, W] to probabilities, Preprocess, class names)."""
    if args.model:
        from ppattn import Predictor

        predictor = Predictor(args.model)
        return predictor.run, predictor.preprocess, predictor.classes
    import paddle

    from ppattn.engine.checkpoint import load_run

    _, model, classes, preprocess = load_run(args.run)

    def predict(images: np.ndarray) -> np.ndarray:
        with paddle.no_grad():
            return paddle.nn.functional.softmax(model(paddle.to_tensor(images))).numpy()

    return predict, preprocess, classes


def _files(given: list[str]) -> tuple[list[str], list[str]]:
    """Image files named by paths, folders and patterns, in order; and sentences about what is not there."""
    import glob
    from pathlib import Path

    from ppattn.data.images import SUFFIXES
    from ppattn.errors import UserError

    files, missing = [], []
    for item in given:
        path = Path(item)
        if path.is_dir():
            found = [str(p) for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES and p.is_file()]
            if not found:
                missing.append(f"{item} holds no images ({', '.join(SUFFIXES)}).")
            files += found
        elif path.exists():
            files.append(item)
        else:
            found = sorted(glob.glob(item, recursive=True))
            if not found:
                missing.append(f"{item} does not exist.")
            files += [f for f in found if Path(f).is_file()]
    if not files:
        raise UserError(" ".join(missing))
    return files, missing


def _tell(name: str, scores: list[tuple[str, float]], as_json: bool, width: int) -> None:
    import json

    from tqdm import tqdm

    from ppattn.text import printable

    if as_json:
        found = [{"name": label, "score": round(score, 6)} for label, score in scores]
        unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
        line = json.dumps({"image": name, "predictions": found}, ensure_ascii=not unicode)
    else:
        line = f"{printable(name):<{min(width, 60)}}  "
        line += "  ".join(f"{printable(label)} {score:.3f}" for label, score in scores)
    tqdm.write(line)  # a print that leaves the progress bar alone


def _write_csv(path: str, rows: list[tuple[str, list[tuple[str, float]]]]) -> None:
    import csv

    from ppattn.errors import UserError
    from ppattn.text import cell

    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["image", "rank", "name", "score"])
            for image, scores in rows:
                writer.writerows(
                    [cell(image), rank, cell(name), f"{score:.6f}"] for rank, (name, score) in enumerate(scores, 1)
                )
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None
