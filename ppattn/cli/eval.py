"""Evaluate a run, a weights file or an exported model on its validation images."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ppattn.cli import options
from ppattn.errors import UserError

PIXELS = ("crop_ratio", "crop_keep_aspect", "interpolation", "mean", "std")  # data settings that an export holds


def add_arguments(parser: ArgumentParser) -> None:
    options.add_trained(parser)
    options.add_device(parser)
    parser.add_argument("--model", metavar="DIR", help="exported folder, or name of a model with weights")
    parser.add_argument("--mirror", action="store_true", help="average the logits of each image and its mirror image")
    parser.add_argument("--output", metavar="DIR", help="default: eval/ or eval_mirror/ in the run or exported folder")


def run(args: Namespace) -> None:
    if sum(map(bool, (args.run, args.weights, args.model))) != 1:
        raise UserError("Say what to evaluate: --run DIR, or -c YAML --weights FILE, or --model EXPORTED.")
    if args.checkpoint and not args.run:
        raise UserError("--checkpoint is for --run DIR.")
    if args.weights and not args.config:
        raise UserError("--weights needs the config of its model: -c YAML.")
    if options.is_name(args.model):
        args.run, args.model = args.model, None
    from ppattn.config import load_config, override
    from ppattn.runtime.startup import setup

    setup(args.device)
    from ppattn.deploy.predictor import exported_runner
    from ppattn.engine.evaluate import evaluate_split, mirrored, model_runner, write_evaluation

    if args.model:
        predictor = options.open_export(args.model)
        if predictor.output == "features":
            raise UserError(f"{args.model} was exported with features; to evaluate it, export it without --features.")
        classes, preprocess, runner = predictor.classes, predictor.preprocess, exported_runner(predictor)
        if args.config:
            config = load_config(args.config, args.override)[0]
        elif "config" in predictor.source:
            settings = predictor.source["config"].items()  # the exported program needs no model, nor its modules
            known = {key: value for key, value in settings if key not in ("model", "imports")}
            config = override(known, args.override)
        else:
            raise UserError(f"{args.model} does not say what data it was trained on: give its config with -c YAML.")
        fixed = predictor.preprocess.to_dict()
        size = getattr(config.model, "img_size", None)
        asked = {f"data.{key}": getattr(config.data, key) for key in PIXELS}
        asked["model.img_size"] = [size, size] if isinstance(size, int) else size
        for key, value in asked.items():
            if value not in (None, own := fixed[key.partition(".")[2]]):
                print(f"{key} = {value} has no effect: {args.model} has {own}", file=sys.stderr)
        place, provenance = Path(args.model), predictor.source.get("origin", {})
    else:
        config, model, classes, preprocess = options.load_trained(args)
        if args.mirror:
            model.check_images()
        named = not args.run or options.is_name(args.run)  # there is no run folder
        provenance = model.provenance
        runner, place = model_runner(model), Path(config.output if named else args.run)
        place = next((p.parent for p in (place, place.parent) if p.name == "checkpoints"), place)  # the run folder
        place = place if named or place.is_dir() else place.parent
    runner = mirrored(runner) if args.mirror else runner
    result, splits = evaluate_split(runner, config, classes, preprocess, provenance)
    if args.mirror:
        result.metrics["mirror"] = True
    folder = Path(args.output) if args.output else place / ("eval_mirror" if args.mirror else "eval")
    given = args.model or args.run or args.weights
    write_evaluation(folder, result, splits.val, splits.classes, preprocess, title=given)
    metrics = result.metrics
    top5 = f", top-5 {100 * metrics['top5']:.2f} %" if len(splits.classes) > 5 else ""
    majority = f" (majority class {100 * metrics['majority']:.2f} %)" if "majority" in metrics else ""
    mirror = " and their mirror images" if args.mirror else ""
    print(
        f"top-1 {100 * metrics['top1']:.2f} %{majority}{top5}, loss {metrics['loss']:.4f} on {metrics['images']:,} "
        f"{splits.val.input_kind}{mirror}, {metrics['images_per_second']:.0f} img/s; written to {folder}"
    )
    if "trained_on" in metrics:
        print(
            f"warning: the model was trained on {metrics['trained_on']:,} of these {metrics['images']:,} images; its "
            "accuracy on others is lower. data.holdout and data.holdout_seed must be those of its training.",
            file=sys.stderr,
        )
    if "unreadable" in metrics:
        print(f"{metrics['unreadable']} images cannot be read and count as wrong", file=sys.stderr)
