"""Exported models in other people's programs: Paddle Inference with default settings, ONNX Runtime and OpenVINO.

Exports each model as Paddle and ONNX, its weights far from the initial ones, runs both in the clients (see
stock_clients.py) at batch 1, 3 and 8, and compares with the model. Writes results/clients.csv; exits with 1 if a client
differs by more than 1e-4 of the largest logit. Needs the packages of scripts/setup.sh test.

python -m scripts.studies.check_clients                                 # every attention on the nano backbones
python -m scripts.studies.check_clients deit_nano:soft inline_pvt_tiny  # these only; nothing is written
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import paddle

import ppattn
from ppattn.deploy.checks import BATCHES
from ppattn.deploy.exporter import save_program, to_onnx
from scripts.run_grid import ROOT
from scripts.tables.runs import write_csv

BACKBONES = ("deit_nano", "pvt_nano", "swin_nano")
CLIENTS = ("paddle", "onnxruntime", "openvino")
LIMIT = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="MODEL[:ATTENTION]", help="default: all; the table is then written")
    given = [(*cell.split(":"), None)[:2] for cell in parser.parse_args().cells]
    cells = given or [(backbone, attention) for attention in ppattn.list_attentions() for backbone in BACKBONES]
    ppattn.setup(device="cpu", seed=0)
    with tempfile.TemporaryDirectory() as place:
        folders = [export(*cell, Path(place) / "_".join(map(str, cell))) for cell in cells]
        for client in CLIENTS:
            run(client, folders)
        rows = [
            {"model": model, "attention": attention, "client": client, **compare(folder, client)}
            for (model, attention), folder in zip(cells, folders, strict=True)
            for client in CLIENTS
        ]
    for row in rows:
        print(*row.values())
    if not given:
        write_csv(ROOT / "results/clients.csv", rows)
    return int(any(row["problem"] or max(row[f"batch_{n}"] for n in BATCHES) > LIMIT for row in rows))


def export(backbone: str, attention: str, folder: Path) -> Path:
    """A folder with the cell's program in both formats, inputs and the model's answers."""
    model = ppattn.create_model(backbone, attention=attention)
    move(model)
    rng = np.random.default_rng(1)
    shape = (model.in_chans, *model.img_size)
    inputs = {f"batch_{n}": rng.standard_normal((n, *shape), dtype=np.float32) for n in BATCHES}
    with paddle.no_grad():
        answers = {name: model(paddle.to_tensor(images)).numpy() for name, images in inputs.items()}
    folder.mkdir(parents=True)
    save_program(model, folder, shape)
    to_onnx(folder, keep=True)
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "model.npz", **answers)
    print(f"exported {backbone} with {attention}", flush=True)
    return folder


def move(model) -> None:
    """Weights and statistics far from their initial values, as after training."""
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        old = parameter.numpy()
        noise = rng.standard_normal(old.shape) * max(old.std(), 0.2 if old.ndim < 2 else 0.02)
        parameter.set_value((old + noise).astype("float32"))
    for layer in model.sublayers():
        if isinstance(layer, paddle.nn.BatchNorm2D):
            layer._mean.set_value(rng.normal(0, 0.3, layer._mean.shape).astype("float32"))
            layer._variance.set_value(rng.uniform(0.3, 3, layer._variance.shape).astype("float32"))
    model.eval()


def run(client: str, folders: Iterable[Path]) -> None:
    """One process for all folders; after a crash another one for those behind."""
    left = [str(folder) for folder in folders]
    while left:
        program = [sys.executable, Path(__file__).with_name("stock_clients.py"), client, *left]
        done = subprocess.run(program, capture_output=True, text=True)
        while left and (Path(left[0]) / f"{client}.npz").exists():
            left.pop(0)
        if left:
            told = [line for line in done.stderr.splitlines() if "Error" in line] or [f"exit code {done.returncode}"]
            (Path(left.pop(0)) / f"{client}.txt").write_text(told[-1][:200])


def compare(folder: Path, client: str) -> dict:
    """Largest difference to the model at each batch, as a part of the largest logit."""
    told = folder / f"{client}.txt"
    if told.exists():
        return {f"batch_{n}": "" for n in BATCHES} | {"problem": told.read_text()}
    with np.load(folder / f"{client}.npz") as found, np.load(folder / "model.npz") as expected:
        parts = {name: np.abs(found[name] - logits).max() / np.abs(logits).max() for name, logits in expected.items()}
    problem = "" if np.isfinite([*parts.values()]).all() else "answers that are not finite"
    return {name: float(f"{part:.1e}") for name, part in parts.items()} | {"problem": problem}


if __name__ == "__main__":
    sys.exit(main())
