"""Trains, evaluates and exports a PaddleSeg model with a backbone of ppattn, and segments pictures with it.

    bash scripts/setup.sh seg
    source .venv-seg/bin/activate
    python examples/digit_scenes.py --output data/digit_scenes
    python examples/segmentation/segment.py train -c examples/segmentation/digit_scenes.yaml --output RUN
    python examples/segmentation/segment.py evaluate --run RUN --list data/digit_scenes/val_2x.txt
    python examples/segmentation/segment.py export --run RUN
    python examples/segmentation/segment.py predict --model RUN/export PICTURE ... --output OUTPUT.png

`predict` also draws the ground truth where ../masks holds a mask of the picture's name. `-o key=value` overrides a key
of the yaml file, as in PaddleSeg: `-o model.backbone.attention=softmax`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
import yaml

TOLERANCE = 1e-4  # largest difference of a probability between the trained and the exported model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("train", help="train, then evaluate on val_dataset")
    verb.add_argument("-c", "--config", type=Path, required=True)
    verb.add_argument("-o", dest="overrides", metavar="KEY=VALUE", nargs="+", default=[])
    verb.add_argument("--output", type=Path, required=True)
    verb.add_argument("--seed", type=int, default=0)
    verb = verbs.add_parser("evaluate", help="evaluate a finished run on a list of images and masks")
    verb.add_argument("--run", type=Path, required=True)
    verb.add_argument("--list", type=Path, help="default: val_path of the run's config.yaml")
    verb = verbs.add_parser("export", help="write RUN/export for Paddle Inference and check it")
    verb.add_argument("--run", type=Path, required=True)
    verb.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="pixels; default: img_size of the backbone")
    verb = verbs.add_parser("predict", help="segment pictures with an exported model")
    verb.add_argument("--model", type=Path, required=True)
    verb.add_argument("pictures", metavar="PICTURE", type=Path, nargs="+")
    verb.add_argument("--output", type=Path, default=Path("segmentation.png"))
    args = vars(parser.parse_args(argv))
    if args["verb"] in ("export", "predict"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, as `load` does
    for path in [*(args.get(name) for name in ("config", "run", "list", "model")), *args.get("pictures", [])]:
        if path and not path.exists():
            parser.error(f"there is no {path}")
    try:
        {"train": train, "evaluate": evaluate, "export": export, "predict": predict}[args.pop("verb")](**args)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class Refused(Exception):
    """A user error."""


def build(config: Path, overrides: list[str]):
    """PaddleSeg's `Config` and `SegBuilder` of a yaml file whose data are there and whose backbone fits the head."""
    import ppattn

    ppattn.setup()
    import paddleseg_fixes  # noqa: F401
    import pixel_head  # noqa: F401
    from paddleseg.cvlibs import Config, SegBuilder

    import ppattn.contrib.paddleseg  # noqa: F401

    config = Config(str(config), opts=overrides)
    builder = SegBuilder(config)
    data = Path(config.dic["train_dataset"]["dataset_root"])
    if not data.exists():
        raise Refused(f"There is no {data}; examples/digit_scenes.py writes data/digit_scenes.")
    model = config.dic["model"]
    if (names := config.dic.get("labels")) and len(names) != model["num_classes"]:
        raise Refused(f"labels has {len(names)} names, but model.num_classes is {model['num_classes']}.")
    try:
        maps = len(builder.build_component(model["backbone"]).feat_channels)
    except RuntimeError as error:  # PaddleSeg puts a sentence of its own in front of ppattn's
        raise Refused(str(error).splitlines()[-1]) from None
    if model["type"] == "SegFormer" and maps != 4:
        raise Refused(f"The SegFormer head takes four maps; this backbone gives {maps}: {model['backbone']}.")
    return config, builder


