"""Export every cell (and the zoo), compare at batch 1, 3, 8 with the model, and write results/export.csv.

The differences are parts of the largest logit; weights are initial ones, images random.

python scripts/export_matrix.py            # the 21 cells, Paddle and ONNX
python scripts/export_matrix.py --zoo      # every zoo entry at its own size as well (an hour)
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ppattn
from ppattn import zoo
from ppattn.deploy.exporter import BATCHES
from ppattn.errors import UserError


def main() -> None:
    ppattn.setup(device="cpu", seed=0)
    cells = [(f"{b}_nano", {"attention": a}) for b in ("deit", "pvt", "swin") for a in zoo.list_attentions()]
    if "--zoo" in sys.argv:
        cells += [(name, {}) for name in zoo.MODELS]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, arguments in cells:
            model = ppattn.create_model(name, **arguments)
            for format in ("paddle", "onnx"):
                try:
                    report = ppattn.export(model, Path(place) / "model", format=format)
                except UserError as error:
                    report = {"engine": None, "differences": {format: str(error)}, "by_batch": {}}
                for runtime, found in report["differences"].items():
                    row = {"model": name, "attention": arguments.get("attention", ""), "format": format}
                    row |= {"runtime": runtime, "used": report["engine"] == runtime}
                    by_batch = report["by_batch"].get(runtime, {})
                    row |= {f"batch_{n}": f"{by_batch[f'random{n}']:.1e}" if by_batch else "" for n in BATCHES}
                    rows.append(row | {"problem": "" if by_batch else found})
                    print(*rows[-1].values(), flush=True)
    out = Path(__file__).resolve().parents[1] / "results/export.csv"
    out.parent.mkdir(exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
