"""Trains, evaluates and exports a PaddleDetection model with a backbone of ppattn, and finds objects with it.

    bash scripts/setup.sh det
    source .venv-det/bin/activate
    python examples/digit_scenes.py --output data/digit_scenes
    python examples/detection/detect.py train -c examples/detection/digit_scenes.yaml --output RUN
    python examples/detection/detect.py evaluate --run RUN --annotations data/digit_scenes/annotations/val_2x.json
    python examples/detection/detect.py export --run RUN
    python examples/detection/detect.py predict --model RUN/export PICTURE ... --output OUTPUT.png

`-o key=value` overrides a key of the yaml file, as in PaddleDetection: `-o PPAttn.attention=softmax`.
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

TOLERANCE = 1e-2  # largest difference of a box, in pixels, between the trained and the exported model


class Refused(Exception):
    """A user error."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("train", help="train, then evaluate on EvalDataset")
    verb.add_argument("-c", "--config", type=Path, required=True)
    verb.add_argument("-o", dest="overrides", metavar="KEY=VALUE", nargs="+", default=[])
    verb.add_argument("--output", type=Path, required=True)
    verb.add_argument("--seed", type=int, default=0)
    verb = verbs.add_parser("evaluate", help="evaluate a finished run on a file of COCO annotations")
    verb.add_argument("--run", type=Path, required=True)
    verb.add_argument("--annotations", type=Path, help="default: EvalDataset of the run's config.yaml")
    verb = verbs.add_parser("export", help="write RUN/export for Paddle Inference and check it")
    verb.add_argument("--run", type=Path, required=True)
    verb = verbs.add_parser("predict", help="find objects in pictures with an exported model")
    verb.add_argument("--model", type=Path, required=True)
    verb.add_argument("pictures", metavar="PICTURE", type=Path, nargs="+")
    verb.add_argument("--output", type=Path, default=Path("detection.png"))
    verb.add_argument("--threshold", type=float, default=0.5, help="smallest score of a box that is drawn")
    args = vars(parser.parse_args(argv))
    if args["verb"] in ("export", "predict"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, as `load` does
    for path in [*(args.get(name) for name in ("config", "run", "annotations", "model")), *args.get("pictures", [])]:
        if path and not path.exists():
            parser.error(f"there is no {path}")
    try:
        {"train": train, "evaluate": evaluate, "export": export, "predict": predict}[args.pop("verb")](**args)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def read(config: Path, overrides: list[str]):
    """PaddleDetection's configuration from a yaml file whose data are there."""
    import ppattn

    ppattn.setup()
    import paddledet_fixes  # noqa: F401
    from ppdet.core.workspace import load_config, merge_config

    import ppattn.contrib.paddledet  # noqa: F401

    config = load_config(str(config))
    for override in overrides:
        keys, _, value = override.partition("=")
        value = yaml.safe_load(value)
        for key in reversed(keys.split(".")):
            value = {key: value}
        merge_config(value)
    data = Path(config.TrainDataset.dataset_dir)
    if not data.exists():  # PaddleDetection would try to download it
        raise Refused(f"There is no {data}; examples/digit_scenes.py writes data/digit_scenes.")
    return config


def trainer(config, mode: str):
    """PaddleDetection's Trainer, whose anchors fit the maps."""
    from ppdet.engine import Trainer

    from ppattn.errors import UserError

    try:
        built = Trainer(config, mode)
    except UserError as error:
        raise Refused(str(error)) from None
    if config.architecture == "RetinaNet":
        maps = [float(shape.stride) for shape in built.model.neck.out_shape]
        anchors = [float(stride) for stride in built.model.head.anchor_generator.strides]
        if maps != anchors:
            raise Refused(f"RetinaHead.anchor_generator.strides is {anchors}; the neck's maps have the strides {maps}.")
    return built


def trained(run: Path, mode: str, annotations: Path | None = None):
    """PaddleDetection's Trainer with the weights of a finished run."""
    config = read(run / "config.yaml", json.loads((run / "overrides.json").read_text()))
    if annotations:
        data = config.EvalDataset
        data.dataset_dir = str(annotations.resolve().parents[1])
        data.anno_path = str(annotations.resolve())
    config.output_eval = str(run)
    built = trainer(config, mode)
    built.load_weights(str(run / "model.pdparams"))
    return built


def train(config: Path, overrides: list[str], output: Path, seed: int) -> None:
    import paddle

    settings = read(config, overrides)
    paddle.seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    settings.save_dir, settings.filename = str(output), "checkpoints"
    output.mkdir(parents=True, exist_ok=True)
    for name in ("model.pdparams", "metrics.json"):  # of an earlier training
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / "export", ignore_errors=True)
    shutil.copy(config, output / "config.yaml")
    (output / "overrides.json").write_text(json.dumps(overrides))
    trainer(settings, "train").train()
    shutil.copy(output / "checkpoints" / "model_final.pdparams", output / "model.pdparams")
    shutil.rmtree(output / "checkpoints")
    evaluate(output, None)


