"""ONNX programs in half precision: `--precision fp16` and naive float16, against float32.

python -m scripts.studies.half_programs /data/cifar-10-python.tar.gz     # results/gpu/half_programs.csv; half an hour

The trained models on 1,000 test images of CIFAR-10, attentions without trained weights with what fits of softmax's;
every attention on PVT and Swin, not trained, on noise. ONNX Runtime on a CPU computes operators that it has no float16
kernel for in float32, and rounds what they give to float16.
"""

import argparse
import itertools
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import ppattn
from ppattn.config import load_config
from ppattn.data import build_datasets
from ppattn.deploy.engines import open_engine
from ppattn.deploy.exporter import save_program, to_onnx
from ppattn.deploy.half import to_half
from ppattn.ops import marking_float32
from scripts.run_grid import ROOT
from scripts.tables.runs import write_csv

OUTPUT = ROOT / "results/gpu/half_programs.csv"


def programs(model, folder: Path) -> dict[str, Path]:
    """Folders with the program as float32, float16 with islands, and float16 throughout."""
    made = {name: folder / name for name in ("fp32", "fp16", "naive")}
    for name, place in made.items():
        place.mkdir()
        with marking_float32() if name != "fp32" else nullcontext():
            save_program(model, place, (3, *model.img_size))
        to_onnx(place)
        if name != "fp32":
            to_half(place / "inference.onnx", islands=name == "fp16")
    return made


def row(name: str, model, images: np.ndarray) -> dict:
    """Largest difference of the logits as a part of the largest, and the share of images with fp32's first class."""
    model.eval()
    with TemporaryDirectory() as place:
        answers = {}
        for precision, folder in programs(model, Path(place)).items():
            run = open_engine(folder, "onnxruntime")
            answers[precision] = np.concatenate([run(images[i : i + 50]) for i in range(0, len(images), 50)])
    truth, found = answers["fp32"], {"model": name, "images": len(images)}
    for precision in ("fp16", "naive"):
        worst = np.abs(answers[precision] - truth).max() / np.abs(truth).max()
        same = (answers[precision].argmax(1) == truth.argmax(1)) & np.isfinite(answers[precision]).all(1)
        found |= {precision: f"{worst:.1e}" if np.isfinite(worst) else "not finite"}
        found |= {f"{precision}_same_top1": f"{same.mean():.4f}"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="CIFAR-10's archive")
    data = parser.parse_args().data
    ppattn.setup(device="cpu", seed=0)
    config = load_config("cifar10/deit_nano", [f"data.root={data}"])[0]
    splits, rows = build_datasets(config), []
    names = [name for name in ppattn.list_models(pretrained=True) if "deit_nano" in name]
    models = {name: ppattn.create_model(name, pretrained=True) for name in names}
    softmax = models["softmax_deit_nano_cifar10"]
    for attention in ppattn.list_attentions():
        if not any(name.startswith(f"{attention}_deit_nano") for name in models):
            models[f"{attention}_deit_nano"] = ppattn.create_model("deit_nano", attention=attention, num_classes=10)
            models[f"{attention}_deit_nano"].set_state_dict(softmax.state_dict())
    images = softmax.preprocess(config, splits.mean, splits.std).batch([splits.val.image(i) for i in range(1000)])
    noise = np.random.default_rng(0).standard_normal((50, 3, 32, 32), dtype=np.float32)
    for backbone, attention in itertools.product(("pvt_nano", "swin_nano"), ppattn.list_attentions()):
        models[f"{attention}_{backbone}"] = ppattn.create_model(backbone, attention=attention, num_classes=10)
    for name, model in models.items():
        rows.append(row(name, model, images if "deit_nano" in name else noise))
        write_csv(OUTPUT, rows)


if __name__ == "__main__":
    main()
