"""Measure speed, memory and MACs of models, attentions or exported folders in one interleaved run."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ppattn import zoo
from ppattn.benchmark import COPY_BYTES, GEMM_FLOPS, Spec, Worker, build, measure, ratio
from ppattn.config import make_config, parse_override
from ppattn.errors import UserError, unknown
from ppattn.files.atomic import write_json, write_rows
from ppattn.plots.figure import legend_below, picture, styles
from ppattn.runtime import cpu
from ppattn.runtime.cpu import processor
from ppattn.text import progress

FORMATS = {"paddle": "paddle", "onnxruntime": "onnx", "openvino": "onnx", "auto": "both"}  # an engine needs
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def add_arguments(parser: ArgumentParser) -> None:
    def several(name: str, default: list, **more) -> None:
        parser.add_argument(name, nargs="+" if default else "*", default=default, **more)

    several("--models", [], metavar="NAME", help="zoo entries or backbones")
    several("--attentions", [], metavar="NAME", help="put each into each of --models")
    several("--attention-options", [], metavar="KEY=VALUE", help="of the --attentions that have them: landmarks=pool")
    several("--sizes", [224], type=int, metavar="PIXELS", help="square input sizes")
    several("--modes", ["infer"], choices=("infer", "train"))
    several("--folder", [], metavar="DIR", help="exported folders")
    text = "of inference (default: dygraph, and for a --folder its own); models are exported for the others"
    several("--engines", [], choices=("dygraph", *FORMATS), help=text)
    several("--dtype", [], choices=PRECISIONS, help="of exported models; dygraph is float32")
    several("--batch", [16], type=int, help="images per step (default 16)")
    parser.add_argument("--threads", type=int, help="CPU threads of each process (default: all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of every candidate (default 5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a burst (default 1.5)")
    parser.add_argument("--machine", action="store_true", help="measure this machine instead, and say what is slow")
    parser.add_argument("--output", metavar="DIR", help="for benchmark.json, benchmark.csv and curves")


def run(args: Namespace) -> None:
    if args.machine:
        _machine(args.threads)
        return
    if not args.output:
        raise UserError("Name a folder for the results: --output DIR.")
    names = args.models or (["deit_tiny"] if args.attentions else [])
    if not names and not args.folder:
        raise UserError("Name what to measure: --models, --attentions or --folder.")
    if names and args.dtype == ["bfloat16"] and ("train" in args.modes or "dygraph" in (args.engines or ["dygraph"])):
        raise UserError("Only exported models run in bfloat16: --engines paddle, without training.")
    for option in ("batch", "rounds", "threads", "seconds", "sizes"):
        given = getattr(args, option)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{option} {value} is not allowed: it must be above 0.")
    import ppattn

    ppattn.setup(seed=0)
    from ppattn.runtime.environment import environment

    models = [model for name in names for model in _models(name, args.attentions, args.attention_options)]
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    kinds = product(args.modes if models else (), args.sizes)
    groups = [(f"{mode} at size {size}", list(_specs(args, models, mode, size))) for mode, size in kinds]
    if args.folder:
        groups.append(("exported folders", _folder_specs(args)))
    rows: list[dict] = []
    machine = environment(shlex.join(sys.argv))
    for (title, specs), batch in product(groups, args.batch):
        rows += _measure(f"{title}, batch {batch}", [replace(spec, batch=batch) for spec in specs], args)
        write_json(output / "benchmark.json", {"environment": machine, "rows": rows})
        columns = [key for key in rows[0] if key != "rounds"]
        values = [[f"{row[key]:.5g}" if isinstance(row[key], float) else row[key] for key in columns] for row in rows]
        write_rows(output / "benchmark.csv", [columns, *values], "\n")
    _draw(output, rows, processor(machine, args.threads))
    print(*_fastest(rows), f"written to {output}", sep="\n")


def _models(name: str, attentions: list[str], given: list[str]) -> list[tuple[str, str, dict]]:
    """(label, model, arguments): a model as it is, or with each attention and those of the options that it has."""
    zoo.entry(name)
    if not attentions:
        return [(name, name, {})]
    from ppattn.attention import ATTENTIONS

    known = {attention: ATTENTIONS.get(attention).options() for attention in attentions}
    options: dict[str, Any] = {}
    for item in given:
        options |= parse_override(item)
    allowed = set().union(*known.values())
    if others := options.keys() - allowed:
        raise unknown("attention option", min(others), allowed)
    models = []
    for attention, own in known.items():
        chosen = {key: value for key, value in options.items() if key in own}
        label = " ".join([name, attention, *(f"{key}={value}" for key, value in chosen.items())])
        models.append((label, name, {"attention": attention, "attention_options": chosen}))
    return models


def _specs(args: Namespace, models: list[tuple[str, str, dict]], mode: str, size: int) -> Iterator[Spec]:
    """Training of every model, or its inference with every engine; models are exported into the output folder."""
    from ppattn import export

    engines = args.engines if mode == "infer" and args.engines else ["dygraph"]
    for (label, model, own), engine in product(models, engines):
        common: dict[str, Any] = {"model": model, "arguments": own, "threads": args.threads, "img_size": (size, size)}
        if engine == "dygraph":
            yield Spec(label, mode=mode, **common)
            continue
        for dtype in args.dtype or ["float32"]:
            precision = PRECISIONS[dtype]
            name = f"{label} {engine} {precision}"
            folder = Path(args.output).resolve() / "exported" / f"{name.replace(' ', '_')}_{size}"
            try:
                built = build(model, img_size=size, **own)
                export(built, folder, format=FORMATS[engine], precision=precision if engine == "paddle" else "fp32")
            except UserError as error:
                print(f"  left out: {name}: {error}", flush=True)
            else:
                yield Spec(name, engine, folder=str(folder), precision=precision, **common)


def _folder_specs(args: Namespace) -> list[Spec]:
    """Every exported folder with every engine; dygraph is the model of its config."""
    from ppattn.deploy.predictor import Predictor

    specs: list[Spec] = []
    for folder in args.folder:
        predictor = Predictor(folder)
        common: dict[str, Any] = {"threads": args.threads, "img_size": tuple(predictor.preprocess.img_size)}
        if "config" in predictor.source:
            model = make_config(predictor.source["config"]).model
            arguments = model.arguments() | {"num_classes": len(predictor.classes)}
            common |= {"model": model.name, "arguments": arguments}
        for engine in args.engines or ["dygraph", predictor.engine]:
            if engine != "dygraph":
                for precision in [PRECISIONS[dtype] for dtype in args.dtype] or [predictor.precision]:
                    path = str(Path(folder).resolve())
                    name = f"{folder} {engine} {precision}"
                    specs.append(Spec(name, engine, folder=path, precision=precision, **common))
            elif "model" in common and (dygraph := Spec(f"{model.name} dygraph", **common)) not in specs:
                specs.append(dygraph)
    return specs


def _measure(title: str, specs: list[Spec], args: Namespace) -> list[dict]:
    """Measure a group in turn and report each row as a share of the machine's peak."""
    print(f"{title}: {len(specs)} candidates, {args.rounds} rounds", flush=True)
    print("  img/s: median over rounds. xN: median of the per-round speed-up over the first row.", flush=True)
    machine = [Spec(engine, engine, batch=1, threads=args.threads) for engine in ("gemm", "copy")]
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(spec))) for spec in machine]
        with progress("starting", len(specs)) as begin:
            for spec in specs:
                begin(spec.name)
                try:
                    workers.append(stack.enter_context(closing(Worker(spec))))
                except UserError as error:
                    print(f"  left out: {error}", flush=True)
        if len(workers) == 2:
            raise UserError(f"{title}: none of the candidates can be measured.")
        gemm, copy, *rows = measure(workers, args.rounds, args.seconds)
    peak = GEMM_FLOPS * gemm["images_per_second"]
    for row, worker in zip(rows, workers[2:], strict=True):
        row |= {"macs": None, "tokens": None, "group": title, "attention": None}
        if model := worker.spec.model:
            row |= _facts(worker.spec) | {"attention": zoo.attention_of(model, worker.spec.arguments)}
        row["gemm_gflops"] = 1e-9 * peak
        row["copy_gb_per_s"] = 1e-9 * COPY_BYTES * copy["images_per_second"]
        flops = 2 * row["macs"] * (3 if row["mode"] == "train" else 1) if row["macs"] else None
        row["share_of_peak"] = flops * row["images_per_second"] / peak if flops else None
        row["against_first"] = ratio(row, rows[0])
        print(
            f"  {row['name']:<28} {row['images_per_second']:8.1f} img/s"
            f" ({row['slowest_round']:.1f} to {row['fastest_round']:.1f})  {row['ms_per_image']:8.2f} ms"
            f"  p50 {row['step_ms_p50']:.2f} p95 {row['step_ms_p95']:.2f} ms a batch"
            f"  x{row['against_first']:.2f} of the first  {row['peak_mb']:6.0f} MB"
            + (f"  {100 * row['share_of_peak']:.0f} % of GEMM peak" if flops else ""),
            flush=True,
        )
    return rows


