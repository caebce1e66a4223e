"""Export models, compare every runtime with them at batch 1, 3, 8, and write the differences to results/.

The differences are parts of the largest logit; weights are initial ones, images random.

python scripts/export_matrix.py                  # all cells, Paddle and ONNX -> results/export.csv
python scripts/export_matrix.py --zoo '*_tiny'   # zoo entries at their own size -> results/export_zoo.csv
"""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", metavar="PATTERN", help="zoo entries instead of the cells; '*' takes hours")
    pattern = parser.parse_args().zoo
    ppattn.setup(device="cpu", seed=0)
    if pattern:
        cells = [(name, {}) for name in zoo.list_models(pattern)]
    else:
        cells = [(f"{b}_nano", {"attention": a}) for b in ("deit", "pvt", "swin") for a in zoo.list_attentions()]
    out = Path(__file__).resolve().parents[1] / "results" / ("export_zoo.csv" if pattern else "export.csv")
    out.parent.mkdir(exist_ok=True)
    columns = ["model", "attention", "format", "runtime", "used", *(f"batch_{n}" for n in BATCHES), "problem"]
    with tempfile.TemporaryDirectory() as place, out.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for name, arguments in cells:
            model = ppattn.create_model(name, **arguments)
            for format in ("paddle", "onnx"):
                for row in export(model, Path(place) / "model", format):
                    writer.writerow(row | {"model": name, "attention": arguments.get("attention", "")})
                    print(name, *arguments.values(), *row.values(), flush=True)
                file.flush()


def export(model, folder: Path, format: str) -> list[dict]:
    """A row for every runtime that was tried."""
    try:
        report = ppattn.export(model, folder, format=format)
    except UserError as error:
        return [{"format": format, "problem": str(error)}]
    rows = []
    for runtime, found in report["differences"].items():
        by_batch = report["by_batch"].get(runtime)
        row = {"format": format, "runtime": runtime, "used": report["engine"] == runtime}
        row |= {f"batch_{n}": f"{by_batch[f'random{n}']:.1e}" for n in BATCHES} if by_batch else {"problem": found}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