def evaluate(run: Path, annotations: Path | None) -> None:
    """Adds the COCO figures of an annotation file to RUN/metrics.json, under the name of the file."""
    built = trained(run, "eval", annotations)
    (metric,) = built._metrics
    metric.reset = lambda: None  # the Trainer forgets the figures when it has logged them
    built.evaluate()
    figures = metric.get_results().get("bbox", [0.0] * 12)  # there are none where nothing was found
    path, name = run / "metrics.json", Path(built.dataset.anno_path).stem
    metrics = json.loads(path.read_text()) if path.exists() else {}
    metrics[name] = {"ap": figures[0], "ap50": figures[1], "ap75": figures[2], "images": len(built.dataset)}
    path.write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"AP {100 * figures[0]:.1f}, AP50 {100 * figures[1]:.1f} on {name}; all figures: {path}")


def export(run: Path) -> None:
    """Writes the model with PaddleDetection's post-processing, for one image [1, 3, H, W], and infer_cfg.yml.

    PaddleDetection 2.6.0's own `Trainer.export` fails since Paddle 3.0, where `to_static` has no `main_program`.
    """
    import paddle
    from ppdet.engine.export_utils import _dump_infer_config

    built, folder = trained(run, "test"), run / "export"
    shape = built.cfg["TestReader"]["inputs_def"]["image_shape"]
    batch = {
        "image": np.random.default_rng(0).standard_normal(shape).astype("float32"),
        "scale_factor": np.ones([1, 2], "float32"),
    }

    class Detector(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.model = built.model

        def forward(self, image, scale_factor):
            im_shape = paddle.to_tensor([shape[2:]], "float32")
            outputs = self.model({"image": image, "im_shape": im_shape, "scale_factor": scale_factor})
            return outputs["bbox"], outputs["bbox_num"]

    detector = Detector()
    detector.eval()
    with paddle.no_grad():
        expected = detector(*(paddle.to_tensor(array) for array in batch.values()))[0].numpy()
    shutil.rmtree(folder, ignore_errors=True)
    spec = [paddle.static.InputSpec(array.shape, "float32", name) for name, array in batch.items()]
    paddle.jit.save(detector, str(folder / "model"), input_spec=spec)
    boxes = load(folder)(batch)
    if boxes.shape != expected.shape or not np.abs(boxes - expected).max(initial=0.0) <= TOLERANCE:
        shutil.rmtree(folder)
        raise Refused("The exported model finds other boxes than the trained one; it was removed.")
    path = folder / "infer_cfg.yml"
    _dump_infer_config(built.cfg, str(path), shape, built.model)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "image_size": shape[2:]}))
    print(f"Exported to {folder}; Paddle Inference finds the same {len(boxes)} boxes as the trained model.")
    print("On a CPU, call config.disable_mkldnn(): oneDNN cannot run the neck's interpolation in Paddle 3.3.1.")