def _facts(spec: Spec) -> dict[str, Any]:
    """The size that the model was built for, MACs of an input, and the tokens of the first stage."""
    from ppattn import cost

    model: Any = build(spec.model, **spec.arguments | {"img_size": list(spec.img_size)})
    block = model.blocks[0] if hasattr(model, "blocks") else model.stages[0].blocks[0]
    height, width = getattr(model, "grid", None) or block.attn.spec.grid
    return {"img_size": "x".join(map(str, model.img_size)), "macs": cost.macs(model), "tokens": height * width}


def _fastest(rows: list[dict]) -> list[str]:
    """Which engine is the fastest, for every export that several ran; a hint where only Paddle did."""
    exports: dict[tuple, list[dict]] = {}
    for row in (row for row in rows if row["engine"] in FORMATS):
        label = row["name"].removesuffix(f" {row['engine']} {row['precision']}")
        exports.setdefault((label, row["group"], row["precision"]), []).append(row)
    lines = []
    for (label, group, _), own in exports.items():
        if len(own) > 1:
            last, *_, best = sorted(own, key=lambda row: row["images_per_second"])
            gain = f"{ratio(best, last):.2f} times as fast as {last['engine']}"
            lines.append(f"{label}, {group}: {best['engine']} is the fastest, {gain}")
    if exports and not lines and all(row["engine"] == "paddle" for own in exports.values() for row in own):
        advice = "`export --format both`, then --engines paddle onnxruntime openvino"
        lines.append(f"Another engine may be faster, most of all for small models: {advice}.")
    return lines


