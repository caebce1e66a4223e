"""Evaluate a run, a weights file or an exported model on its validation images."""

import sys
from argparse import Namespace
from pathlib import Path

from ppattn.cli import options
from ppattn.errors import UserError, reading_untrusted

PIXELS = ("crop_ratio", "crop_keep_aspect", "interpolation", "mean", "std")  # data settings that an export holds


def run(args: Namespace) -> None:
    if args.checkpoint and not args.run:
        raise UserError("--checkpoint is for --run DIR.")
    if options.is_name(args.model):
        args.run, args.model = args.model, None
    from ppattn.runtime.startup import setup

    setup(args.device)
    from ppattn.engine.evaluate import describe_accuracies, evaluate_split, mirrored_runner, write_evaluation
    from ppattn.files.atomic import check_links

    runner, config, classes, preprocess, provenance, folder = _exported(args) if args.model else _trained(args)
    runner = mirrored_runner(runner) if args.mirror else runner
    folder = Path(args.output) if args.output else folder / ("eval_mirror" if args.mirror else "eval")
    if not args.output:
        check_links(folder.parent, [folder, *folder.glob("*")])
    options.check_writable(folder)
    result, splits = evaluate_split(runner, config, classes, preprocess, provenance)
    if args.mirror:
        result.metrics["mirror"] = True
    write_evaluation(folder, result, splits.val, splits.classes, preprocess, args.model or args.run or args.weights)
    metrics, mirror = result.metrics, " and their mirror images" if args.mirror else ""
    what = f"{metrics['images']:,} {splits.val.input_kind}{mirror}, {metrics['images_per_second']:.0f} img/s"
    scores = f"{describe_accuracies(metrics, len(splits.classes))}, loss {metrics['loss']:.4f}"
    print(f"{scores} on {what}; written to {folder}")
    if seen := metrics.get("trained_on"):
        advice = "data.holdout and data.holdout_seed must be those of its training"
        images = f"trained on {seen:,} of these {metrics['images']:,} images; its accuracy on others is lower"
        print(f"warning: the model was {images}. {advice}.", file=sys.stderr)
    if "unreadable" in metrics:
        print(f"{metrics['unreadable']} images cannot be read and count as wrong", file=sys.stderr)


def _trained(args: Namespace) -> tuple:
    """Of a run or a weights file: runner, config, classes, preprocessing, provenance, and where the results go."""
    from ppattn.engine.evaluate import model_runner

    (config, model, classes, preprocess), provenance = options.load_trained(args)
    if args.mirror:
        model.check_images()
    folder = Path(config.output)
    own = folder.resolve() in Path(args.weights or "").resolve().parents
    if args.run and not options.is_name(args.run):  # the run folder, or a checkpoint in it
        path = Path(args.run)
        folder = next(place for place in (path, *path.parents) if place.is_dir() and place.name != "checkpoints")
    elif not (own or args.run or args.output) and (folder / "checkpoints").exists():
        raise UserError(f"{folder}, the output of {args.config}, holds another run: name an --output.")
    return model_runner(model), config, classes, preprocess, provenance, folder


def _exported(args: Namespace) -> tuple:
    """The same of an exported folder."""
    from ppattn.config import load_config, override_config
    from ppattn.deploy.predictor import exported_runner
    from ppattn.trained import exported_provenance

    predictor = options.open_export(args.model)
    if predictor.output == "features":
        raise UserError(f"{args.model} was exported with features; to evaluate it, export it without --features.")
    if args.config:
        config = load_config(args.config, args.override)[0]
    elif "config" in predictor.source:
        with reading_untrusted(args.model, "what export wrote"):  # the exported program needs no model, nor its modules
            tree = {k: value for k, value in predictor.source["config"].items() if k not in ("model", "imports")}
        config = override_config(tree | {"model": {"in_chans": predictor.preprocess.in_chans}}, args.override)
    else:
        raise UserError(f"{args.model} does not say what data it was trained on: give its config with -c YAML.")
    size, fixed = getattr(config.model, "img_size", None), predictor.preprocess.to_dict()
    asked = {f"data.{key}": getattr(config.data, key) for key in PIXELS}
    asked["model.img_size"] = [size, size] if isinstance(size, int) else size
    for key, value in asked.items():
        if value not in (None, own := fixed[key.partition(".")[2]]):
            print(f"{key} = {value} has no effect: {args.model} has {own}", file=sys.stderr)
    provenance = exported_provenance(predictor.source, args.model)
    return exported_runner(predictor), config, predictor.classes, predictor.preprocess, provenance, Path(args.model)
