"""`export`: a run or weights as an inference folder, checked before it is announced."""

from __future__ import annotations

HELP = "Export a trained model for inference (Paddle or ONNX); it is checked against the trained model first."


def add_arguments(parser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run folder")
    parser.add_argument("--checkpoint", default="best", metavar="NAME", help="with --run: best (default) or latest")
    parser.add_argument("-c", "--config", metavar="YAML", help="with --weights: the model")
    parser.add_argument("--weights", metavar="FILE", help="weights for the model of -c")
    parser.add_argument("-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--format", default="paddle", choices=("paddle", "onnx"), metavar="paddle|onnx")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), metavar="fp32|bf16")
    parser.add_argument("--dynamic-size", action="store_true", help="take images of any size, not only any batch")


def run(args) -> None:
    from ppattn.errors import UserError

    if bool(args.run) == bool(args.weights) or (args.weights and not args.config):
        raise UserError("Say what to export: --run DIR, or -c YAML --weights FILE.")
    import ppattn

    ppattn.setup(device="cpu", seed=0)
    from ppattn.config import load_config
    from ppattn.engine.checkpoint import load_run, load_weights

    if args.run:
        config, model, classes, preprocess = load_run(args.run, args.checkpoint, args.override)
    else:
        config, _ = load_config(args.config, args.override)
        model, classes, preprocess = load_weights(config, args.weights)
    report = ppattn.export(
        model,
        args.output,
        model.img_size,
        args.format,
        preprocess=preprocess,
        classes=classes,
        dynamic_size=args.dynamic_size,
        precision=args.precision,
        source={"from": args.run or args.weights, "config": config.model_dump()},
        images=_real_images(config, preprocess),
    )
    for engine, difference in report["differences"].items():
        told = f"{difference:.1e} of the largest logit" if isinstance(difference, float) else difference
        print(f"  {engine:<8} largest difference to the trained model at batch 1, 3, 8: {told}")
    print(f"exported to {args.output} ({args.format}, {args.precision}; it will run with {report['engine']})")


def _real_images(config, preprocess):
    """Eight validation images, or None where the data is not at hand."""
    from ppattn.data import build_datasets
    from ppattn.errors import UserError

    quiet = config.model_copy(update={"data": config.data.model_copy(update={"download": False})})
    try:
        split = build_datasets(quiet).val
        return preprocess.batch([split.image(i) for i in range(min(8, len(split)))])
    except UserError as error:
        print(f"  checked on random images only: {error}")
        return None
