"""Prediction with an exported folder, which is refused unless it is whole and still gives its golden answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppattn.deploy.engines import open_engine
from ppattn.deploy.exporter import TOLERANCE, sha256
from ppattn.errors import UserError


class Predictor:
    """An exported model.

    Args:
        folder: what `ppattn.export` wrote.
        precision: None (as exported) or "fp32".
        threads: CPU threads; default: all cores.

    Attributes:
        classes: names in the order of the probabilities. preprocess: `ppattn.data.Preprocess`. source: where the model
        came from, as given at export.

    Raises:
        UserError: for a folder that is no export, misses a file, was changed, or answers otherwise than when exported.
    """

    def __init__(self, folder: str | Path, precision: str | None = None, threads: int | None = None):
        from ppattn.data import Preprocess

        self.folder = Path(folder)
        description = self._description()
        self.classes: list[str] = description["classes"]
        self.preprocess = Preprocess.from_dict(description["preprocess"])
        self.source: dict = description["source"]
        engine = description["engine"]
        if precision == "bf16" and engine != "bf16":
            raise UserError(f"{folder} was exported as {description['precision']}; export it with --precision bf16.")
        if precision == "fp32" and engine == "bf16":
            engine = "plain"
        self._logits = open_engine(self.folder, engine, threads)
        self._check_golden(TOLERANCE["bf16" if engine == "bf16" else "fp32"])

    def _description(self) -> dict:
        path = self.folder / "inference.json"
        if not path.is_file():
            raise UserError(f"{self.folder} is not an exported model: it has no inference.json. Make one with export.")
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            checksums = description["sha256"]
        except (ValueError, KeyError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); export the model again.") from None
        for name, wanted in checksums.items():
            file = self.folder / name
            if not file.is_file():
                raise UserError(f"{self.folder} is not whole: {name} is missing. Export the model again.")
            if sha256(file) != wanted:
                raise UserError(f"{file} is not the file that was exported: its checksum differs. Export it again.")
        return description

    def _check_golden(self, tolerance: float) -> None:
        with np.load(self.folder / "golden.npz") as golden:
            found, expected = self._logits(golden["input"]), golden["output"]
        limit = 3 * tolerance * max(1.0, np.abs(expected).max())
        if found.shape != expected.shape or not np.abs(found - expected).max() <= limit:
            raise UserError(
                f"{self.folder} does not give its golden answer on this machine; export the model again here."
            )

    def run(self, batch: np.ndarray) -> np.ndarray:
        """Preprocessed images [B, C, H, W] float32 -> probabilities [B, K] float32; rows sum to 1."""
        batch = np.asarray(batch)
        wanted = (self.preprocess.in_chans, *self.preprocess.img_size)
        if batch.ndim != 4 or (batch.shape[1:] != wanted and batch.shape[1] != wanted[0]):
            raise UserError(f"The model takes images [B, {', '.join(map(str, wanted))}], not {list(batch.shape)}.")
        if len(batch) == 0:
            return np.zeros((0, len(self.classes)), np.float32)
        logits = self._logits(batch).astype(np.float64)
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        return (exponents / exponents.sum(axis=1, keepdims=True)).astype(np.float32)

    def predict(self, images: Sequence, topk: int = 5) -> list[list[tuple[str, float]]]:
        """The most probable classes of images (uint8 RGB [H, W, 3]) or image files, best first, as (name, score)."""
        from ppattn.data import read_image

        pictures = [read_image(i) if isinstance(i, (str, Path)) else i for i in images]
        if not pictures:
            return []
        return best(self.run(self.preprocess.batch(pictures)), self.classes, topk)


def best(probabilities: np.ndarray, classes: list[str], topk: int) -> list[list[tuple[str, float]]]:
    """The `topk` most probable names and scores of every row."""
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, : min(topk, len(classes))]
    return [[(classes[i], float(row[i])) for i in chosen] for row, chosen in zip(probabilities, order, strict=True)]
