"""Export a trained model for inference (Paddle or ONNX); it is checked against the trained model first."""

from argparse import Namespace
from contextlib import suppress

from ppattn.cli import options
from ppattn.errors import UserError


def run(args: Namespace) -> None:
    import ppattn

    ppattn.setup(device="cpu", seed=0)
    (config, model, classes, preprocess), provenance = options.load_trained(args)
    model.check_images()
    origin = provenance.model_dump() if provenance else {}
    report = ppattn.export(
        model,
        args.output,
        format=args.format,
        preprocess=preprocess,
        classes=classes if model.num_classes else None,
        features=args.features,
        logits=args.logits,
        sigmoid=config.loss.name == "bce",
        dynamic_size=args.dynamic_size,
        precision=args.precision,
        source={"from": args.run or args.weights, "config": config.model_dump(), "origin": origin},
        **_real_images(config, preprocess, args.precision),
    )
    for engine, difference in report["differences"].items():
        found = isinstance(difference, float)
        shown = f"{difference:.1e} of the largest output" if found else f"{difference}; not used"
        print(f"  {engine:<10} largest difference to the trained model at batch 1, 3, 8: {shown}")
    if "same_top1" in report:
        share = f"{100 * report['same_top1']:.1f} %"
        print(f"  {args.precision:<10} gives {share} of the images the same first class as fp32")
    if report["note"]:
        print(f"  {args.precision:<10} {report['note']}")
    if report["paddlex"]:
        print(f"  PaddleX cannot read this export: {report['paddlex']}")
    print(f"exported to {args.output} ({args.format}, {args.precision}; it will run with {report['engine']})")


def _real_images(config, preprocess, precision: str) -> dict:
    """Validation images for the checks and, for int8, training images; nothing where the data is not at hand."""
    import numpy as np

    from ppattn.data import ImageError, build_datasets

    quiet = config.model_copy(update={"data": config.data.model_copy(update={"download": False})})
    rng = np.random.default_rng(0)

    def some(split, count: int):
        images: list[np.ndarray] = []
        for i in rng.permutation(len(split)):
            if len(images) < count:
                with suppress(ImageError):
                    images.append(split.image(int(i)))
        if not images:
            raise UserError(f"none of the {len(split)} images can be read.")
        return preprocess.batch(images)

    try:
        splits = build_datasets(quiet)
        images = {"images": some(splits.val, 8 if precision == "fp32" else 64)}
        return images | ({"calibration": some(splits.train, 256)} if precision == "int8" else {})
    except (UserError, OSError) as error:
        if precision == "int8":
            raise UserError(f"int8 is calibrated with training images, and they are not at hand: {error}") from None
        print(f"  checked on random images only: {error}")
        return {}
