"""Measure speed, memory and MACs of models, cells or exported folders in one interleaved run."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ppattn import benchmark as bench
from ppattn import zoo
from ppattn.benchmark import EXPORTED_BY, Spec, exported
from ppattn.config import make_config, parse_yaml
from ppattn.errors import UserError, unknown
from ppattn.files import write_rows, write_text
from ppattn.runtime import import_paddle
from ppattn.text import picture, processor

ENGINES = ("dygraph", "paddle", "onnx")
DTYPES = ("float32", "bfloat16")
MOST = {"batch": 2**20, "rounds": 10_000, "processes": 1024, "sizes": 2**14, "threads": 4096}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME", help="zoo entries or backbones")
    parser.add_argument("--attentions", nargs="*", default=[], metavar="NAME", help="put each into each backbone given")
    parser.add_argument(
        "--attention-options",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of --attentions, as in landmarks=pool; each goes to those that know it",
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[224], metavar="PIXELS", help="square input sizes")
    parser.add_argument("--modes", nargs="+", default=["infer"], choices=("infer", "train"), metavar="infer|train")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["dygraph"],
        choices=ENGINES,
        metavar="|".join(ENGINES),
        help="inference of --models: as they are, or exported for Paddle Inference or ONNX Runtime",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["float32"],
        choices=DTYPES,
        metavar="float32|bfloat16",
        help="bfloat16: exported Paddle models only",
    )
    parser.add_argument(
        "--folder",
        nargs="*",
        default=[],
        metavar="DIR",
        help="exported folders, each in its own format and precision, compared with their models in dygraph; "
        "export again to further folders for others",
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        default=[],
        choices=EXPORTED_BY,
        metavar="|".join(EXPORTED_BY),
        help="run every --folder with these, and with nothing else (default: its own, and the model in dygraph)",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="images per step (default 16)")
    parser.add_argument("--threads", type=int, help="CPU threads of each process (default: all cores)")
    parser.add_argument("--processes", type=int, default=1, help="training: processes that share the batch")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of every candidate (default 5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a burst (default 1.5)")
    parser.add_argument("--machine", action="store_true", help="measure this machine instead, and say what is slow")
    parser.add_argument("--output", metavar="DIR", help="for benchmark.json, benchmark.csv and curves")


def run(args: Namespace) -> None:
    if args.machine:
        _machine(args)
        return
    if not args.output:
        raise UserError("Name a folder for the results: --output DIR.")
    names = args.models or (["deit_tiny"] if args.attentions else [])
    if not names and not args.folder:
        raise UserError("Name what to measure: --models, --attentions or --folder.")
    for name in names:
        zoo.entry(name)
    _check(args, names)
    import_paddle()  # not `setup`, which the workers call: this process only waits for them
    from ppattn.attention import ATTENTIONS
    from ppattn.environment import environment

    options = _options(args.attention_options, [ATTENTIONS.get(name).options() for name in args.attentions])
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    own = [{"attention": a, "attention_options": o} for a, o in zip(args.attentions, options, strict=True)] or [{}]
    cells = [(name, arguments) for name in names for arguments in own]
    groups = []
    for batch in args.batch:
        one = Namespace(**vars(args) | {"batch": batch})
        of = f", batch {batch}" if len(args.batch) > 1 else ""
        groups += [
            (f"{mode} at {size} pixels{of}", _specs(one, cells, mode, size))
            for mode in (args.modes if names else ())
            for size in args.sizes
        ]
        if args.folder:
            groups.append((f"exported folders{of}", _folder_specs(one)))
    rows: list[dict] = []
    machine = environment(shlex.join(sys.argv))
    for title, specs in groups:
        print(f"{title}: {len(specs)} candidates, {args.rounds} rounds in turn", flush=True)
        print("  img/s is the median over the rounds; xN is the median of the N of each round", flush=True)
        rows += _measure_group(title, specs, args)
        _write(output, rows, machine)
    if len({row["img_size"] for row in rows}) > 1:
        _draw(output, rows, processor(machine, args.threads))
    print(f"written to {output}")


def _machine(args) -> None:
    """Product rate, copy bandwidth and what the settings give, in one interleaved run."""
    rows, advice = bench.machine(args.threads)
    for row in rows:
        if row["macs"] and row["engine"] != "dygraph":
            figure = f"{2e-9 * row['macs'] * row['images_per_second']:8.1f} GFLOP/s"
        elif row["engine"] == "copy":
            figure = f"{1e-9 * bench.COPY_BYTES * row['images_per_second']:8.1f} GB/s"
        else:
            figure = f"{row['images_per_second']:8.1f} img/s"
        print(f"  {row['name']:<42} {figure}")
    print("\n".join(advice))


def _check(args, names: list[str]) -> None:
    """Refuse settings under which nothing, or something else than asked for, would be measured."""
    if names and "float32" not in args.dtype and ("train" in args.modes or "paddle" not in args.engines):
        raise UserError("On a CPU Paddle runs bfloat16 in exported models only: --engines paddle, without training.")
    counts = {"batch": args.batch, "rounds": [args.rounds], "processes": [args.processes], "sizes": args.sizes}
    for option, given in (counts | {"threads": [args.threads] if args.threads is not None else []}).items():
        for value in given:
            if not 1 <= value <= MOST[option]:
                raise UserError(f"--{option} {value} is not allowed: at least 1, at most {MOST[option]:,}.")
    if not 0 < args.seconds <= 3600:
        raise UserError(f"--seconds {args.seconds} is not allowed: above 0, at most 3600.")
    for batch in args.batch if names and "train" in args.modes else ():
        if batch % args.processes:
            raise UserError(f"--batch {batch} cannot be shared equally by {args.processes} processes.")


def _common(args, size) -> dict:
    return {"batch": args.batch, "threads": args.threads, "img_size": (size, size) if isinstance(size, int) else size}


def _options(given: list[str], known: list[dict]) -> list[dict]:
    """KEY=VALUE as options of the mechanisms that know the key."""
    options = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--attention-options {text} is not KEY=VALUE.")
        if not any(key in one for one in known):
            raise unknown("attention option", key, sorted({name for one in known for name in one}))
        options[key], _ = parse_yaml(value, f"The value of {text[:200]!r}")
    return [{key: value for key, value in options.items() if key in one} for one in known]


def _label(model: str, arguments: dict) -> str:
    settings = [f"{key}={value}" for key, value in arguments.get("attention_options", {}).items()]
    return " ".join([model, *([arguments["attention"]] if "attention" in arguments else []), *settings])


def _specs(args, cells: list, mode: str, size: int) -> list:
    """Training of every cell, or its inference with every engine; what is exported for it is kept in the output."""
    specs, common = [], _common(args, size)
    if mode == "train":
        common |= {"mode": "train", "processes": args.processes}
        return [Spec(_label(model, own), model=model, arguments=own, **common) for model, own in cells]
    for model, own in cells:
        for engine in args.engines:
            common |= {"model": model, "arguments": own}
            if engine == "dygraph" and "float32" in args.dtype:
                specs.append(Spec(_label(model, own), **common))
            for dtype in args.dtype if engine == "paddle" else ["float32"] if engine == "onnx" else []:
                kind = "paddle_bf16" if dtype == "bfloat16" else engine
                name = f"{_label(model, own)} {kind}"
                folder = Path(args.output) / "exported" / f"{name.replace(' ', '_')}_{size}"
                run_by = "onnxruntime" if kind == "onnx" else kind
                try:
                    path = exported(folder, kind, model, img_size=size, **own)
                    specs.append(Spec(name, run_by, folder=path, **common))
                except UserError as error:
                    print(f"  left out: {name}: {error}", flush=True)
    return specs


def _folder_specs(args) -> list:
    """Every folder with the engines asked for.

    Default: as it was exported, a bfloat16 one in float32, too, and the model of its config in dygraph.
    """
    from ppattn.deploy.predictor import Predictor

    specs = []
    for folder in args.folder:
        predictor = Predictor(folder)
        common = _common(args, tuple(predictor.preprocess.img_size))
        specs += [Spec(f"{folder} {engine}", engine, folder=str(folder), **common) for engine in args.engine]
        if args.engine:
            continue
        engine, precision = predictor.engine, predictor.precision
        model = make_config(predictor.source["config"]).model if "config" in predictor.source else None
        if model is not None:
            common |= {"model": model.name, "arguments": model.arguments() | {"num_classes": len(predictor.classes)}}
            dygraph = Spec(f"{model.name} dygraph", **common)
            specs += [dygraph] if dygraph not in specs else []
        if precision == "bf16":
            specs.append(Spec(f"{folder} {engine} fp32", f"{engine}_fp32", folder=str(folder), **common))
        specs.append(Spec(f"{folder} {engine} {precision}", engine, folder=str(folder), **common))
    return specs


def _measure_group(title: str, specs: list, args) -> list[dict]:
    """Start all workers of a group, measure them in turn, add the machine's own peak and each row's share of it."""
    machine = [Spec(name, name, batch=1, threads=args.threads) for name in ("gemm", "copy")]
    workers: list = []
    try:
        with ThreadPoolExecutor(2) as pool:  # they get ready side by side, and are measured in turn
            for start in [pool.submit(bench.Worker, spec) for spec in [*machine, *specs]]:
                try:
                    workers.append(start.result())
                except UserError as error:
                    print(f"  left out: {error}", flush=True)
        if [worker.spec for worker in workers[:2]] != machine:
            raise UserError(f"{title}: the speed of the machine itself cannot be measured, see above.")
        if len(workers) == 2:
            raise UserError(f"{title}: none of the candidates can be measured.")
        rows = bench.measure(workers, args.rounds, args.seconds, lambda text: print(f"  {text}", flush=True))
    finally:
        for worker in workers:
            worker.close()
    peak, copy, *rows = rows
    peak_rate = peak["macs"] * peak["images_per_second"] * (args.processes if args.threads else 1)
    for row in rows:
        row["group"] = title
        row["gemm_gflops"] = 2e-9 * peak_rate
        row["copy_gb_per_s"] = 1e-9 * bench.COPY_BYTES * copy["images_per_second"]
        passes = 3 if row["mode"] == "train" else 1
        row["share_of_peak"] = row["macs"] * passes * row["images_per_second"] / peak_rate if row["macs"] else None
        row["against_first"] = bench.ratio(row, rows[0])
        print(
            f"  {row['name']:<28} {row['images_per_second']:8.1f} img/s"
            f" ({row['slowest_round']:.1f} to {row['fastest_round']:.1f})  {row['ms_per_image']:8.2f} ms"
            f"  p50 {row['step_ms_p50']:.2f} p95 {row['step_ms_p95']:.2f} ms a batch"
            f"  x{row['against_first']:.2f} of the first  {row['peak_mb']:6.0f} MB"
            + (f"  {100 * row['share_of_peak']:.0f} % of the GEMM peak" if row["share_of_peak"] else ""),
            flush=True,
        )
    return rows


def _write(output: Path, rows: list[dict], machine: dict) -> None:
    write_text(output / "benchmark.json", json.dumps({"environment": machine, "rows": rows}, indent=1) + "\n")
    columns = [key for key in rows[0] if key != "rounds"]
    values = [[row.get(key) for key in columns] for row in rows]
    shown = [[f"{value:.5g}" if isinstance(value, float) else value for value in line] for line in values]
    write_rows(output / "benchmark.csv", [columns, *shown], "\n")


def _draw(output: Path, rows: list[dict], machine: str) -> None:
    """Milliseconds per image against tokens, a line per candidate, a picture per mode."""
    from matplotlib.ticker import LogLocator

    for mode in dict.fromkeys(row["mode"] for row in rows):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["mode"] == mode and row["tokens"]:
                lines.setdefault(row["name"], []).append((row["tokens"], row["ms_per_image"]))
        lines = {name: sorted(points) for name, points in lines.items() if len(points) > 1}
        if not lines:
            continue
        title = f"{'Training' if mode == 'train' else 'Inference'}, batch {rows[0]['batch']}, {machine}"
        with picture(output / f"{mode}.png", 7, 4.5, title) as figure:
            axes = figure.subplots()
            for name, points in lines.items():
                axes.loglog(*zip(*points, strict=True), marker="o", label=name)
            tokens = sorted({tokens for points in lines.values() for tokens, _ in points})
            axes.set(xlabel="tokens of the first stage", ylabel="ms per image", xticks=tokens)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