def load(folder: Path):
    """A function of inputs by name that gives boxes [N, 6]: class, score, x1, y1, x2, y2.

    oneDNN, which Paddle Inference uses on CPUs unless told otherwise, is off: in Paddle 3.3.1 it fails at the
    neck's interpolation ("ConvertPirAttribute2RuntimeAttribute not support").
    """
    from paddle import inference

    config = inference.Config(str(folder / "model.json"), str(folder / "model.pdiparams"))
    config.disable_mkldnn()
    config.disable_glog_info()
    predictor = inference.create_predictor(config)

    def run(batch: dict[str, np.ndarray]) -> np.ndarray:
        for name in predictor.get_input_names():
            predictor.get_input_handle(name).copy_from_cpu(batch[name])
        predictor.run()
        return predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu().reshape(-1, 6)

    return run


def predict(model: Path, pictures: list[Path], output: Path, threshold: float) -> None:
    """Writes the pictures with their boxes, and prints class, score and corners of each."""
    if not (model / "infer_cfg.yml").exists():
        raise Refused(f"{model} holds no finished export.")
    settings = yaml.safe_load((model / "infer_cfg.yml").read_text())
    labels, (height, width) = settings["label_list"], settings["image_size"]
    (normalize,) = (step for step in settings["Preprocess"] if step["type"] == "NormalizeImage")
    run, panels = load(model), []
    for picture in pictures:
        image = cv2.imread(str(picture))
        if image is None:
            raise Refused(f"{picture} is no image.")
        pixels = cv2.resize(image, (width, height))[..., ::-1] / 255.0
        pixels = (pixels - np.array(normalize["mean"])) / np.array(normalize["std"])
        scale = np.array([[height / image.shape[0], width / image.shape[1]]], "float32")
        boxes = run({"image": pixels.transpose(2, 0, 1)[None].astype("float32"), "scale_factor": scale})
        boxes = boxes[boxes[:, 1] >= threshold]
        print(f"{picture.name}: {len(boxes)} objects")
        for kind, score, *corners in boxes:
            print(f"{labels[int(kind)]:>12}  {score:.2f}  " + " ".join(f"{c:6.1f}" for c in corners))
        panels.append(draw(image, boxes, labels))
    if not cv2.imwrite(str(output), np.hstack(panels), [cv2.IMWRITE_PNG_COMPRESSION, 9]):
        raise Refused(f"{output} cannot be written.")
    print(f"Written to {output}.")


def draw(image: np.ndarray, boxes: np.ndarray, labels: list[str], side: int = 320) -> np.ndarray:
    """A BGR image of side x side pixels with boxes [N, 6], class and score above each (inside where none is above)."""
    zoom = [side / image.shape[1], side / image.shape[0]] * 2
    image = cv2.resize(image, (side, side), interpolation=cv2.INTER_NEAREST)
    font, size, white = cv2.FONT_HERSHEY_DUPLEX, 0.45, (255, 255, 255)
    for kind, score, *corners in boxes[boxes[:, 1].argsort()]:  # the most certain on top
        left, top, right, bottom = (round(float(c) * z) for c, z in zip(corners, zoom, strict=True))
        hue = np.array([[[int(kind) * 180 // len(labels), 255, 150]]], np.uint8)
        colour = cv2.cvtColor(hue, cv2.COLOR_HSV2BGR)[0, 0].tolist()
        text = f"{labels[int(kind)]} {score:.2f}"
        (width, height), _ = cv2.getTextSize(text, font, size, 1)
        x, y = max(0, min(left, side - width - 6)), max(height + 6, top)
        cv2.rectangle(image, (left, top), (right, bottom), colour, 2)
        cv2.rectangle(image, (x, y - height - 6), (x + width + 6, y), colour, cv2.FILLED)
        cv2.putText(image, text, (x + 3, y - 3), font, size, white, 1, cv2.LINE_AA)
    return image


if __name__ == "__main__":
    main()
