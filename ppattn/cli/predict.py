"""Predict images, folders and glob patterns with an exported model or a run."""

import json
import sys
from argparse import Namespace
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ppattn.cli import options
from ppattn.errors import UserError
from ppattn.text import csv_cell, printable

Answer = Any  # [(name, score), ...], best first, or features [C]
BATCH = 32


def run(args: Namespace) -> None:
    import numpy as np
    from tqdm import tqdm

    from ppattn.data import ImageError
    from ppattn.data.images import is_one_colour

    if args.engine and (args.run or options.is_name(args.model)):
        raise UserError("--engine is for exported folders: --model EXPORTED.")
    if args.threshold is not None and not 0 <= args.threshold <= 1:
        raise UserError(f"--threshold {args.threshold:g} is not allowed: it is a probability.")
    files, unreadable = options.image_files(args.images)
    if args.csv:
        options.check_output(args.csv, [args.model, args.run, *files], ".csv")
    import ppattn

    ppattn.setup(args.device)
    predict, preprocess, classes = _model(args)
    from ppattn.deploy.predictor import top_predictions

    rows, flat = list[tuple[str, Answer]](), list[str]()
    for start in tqdm(range(0, len(files), BATCH), unit="batch", leave=False, disable=None):  # on a terminal only
        read, images = [], []
        for file in files[start : start + BATCH]:
            try:
                image = preprocess.read(file)
            except ImageError as error:
                unreadable.append(str(error))
                continue
            read.append(file)
            images.append(preprocess(image))
            flat += [file] * is_one_colour(image)
        if images:
            answers = predict(np.stack(images))
            found = zip(read, top_predictions(answers, classes, args.topk) if classes else answers, strict=True)
            for file, answer in found:
                if args.threshold and classes and answer[0][1] < args.threshold:
                    answer = [("unknown", answer[0][1])]
                with suppress(BrokenPipeError) if args.csv else nullcontext():  # `| head`: the file is still wanted
                    tqdm.write(_line(file, answer, args.json))  # a print that leaves the progress bar alone
                rows.append((file, answer))
    if args.csv:
        _write_csv(args.csv, rows)
    if flat:
        print(f"warning: {len(flat)} images are nearly of one colour, {flat[0]} the first", file=sys.stderr)
    if unreadable:
        shown = " ".join(unreadable[:5]) + (f" And {len(unreadable) - 5} more." if len(unreadable) > 5 else "")
        raise UserError(f"{len(unreadable)} of {len(rows) + len(unreadable)} images could not be read: {shown}")


def _model(args: Namespace) -> tuple[Any, Any, list[str]]:
    """(function from images [B, C, H, W] to probabilities or features, Preprocess, class names, none for features)."""
    if args.model and not options.is_name(args.model):
        predictor = options.open_export(args.model, args.engine)
        if args.features and predictor.output != "features":
            raise UserError(f"{args.model} was exported with classes; export it with --features, or use --run.")
        return predictor.run, predictor.preprocess, predictor.classes
    from paddle import nn

    from ppattn.engine.evaluate import model_runner
    from ppattn.trained import load_run

    config, model, classes, preprocess = load_run(args.run or args.model)
    model.check_images()
    if args.features:
        model.reset_classifier(0)
        classes = []
    last = nn.Sigmoid() if config.loss.name == "bce" else nn.Softmax()
    return model_runner(nn.Sequential(model, last) if classes else model), preprocess, classes


def _line(file: str, answer: Answer, as_json: bool) -> str:
    """A line about one image: its classes with scores, best first, or its features."""
    if not isinstance(answer, list):
        return json.dumps({"image": file, "features": answer.astype("float64").round(6).tolist()}, ensure_ascii=False)
    if as_json:
        named = [{"name": name, "score": round(score, 6)} for name, score in answer]
        return json.dumps({"image": file, "predictions": named}, ensure_ascii=False)
    return f"{printable(file):<30}  " + "  ".join(f"{name} {score:.3f}" for name, score in answer)


def _write_csv(path: str, rows: list[tuple[str, Answer]]) -> None:
    """Image, rank, name, score; or image and one column per feature."""
    from ppattn.files.atomic import write_rows

    if rows and not isinstance(rows[0][1], list):
        lines: list[list] = [["image", *(f"feature_{i}" for i in range(len(rows[0][1])))]]
        lines += [[csv_cell(file), *(f"{value:.6g}" for value in answer)] for file, answer in rows]
    else:
        lines = [["image", "rank", "name", "score"]]
        for file, answer in rows:
            lines += [[csv_cell(file), i, csv_cell(name), f"{score:.6f}"] for i, (name, score) in enumerate(answer, 1)]
    write_rows(Path(path), lines, "\n")