def train(config: Path, overrides: list[str], output: Path, seed: int) -> None:
    import paddle

    config, builder = build(config, overrides)
    from paddleseg.core import train

    paddle.seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    output.mkdir(parents=True, exist_ok=True)
    for name in ("model.pdparams", "metrics.json"):  # of an earlier training
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / "export", ignore_errors=True)
    (output / "config.yaml").write_text(str(config))
    train(
        builder.model,
        builder.train_dataset,
        optimizer=builder.optimizer,
        save_dir=str(output / "checkpoints"),
        iters=config.iters,
        batch_size=config.batch_size,
        save_interval=config.iters,
        log_iters=50,
        losses=builder.loss,
        keep_checkpoint_max=1,
    )
    shutil.copy(output / "checkpoints" / f"iter_{config.iters}" / "model.pdparams", output / "model.pdparams")
    shutil.rmtree(output / "checkpoints")
    evaluate(output, None)


def trained(run: Path):
    """Config, builder and trained model of a finished run."""
    import paddle

    config, builder = build(run / "config.yaml", [])
    model = builder.model
    model.set_state_dict(paddle.load(str(run / "model.pdparams")))
    model.eval()
    return config, builder, model


def labels(config) -> list[str]:
    """Names of the classes: `labels` of the yaml file, or their numbers."""
    return config.dic.get("labels") or [str(i) for i in range(config.dic["model"]["num_classes"])]


def evaluate(run: Path, list: Path | None) -> None:
    """Adds mIoU, accuracy and IoU per class of a list to RUN/metrics.json, under the name of the list."""
    from paddleseg.core import evaluate

    config, builder, model = trained(run)
    data = config.dic["val_dataset"]
    if list:
        data["val_path"] = str(list)
    name = Path(data.get("val_path", "val")).stem
    miou, accuracy, iou, _, _ = evaluate(model, builder.val_dataset, print_detail=False)
    path = run / "metrics.json"
    metrics = json.loads(path.read_text()) if path.exists() else {}
    metrics[name] = {
        "miou": float(miou),
        "accuracy": float(accuracy),
        "iou": dict(zip(labels(config), [float(x) for x in iou], strict=True)),
        "images": len(builder.val_dataset),
    }
    path.write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"mIoU {100 * miou:.1f} %, accuracy {100 * accuracy:.1f} % on {name}; all figures: {path}")


def export(run: Path, size: list[int] | None) -> None:
    """Writes the model for images [B, 3, H, W] -> probabilities [B, K, H, W], and PaddleSeg's deploy.yaml."""
    import paddle
    from paddleseg.deploy.export import WrappedModel

    config, _, model = trained(run)
    size = size or list(model.backbone.host.img_size)
    folder, shape = run / "export", [None, 3, *size]
    wrapped = WrappedModel(model, "softmax")
    wrapped.eval()
    shutil.rmtree(folder, ignore_errors=True)
    paddle.jit.save(wrapped, str(folder / "model"), input_spec=[paddle.static.InputSpec(shape, "float32", "image")])
    worst, exported = 0.0, load(folder)
    for batch in (1, 3, 8):
        images = np.random.default_rng(batch).standard_normal((batch, 3, *size)).astype("float32")
        with paddle.no_grad():
            expected = paddle.nn.functional.softmax(model(paddle.to_tensor(images))[0], axis=1).numpy()
        worst = max(worst, float(np.abs(exported(images) - expected).max()))
    if not worst <= TOLERANCE:
        shutil.rmtree(folder)
        raise Refused(f"The exported model differs from the trained one by {worst:.1e}; it was removed.")
    deploy = {
        "model": "model.json",
        "params": "model.pdiparams",
        "transforms": config.dic["val_dataset"]["transforms"],
        "input_shape": [-1, 3, *size],
        "output_op": "softmax",
        "output_dtype": "float32",
        "labels": labels(config),
    }
    (folder / "deploy.yaml").write_text(yaml.safe_dump({"Deploy": deploy}))
    print(f"Exported to {folder}; in Paddle Inference probabilities differ by at most {worst:.1e}.")
    print("On a CPU, call config.disable_mkldnn(): oneDNN cannot run PaddleSeg's interpolation in Paddle 3.3.1.")


