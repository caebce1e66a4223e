"""The verbs of `analyze`: each takes one or several runs, draws a picture and returns its numbers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from tqdm import tqdm

from ppattn.analysis import interventions, measures
from ppattn.analysis.maps import LayerMap, attention_maps, spread
from ppattn.analysis.pictures import Panel, draw_lines, draw_overlays, draw_points
from ppattn.attention import ATTENTIONS, Attention
from ppattn.data import Preprocess
from ppattn.data.splits import Splits
from ppattn.errors import UserError, optional_package
from ppattn.plots.figure import shorten_labels
from ppattn.zoo.table import main_attention

SIZES = (3, 5, 7)
TOLERANCES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LAYERS_DRAWN = 6
Report = dict[str, list[dict]]  # rows per run


class Subject:
    """A run and the first `count` images of a split for its analysis, the classes in turn.

    `model` is in evaluation mode, `images` its input [n, C, H, W], `pictures` the same to look at, uint8 [H, W, 3]
    each; `attention` gives the colour: of several the first that is not softmax. `outputs` are the model's classes.
    """

    def __init__(self, name: str, model: Any, preprocess: Preprocess, data: Splits, count: int):
        split = data.val
        if not 1 <= count <= len(split):
            raise UserError(f"--images = {count} is not allowed: the validation split of {name} has 1 to {len(split)}.")
        chosen = spread(split.labels, count)
        images = preprocess.batch([split.image(i) for i in chosen])
        self.name, self.model, self.images = name, model, paddle.to_tensor(images)
        self.pictures = [preprocess.unnormalise(image) for image in images]
        self.labels, self.classes, self.outputs = split.labels[chosen], data.classes, data.classes
        self.names, self.several = [data.named(split, i) for i in chosen], split.table is not None
        attentions = [layer for layer in model.sublayers() if isinstance(layer, Attention)]
        self.attention = main_attention([ATTENTIONS.name_of(type(layer)) for layer in attentions])
        model.eval()

    def maps(self, whole: bool = True) -> Iterator[list[LayerMap]]:
        """The maps of all layers, image by image; see `attention_maps`."""
        for i in tqdm(range(len(self.images)), f"maps of {self.name}", unit="image", leave=False, disable=None):
            yield attention_maps(self.model, self.images[i : i + 1], whole)

    def in_batches(self, function: Callable[[Any, paddle.Tensor], paddle.Tensor]) -> np.ndarray:
        """`function` of the model and all images, in batches, without gradients."""
        with paddle.no_grad():
            starts = tqdm(range(0, len(self.images), 50), self.name, unit="batch", leave=False, disable=None)
            batches = (self.images[i : i + 50] for i in starts)
            return np.concatenate([function(self.model, batch).numpy() for batch in batches])

    def check_classes(self, verb: str) -> None:
        if not self.model.num_classes:
            raise UserError(f"{verb} needs a model with classes; {self.name} has none.")

    def check_labels(self, verb: str) -> None:
        if self.several or not self.classes:
            raise UserError(f"{verb} needs images with one label each; those of {self.name} have several or none.")

    def accuracy(self) -> float:
        return float((self.in_batches(lambda model, images: model(images).argmax(-1)) == self.labels).mean())


def per_layer(subjects: list[Subject], measure: Callable[[LayerMap, LayerMap | None], dict]) -> Report:
    """`measure` of every layer and the layer before: numbers and lists of numbers, averaged over the images."""
    report = {}
    for subject in subjects:
        layers: dict[str, list[dict]] = {}
        for found in subject.maps():
            for before, layer in zip([None, *found], found, strict=False):
                layers.setdefault(layer.name, []).append(measure(layer, before))
        report[subject.name] = [
            {"layer": name} | {key: np.mean([row[key] for row in rows], axis=0).tolist() for key in rows[0]}
            for name, rows in layers.items()
        ]
    return report


def by_layer(report: Report, key: str, title: str, ylabel: str, scale: float = 1.0, **more: Any) -> Panel:
    """A panel of the values of `key`, times `scale`, over the layers, numbered from 1, that have this value."""
    found_in = {}
    for name, rows in report.items():
        if found := {i: scale * row[key] for i, row in enumerate(rows, 1) if key in row}:
            found_in[name] = list(found), list(found.values())
    return Panel(title, "layer", ylabel, found_in, **more)


def lines(subjects: list[Subject], path: Path, title: str, panels: list[Panel]) -> None:
    draw_lines(path, title, panels, {subject.name: subject.attention for subject in subjects})


def over_images(
    subjects: list[Subject], path: Path, title: str, columns: dict, label: str, marked: tuple[int, int] | None = None
) -> None:
    """Maps over the images, which are drawn once for all runs: they must see the same."""
    first = subjects[0]
    for other in subjects[1:]:
        if not all(map(np.array_equal, first.pictures, other.pictures)):
            raise UserError(f"{first.name} and {other.name} see different images; draw them one by one.")
    draw_overlays(path, title, first.pictures, first.names, columns, label, marked)


def maps(subjects: list[Subject], path: Path) -> Report:
    """Attention of the central query over images of different classes, in two to six layers per run: rows of the
    explicit map, mean over the heads, times the number of keys (1 is a uniform weight)."""
    columns, report = dict[str, list](), Report()
    marked = None
    for subject in subjects:
        queries, layers = [], []  # a map does not outlive its image
        for layers in subject.maps(whole=False):
            queries.append([m.query(m.hw[0] // 2, m.hw[1] // 2) * m.weights.shape[-1] for m in layers])
        marked = marked or layers[0].hw
        shapes = [("x".join(map(str, m.hw)), "x".join(map(str, m.weights.shape))) for m in layers]
        rows = [{"layer": m.name, "grid": grid, "map": shape} for m, (grid, shape) in zip(layers, shapes, strict=True)]
        columns[subject.name], report[subject.name] = [], rows
        for k in np.unique(np.linspace(0, len(rows) - 1, max(2, LAYERS_DRAWN // len(subjects))).astype(int)):
            drawn = [row[k] for row in queries]
            columns[subject.name].append((f"layer {k + 1}", drawn, layers[k].hw))
            rows[k]["drawn"] = [row.round(4).tolist() for row in drawn]
    over_images(subjects, path, "Attention of the marked query", columns, "weight × number of keys", marked)
    return report


def locality(subjects: list[Subject], path: Path) -> Report:
    """Share of |weight| in windows around the query, also divided by the (exact) uniform share: the local attention
    analysis of the InLine paper (section 4, no numbers: 3 x 3 on DeiT-T, softmax largest in shallow layers)."""

    def measure(found, before):
        row = {}
        for size in SIZES:
            if share := measures.local_share(found, size):
                own, uniform = share
                row |= {f"share_{size}x{size}": own, f"uniform_{size}x{size}": uniform}
                row[f"ratio_{size}x{size}"] = own / uniform
        return row

    report = per_layer(subjects, measure)
    label = "share of |weight| / uniform share"
    panels = [by_layer(report, f"ratio_{size}x{size}", f"{size} x {size} window", label) for size in SIZES]
    lines(subjects, path, "Weight near the query (1: as much as uniform attention)", panels)
    return report


def injectivity(subjects: list[Subject], path: Path) -> Report:
    """Pairs of queries with the same weights per layer, as figure 2 of the InLine paper counts them for linear and
    softmax attention; its tolerance is not published, hence the sweep."""

    def measure(found, before):
        whole = found.whole()
        return {f"pairs_at_{t:g}": measures.confusions(whole, t) for t in TOLERANCES}

    report, sweep = per_layer(subjects, measure), {}
    for name, rows in report.items():
        sweep[name] = TOLERANCES, [float(np.mean([row[f"pairs_at_{t:g}"] for row in rows])) for t in TOLERANCES]
    pairs = "confused pairs per image and head"
    panels = [
        Panel("all layers", "tolerance, relative to the row", pairs, sweep, xscale="log", yscale="symlog"),
        by_layer(report, "pairs_at_0.01", "tolerance 0.01", pairs, yscale="symlog"),
    ]
    lines(subjects, path, "Queries with equal attention weights", panels)
    return report


def mask(subjects: list[Subject], path: Path) -> Report:
    """Accuracy when the weights of the local window, or of as many random tokens, are set to zero in every layer, the
    others as they are: table 2 of the InLine paper, where masking the window hurts most with softmax."""
    report = {}
    for subject in subjects:
        subject.check_labels("mask")
        subject.check_classes("mask")
        rows: list[dict[str, Any]] = [{"masked": "nothing", "tokens": 0.0, "top1": subject.accuracy()}]
        for size in SIZES:
            for local in (True, False):
                with interventions.masked(subject.model, size, local) as counts:
                    top1 = subject.accuracy()
                what = f"{size}x{size} window" if local else f"random, as many as {size}x{size}"
                rows.append({"masked": what, "tokens": float(np.mean(counts or 0)), "top1": top1})
        report[subject.name] = rows
    panels = []
    for offset, title in ((1, "the window around the query"), (2, "as many random tokens")):
        drawn = {name: [rows[0], *rows[offset::2]] for name, rows in report.items()}
        curves = {name: ([r["tokens"] for r in rows], [100 * r["top1"] for r in rows]) for name, rows in drawn.items()}
        panels.append(Panel(title, "keys masked per query", "top-1 (%)", curves))
    lines(subjects, path, f"Accuracy with masked attention, {len(subjects[0].images)} images", panels)
    return report


def entropy(subjects: list[Subject], path: Path) -> Report:
    """Entropy of the rows (1: uniform) and effective rank of the maps per layer; PolaFormer's powers and gates.

    PolaFormer (arXiv 2501.15061) argues that linear attention has rows of high entropy, which it lowers by a learned
    power per channel; a figure shows a negative correlation of the gates in the first layer.
    """

    def measure(found, before):
        rank = measures.effective_rank(found.weights) / min(found.weights.shape[-2:])
        return {"entropy": measures.entropy(found), "effective_rank": rank} | (interventions.polarity(found) or {})

    report = per_layer(subjects, measure)
    panels = [
        by_layer(report, "entropy", "entropy of the rows", "% of the largest entropy", 100, bottom=0),
        by_layer(report, "effective_rank", "effective rank", "% of the largest rank", 100, bottom=0),
        by_layer(report, "power", "PolaFormer: mean power", "power"),
        by_layer(report, "gate_correlation", "PolaFormer: gates of the two streams", "correlation"),
    ]
    lines(subjects, path, "How concentrated the attention maps are", panels)
    return report


def saturation(subjects: list[Subject], path: Path) -> Report:
    """Cosine between the maps of consecutive layers of the same shape; diagonality and symmetry of square maps. The
    LaViT paper (arXiv 2406.00427) finds that maps hardly change in deep layers; its loss favours both."""

    def measure(found, before):
        row = {}
        if before is not None and before.weights.shape == found.weights.shape and before.shift == found.shift:
            row["similarity"] = measures.similarity(before.weights, found.weights)
        if found.own_keys:
            row["diagonality"] = measures.diagonality(found.whole())
            row["symmetry"] = measures.symmetry(found.whole())
        return row

    report = per_layer(subjects, measure)
    panels = [
        by_layer(report, "similarity", "similarity to the layer before", "cosine"),
        by_layer(report, "diagonality", "queries that weigh themselves most", "% of the queries", 100),
        by_layer(report, "symmetry", "symmetry, 1 - |A - A'| / 2|A|", "%", 100),
    ]
    lines(subjects, path, "How the maps change from layer to layer", panels)
    return report


def newton(subjects: list[Subject], path: Path) -> Report:
    """SOFT's Newton inverse step by step, and its map from landmarks against the full Gaussian kernel: the paper (arXiv
    2110.11945) proves convergence, and the published models stop after 20 steps."""
    report = per_layer(subjects, lambda found, before: interventions.newton(found) or {})
    panels = []
    for name in report:
        report[name] = rows = [row for row in report[name] if "residuals" in row]
        if not rows:
            raise UserError(f"newton needs layers of soft or soft_norm with landmarks; {name} has none.")
        steps = {f"layer {i}": (range(len(row["residuals"])), row["residuals"]) for i, row in enumerate(rows, 1)}
        panels.append(Panel(f"Newton's inverse, {name}", "step", "|I - K V| / |I|", steps, yscale="log"))
    panels.append(by_layer(report, "cosine", "landmarks against the full kernel", "cosine", bottom=0))
    lines(subjects, path, "SOFT: inverse and approximation", panels)
    return report


def rollout(subjects: list[Subject], path: Path) -> Report:
    """Attention rollout (Abnar and Zuidema, ACL 2020, section 3): how much of each input token reaches the output, over
    the layers of the last stage whose keys are the queries' own tokens; of a class token, else the tokens' mean."""
    columns, report = dict[str, list](), Report()
    for subject in subjects:
        drawn = []
        for layers in subject.maps():
            last = [m for m in layers if m.hw == layers[-1].hw and m.own_keys and m.prefix == layers[-1].prefix]
            if not last:
                raise UserError(f"rollout: {subject.name} has no layer whose keys are the queries' own tokens.")
            total, prefix = measures.rollout([m.whole() for m in last]), last[-1].prefix
            row = total[0] if prefix else total.mean(0)
            drawn.append(row[prefix:].reshape(last[-1].hw) * len(row))
        columns[subject.name] = [(f"{len(last)} layers", drawn, None)]
        report[subject.name] = [
            {"image": i, "class": name, "largest": float(m.max()), "smallest": float(m.min())}
            for i, (name, m) in enumerate(zip(subject.names, drawn, strict=True))
        ]
    over_images(subjects, path, "Attention rollout", columns, "share / uniform share")
    return report


def gradcam(subjects: list[Subject], path: Path) -> Report:
    """Grad-CAM: where in the image the evidence for the predicted class lies, see `interventions.gradcam`."""
    columns, report = dict[str, list](), Report()
    for subject in subjects:
        subject.check_classes("gradcam")
        drawn, rows = [], []
        for i, name in enumerate(subject.names):
            heat, logits = interventions.gradcam(subject.model, subject.images[i : i + 1])
            drawn.append(heat / max(float(heat.mean()), 1e-30))
            row = {"image": i, "class": name, "predicted": subject.outputs[logits.argmax()]}
            rows.append(row | {"logit": float(logits.max()), "map": heat.tolist()})
        columns[subject.name], report[subject.name] = [("predicted class", drawn, None)], rows
    over_images(subjects, path, "Grad-CAM", columns, "value / mean")
    return report


def embed(subjects: list[Subject], path: Path, method: str = "pca") -> Report:
    """Pooled features of the images in two dimensions: principal components, or t-SNE (van der Maaten, JMLR 2008).

    Numbers: share of the variance in two components (drawn in units of the features' standard deviation), and accuracy
    of the nearest class mean in all dimensions, each image left out of its own mean.
    """
    panels, report = [], {}
    for subject in subjects:
        if subject.classes != subjects[0].classes:
            raise UserError(f"{subjects[0].name} and {subject.name} have different classes; draw them one by one.")
        subject.check_labels("embed")
        if len(subject.images) < 2:
            raise UserError("embed needs two images or more (--images).")
        points = subject.in_batches(lambda model, images: model.tokens(images)[0])
        points = points - points.mean(0)
        points = points / max(float(np.sqrt((points**2).sum(1).mean())), 1e-30)
        left, singular, _ = np.linalg.svd(points, full_matrices=False)
        variance = float((singular[:2] ** 2).sum() / max((singular**2).sum(), 1e-30))
        nearest, flat = nearest_mean(points, subject.labels), (left * singular)[:, :2]
        if method == "tsne":
            with optional_package("train"):
                from sklearn.manifold import TSNE

            flat = TSNE(init="pca", random_state=0, perplexity=min(30, len(points) / 4)).fit_transform(points)
        facts = f"{100 * variance:.0f} % of the variance, " if method == "pca" else ""
        panels.append((f"{facts}nearest mean {100 * nearest:.1f} %", flat))
        row = {"variance_in_two": variance, "nearest_mean_top1": nearest}
        report[subject.name] = [row | {"points": flat.round(4).tolist(), "labels": subject.labels.tolist()}]
    short, common = shorten_labels([subject.name for subject in subjects])
    panels = [(f"{name}\n{facts}", flat) for name, (facts, flat) in zip(short, panels, strict=True)]
    title = {"pca": "Features, first two principal components", "tsne": "Features, t-SNE"}[method]
    labels = [subject.labels for subject in subjects]
    draw_points(path, f"{title}\n{common}".strip(), panels, labels, subjects[0].classes)
    return report


def nearest_mean(points: np.ndarray, labels: np.ndarray) -> float:
    """Share of points [n, c] nearest to the mean of their own class, computed without the point itself."""
    classes, own = np.unique(labels, return_inverse=True)
    distances = [np.linalg.norm(points - points[labels == label].mean(0), axis=-1) for label in classes]
    distance, place, count = np.stack(distances, axis=-1), np.arange(len(points)), np.bincount(own)[own]
    # Without the point itself, the mean of n points is n / (n - 1) times as far away.
    distance[place, own] = np.where(count == 1, np.inf, distance[place, own] * count / np.maximum(count - 1, 1))
    return float((distance.argmin(-1) == own).mean())