def _draw(output: Path, rows: list[dict], machine: str) -> None:
    """Milliseconds per image against tokens, a line per candidate with several sizes, a picture per mode."""
    from matplotlib.ticker import LogLocator

    for mode, batch in dict.fromkeys((row["mode"], row["batch"]) for row in rows):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            if (row["mode"], row["batch"]) == (mode, batch) and row["tokens"]:
                lines.setdefault(row["name"], {})[row["tokens"]] = row["ms_per_image"]
        lines = {name: points for name, points in lines.items() if len(points) > 1}
        if not lines:
            continue
        title = f"{'Training' if mode == 'train' else 'Inference'}, batch {batch}, {machine}"
        file = f"{mode}.png" if batch == rows[0]["batch"] else f"{mode}_batch_{batch}.png"
        style = styles({row["name"]: row["attention"] for row in rows if row["name"] in lines})
        with picture(output / file, 7, 5, title) as figure:
            axes = figure.subplots()
            for name, points in lines.items():
                axes.loglog(*zip(*sorted(points.items()), strict=True), marker="o", label=name, **style[name])
            tokens = sorted(set().union(*lines.values()))
            axes.set(xlabel="tokens of the first stage", ylabel="ms per image", xticks=tokens)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.grid(alpha=0.3)
            legend_below(figure)


def _machine(threads: int | None) -> None:
    """Print what this machine and this Paddle reach, what is slow and how to correct it."""
    kernel = Spec("copy", "copy", batch=1, threads=threads)
    training = Spec("", model="deit_nano", mode="train", batch=64, img_size=(32, 32), threads=threads)
    gflops, gbytes, images = (1e-9 * GEMM_FLOPS, "GFLOP/s"), (1e-9 * COPY_BYTES, "GB/s"), (1.0, "img/s")
    candidates = [
        (replace(kernel, name="product, Paddle after setup()", engine="gemm"), gflops),
        (replace(kernel, name="product, Paddle's defaults", engine="gemm", settings="none"), gflops),
        (replace(kernel, name="product, numpy", engine="numpy_product"), gflops),
        (kernel, gbytes),
        (replace(training, name="training deit_nano, setup()"), images),
        (replace(training, name="training deit_nano, compiled kernels off", settings="plain"), images),
        (replace(training, name="training deit_nano, Paddle's defaults", settings="none"), images),
    ]
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(spec))) for spec, _ in candidates]
        rows = measure(workers, 3, 1.0)
    for row, (_, (scale, unit)) in zip(rows, candidates, strict=True):
        print(f"  {row['name']:<42} {scale * row['images_per_second']:8.1f} {unit}")
    print(f"Processor: {cpu.cpuinfo('model name') or 'unknown'}, {cpu.available_cores()} cores for this process.")
    print("\n".join(workers[0].ready["setup"]))
    setup, _, numpy, _, compiled, plain, _ = rows
    product_share, gain = ratio(setup, numpy), ratio(compiled, plain)
    if product_share < cpu.SLOW:
        print(
            f"Paddle's product runs at {100 * product_share:.0f} % of numpy's speed: this Paddle does not use all "
            "vector instructions of the processor. Install a version that ppattn is tested with."
        )
    if gain < 1.1:
        print(
            f"The compiled kernels give only {gain:.2f} times the speed of the plain form; the line above says "
            "whether they are on, and what they need."
        )
    if product_share >= cpu.SLOW and gain >= 1.1:
        print("Nothing is slow.")
