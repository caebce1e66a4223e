"""`analyze`: what the attention of a trained model looks like, and two properties that the InLine paper measures."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ppattn.cli import options

HELP = "Pictures and numbers about the attention of a trained model."
ANALYSES = ("maps", "locality", "injectivity")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("analysis", choices=ANALYSES, metavar="|".join(ANALYSES))
    parser.add_argument("--run", required=True, metavar="DIR", help="run folder")
    parser.add_argument("--images", type=options.whole, default=8, help="of the validation split (default 8)")
    options.add_override(parser, "data.root=DIR")
    parser.add_argument("--output", metavar="DIR", help="default: analysis/ in the run folder")


def run(args: Namespace) -> None:
    import json
    from pathlib import Path

    import ppattn

    ppattn.setup(seed=0)
    import paddle

    from ppattn.analysis import maps
    from ppattn.data import build_datasets
    from ppattn.engine.checkpoint import load_run
    from ppattn.errors import UserError

    config, model, _, preprocess = load_run(args.run, overrides=args.override)
    split = build_datasets(config).val
    if not 1 <= args.images <= len(split):
        raise UserError(f"--images = {args.images} is not allowed: the validation split has 1 to {len(split)}.")
    pictures = [split.image(i) for i in range(args.images)]
    x = paddle.to_tensor(preprocess.batch(pictures))
    layers = maps.attention_maps(model, x)
    folder = Path(args.output or Path(args.run) / "analysis")
    folder.mkdir(parents=True, exist_ok=True)
    if args.analysis == "maps":
        _draw_maps(folder / "maps.png", layers, [preprocess.unnormalise(image) for image in x.numpy()])
        rows = [{"layer": name, "grid": hw, "shape": list(weights.shape)} for name, hw, _, weights in layers]
    elif args.analysis == "locality":
        rows = []
        for name, hw, prefix, weights in layers:
            share = maps.local_share(weights, hw, prefix)
            if share:
                rows.append({"layer": name, "local_share": share[0], "uniform": share[1]})
        if not rows:
            raise UserError("locality needs layers whose keys are their own grid; this model reduces all of its keys.")
        _draw_bars(
            folder / "locality.png", rows, "local_share", "share of |weight| in the 3 x 3 neighbourhood", "uniform"
        )
    else:
        rows = [{"layer": name, "confused_pairs": maps.confusions(weights)} for name, _, _, weights in layers]
        _draw_bars(folder / "injectivity.png", rows, "confused_pairs", "confused pairs of queries per image and head")
    path = folder / f"{args.analysis}.json"
    path.write_text(json.dumps({"run": str(args.run), "images": args.images, "layers": rows}, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    print(f"written to {path} and {path.with_suffix('.png')}")


def _draw_bars(path, rows: list[dict], key: str, title: str, line: str | None = None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    places = range(1, len(rows) + 1)
    axes.bar(places, [row[key] for row in rows])
    if line:
        axes.plot(places, [row[line] for row in rows], "k--", label="uniform weights")
        axes.legend()
    axes.set(xlabel="layer", title=title, xticks=list(places))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_maps(path, layers, pictures) -> None:
    """A row per image: the image, then the mean weights over heads of its central query in up to six layers."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from ppattn.analysis.maps import key_grid

    chosen = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, min(6, len(layers))).astype(int))]
    shape = (len(pictures), len(chosen) + 1)
    figure, axes = plt.subplots(*shape, figsize=(1.6 * shape[1], 1.6 * shape[0]), layout="constrained", squeeze=False)
    for i, picture in enumerate(pictures):
        axes[i, 0].imshow(picture)
        for column, (name, (h, w), prefix, weights) in zip(axes[i, 1:], chosen, strict=True):
            windows = len(weights) // len(pictures)
            row = weights[i * windows + windows // 2].mean(0)[prefix + (h // 2) * w + w // 2, prefix:]
            limit = np.abs(row).max()
            column.imshow(row.reshape(key_grid((h, w), row.size)), cmap="RdBu_r", vmin=-limit, vmax=limit)
            column.set_title(name.removesuffix(".attn"), fontsize=7) if i == 0 else None
    for panel in axes.ravel():
        panel.set_axis_off()
    figure.savefig(path, dpi=130)
    plt.close(figure)