def load(folder: Path):
    """A function of images [B, 3, H, W] that gives probabilities [B, K, H, W].

    oneDNN, which Paddle Inference uses on CPUs unless told otherwise, is off: in Paddle 3.3.1 it fails at the
    head's bilinear interpolation ("ConvertPirAttribute2RuntimeAttribute not support").
    """
    import paddle
    from paddle import inference

    files = str(folder / "model.json"), str(folder / "model.pdiparams")
    config = inference.Config(*files)
    config.disable_mkldnn()
    config.disable_glog_info()
    predictor = inference.create_predictor(config)
    return lambda images: predictor.run([paddle.to_tensor(images)])[0].numpy()


def predict(model: Path, pictures: list[Path], output: Path) -> None:
    """Draws each picture above its mask, and prints how many pixels each class has."""
    if not (model / "deploy.yaml").exists():
        raise Refused(f"{model} holds no finished export.")
    deploy = yaml.safe_load((model / "deploy.yaml").read_text())["Deploy"]
    (normalize,) = (step for step in deploy["transforms"] if step["type"] == "Normalize")
    height, width = deploy["input_shape"][2:]
    run, images, masks, truths = load(model), [], [], []
    for picture in pictures:
        image = cv2.imread(str(picture))
        if image is None:
            raise Refused(f"{picture} is no image.")
        pixels = cv2.resize(image, (width, height))[..., ::-1] / 255.0
        pixels = (pixels - np.array(normalize["mean"])) / np.array(normalize["std"])
        probabilities = run(pixels.transpose(2, 0, 1)[None].astype("float32"))[0]
        mask = cv2.resize(probabilities.transpose(1, 2, 0), image.shape[1::-1]).argmax(2)
        counts = np.bincount(mask.ravel(), minlength=len(deploy["labels"]))
        found = [f"{label} {count}" for label, count in zip(deploy["labels"], counts, strict=True) if count]
        print(f"{picture.name}, pixels: " + ", ".join(found))
        images.append(image[..., ::-1])
        masks.append(mask)
        truth = cv2.imread(str(picture.parent.parent / "masks" / picture.name), cv2.IMREAD_GRAYSCALE)
        truths.append(truth if truth is None else np.where(truth < len(deploy["labels"]), truth, 0))  # 255: ignored
    known = all(truth is not None for truth in truths)
    draw(
        output,
        images,
        {"ground truth": truths, "prediction": masks} if known else {"prediction": masks},
        deploy["labels"],
    )
    print(f"Written to {output}.")


def draw(output: Path, images: list[np.ndarray], masks: dict[str, list[np.ndarray]], labels: list[str]) -> None:
    """A column per picture (RGB), with a row per kind of mask over it, and a legend of the classes that occur."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    from ppattn.plots.figure import open_figure

    colours = np.concatenate(
        [np.zeros((1, 3)), colormaps["hsv"](np.arange(len(labels) - 1) / (len(labels) - 1))[:, :3]]
    )
    rows = {"picture": images}
    for name, found in masks.items():
        mixed = [0.3 * image + 0.7 * 255 * colours[mask] for image, mask in zip(images, found, strict=True)]
        rows[name] = [
            np.where(mask[..., None] > 0, over, 0.5 * image).astype(np.uint8)
            for image, mask, over in zip(images, found, mixed, strict=True)
        ]
    shown = np.unique(np.concatenate([mask.ravel() for found in masks.values() for mask in found]))
    handles = [Patch(color=colours[k] if k else "grey", label=labels[k]) for k in shown]
    with open_figure(output, 1.6 * len(images) + 1.8, 1.6 * len(rows) + 0.2) as figure:
        grid = figure.subplots(len(rows), len(images), squeeze=False, subplot_kw={"xticks": [], "yticks": []})
        for line, (name, drawn) in zip(grid, rows.items(), strict=True):
            line[0].set_ylabel(name)
            for axes, image in zip(line, drawn, strict=True):
                axes.imshow(image, interpolation="nearest")
        figure.legend(handles=handles, loc="outside right center", title="class")


if __name__ == "__main__":
    main()
