"""Measure speed, memory and MACs of models, attentions or exported folders in one interleaved run."""

import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from ppattn import benchmark, zoo
from ppattn.benchmark import Spec
from ppattn.cli.options import check_writable
from ppattn.config import make_config, parse_override
from ppattn.errors import UserError, unknown_name
from ppattn.files.atomic import write_json, write_rows
from ppattn.plots.curves import draw_speeds
from ppattn.runtime.cpu import describe_processor
from ppattn.validation import check_above_zero

FORMATS = {"paddle": "paddle", "onnxruntime": "onnx", "openvino": "onnx", "auto": "both"}  # an engine needs
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def run(args: Namespace) -> None:
    if args.machine:
        print("\n".join(benchmark.machine_report(args.threads)))
        return
    for option in ("batch", "rounds", "threads", "seconds", "sizes", "dim", "heads"):
        check_above_zero(f"--{option}", getattr(args, option))
    if args.attention_options and (args.tokens or not args.attentions):
        raise UserError("--attention-options is for --attentions of models; --tokens ranks them with their defaults.")
    if args.output:
        check_writable(Path(args.output))
    if args.tokens:
        if args.models or args.folder or args.engines or args.dtype:
            raise UserError("--tokens ranks attention layers alone, without --models, --folder, --engines and --dtype.")
        return _rank(args)
    if args.dim or args.heads:
        raise UserError("--dim and --heads are for --tokens; a model has its own.")
    args.seconds = args.seconds or 1.5
    if not args.output:
        raise UserError("Name a folder for the results: --output DIR.")
    names = args.models or (["deit_tiny"] if args.attentions else [])
    if not names and not (args.folder and "infer" in args.modes):
        raise UserError("Name what to measure: --models, --attentions or, in inference, --folder.")
    elsewhere = args.dtype == ["bfloat16"] and ("train" in args.modes or "dygraph" in args.engines)
    if names and "bfloat16" in args.dtype and (elsewhere or "paddle" not in args.engines):
        raise UserError("Only exported models run in bfloat16: --engines paddle, without training.")
    import ppattn

    ppattn.setup(seed=0)
    from ppattn.runtime.environment import environment

    models = [model for name in names for model in _models(name, args.attentions, args.attention_options)]
    output = Path(args.output)
    kinds = product(args.modes if models else (), args.sizes)
    groups = [(f"{mode} at size {size}", list(_specs(args, models, mode, size))) for mode, size in kinds]
    if args.folder:
        groups.append(("exported folders", _folder_specs(args)))
    rows: list[dict] = []
    machine = environment(shlex.join(sys.argv))
    for (title, specs), batch in product(groups, args.batch):
        title = f"{title}, batch {batch}"
        print(f"{title}: {len(specs)} candidates, {args.rounds} rounds", flush=True)
        print("  img/s: median over rounds. xN: median of the per-round speed-up over the first row.", flush=True)
        specs = [replace(spec, batch=batch) for spec in specs]
        measured = benchmark.measure_speeds(title, specs, args.rounds, args.seconds, args.threads)
        print("\n".join(map(_line, measured)), flush=True)
        rows += measured
        write_json(output / "benchmark.json", {"environment": machine, "rows": rows})
        columns = [key for key in rows[0] if key != "rounds"]
        values = [[f"{row[key]:.5g}" if isinstance(row[key], float) else row[key] for key in columns] for row in rows]
        write_rows(output / "benchmark.csv", [columns, *values], "\n")
    draw_speeds(output, rows, describe_processor(machine, args.threads))
    print(*benchmark.speed_summary(rows), f"written to {output}", sep="\n")


def _grid(text: str) -> tuple[int, int]:
    """ "48x64" -> (48, 64); one number is a square."""
    numbers = [int(part) for part in text.split("x") if part.isdecimal()]
    if len(numbers) == 1:
        numbers = [math.isqrt(numbers[0])] * 2
    if len(numbers) != 2 or min(numbers) < 1 or text not in (f"{math.prod(numbers)}", "x".join(map(str, numbers))):
        raise UserError(f"--tokens '{text}' is not a grid of tokens: a square number, or rows and columns as in 48x64.")
    return numbers[0], numbers[1]


def _rank(args: Namespace) -> None:
    """A table of all attentions, or those of --attentions, for each mode and batch."""
    import ppattn

    dim, heads, grid = args.dim or 192, args.heads or 3, _grid(args.tokens)
    if dim % heads:
        raise UserError(f"--dim {dim} is not a multiple of --heads {heads}.")
    ppattn.setup(threads=args.threads, seed=0)
    from ppattn.attention import ATTENTIONS
    from ppattn.runtime.environment import environment

    for name in args.attentions:
        ATTENTIONS.get(name)
    names = list(dict.fromkeys(["softmax", *(args.attentions or ATTENTIONS.list())]))
    machine, rows = environment(shlex.join(sys.argv)), []
    for mode, batch in product(args.modes, args.batch):
        measured = benchmark.measure_layers(grid, dim, heads, batch, mode, names, args.rounds, args.seconds or 0.05)
        print(f"{mode}, batch {batch}, width {dim}, {heads} heads, {describe_processor(machine, args.threads)}")
        print(*benchmark.speed_table(measured), "", sep="\n", flush=True)
        rows += measured
    if args.output:
        write_json(Path(args.output) / "ranking.json", {"environment": machine, "rows": rows})


def _models(name: str, attentions: list[str], given: list[str]) -> list[Spec]:
    """A model as it is, or with each attention and the options that this one has."""
    zoo.model_entry(name)
    if not attentions:
        return [Spec(name, model=name)]
    from ppattn.attention import ATTENTIONS

    known = {attention: ATTENTIONS.get(attention).options() for attention in attentions}
    options = {key: value for item in given for key, value in parse_override(item).items()}
    allowed = set().union(*known.values())
    if others := options.keys() - allowed:
        raise unknown_name("attention option", min(others), allowed)
    models = []
    for attention, own in known.items():
        chosen = {key: value for key, value in options.items() if key in own}
        label = " ".join([name, attention, *(f"{key}={value}" for key, value in chosen.items())])
        models.append(Spec(label, model=name, arguments={"attention": attention, "attention_options": chosen}))
    return models


def _specs(args: Namespace, models: list[Spec], mode: str, size: int) -> Iterator[Spec]:
    """Training of every model, or its inference with every engine; models are exported into the output folder."""
    from ppattn import export

    engines = args.engines if mode == "infer" and args.engines else ["dygraph"]
    for model, engine in product(models, engines):
        plain = replace(model, mode=mode, threads=args.threads, img_size=(size, size))
        if engine == "dygraph":
            yield plain
            continue
        for precision in [PRECISIONS[dtype] for dtype in args.dtype or ["float32"]]:
            name = f"{model.name} {engine} {precision}"
            folder = Path(args.output).resolve() / "exported" / f"{name.replace(' ', '_')}_{size}"
            try:
                built = benchmark.model_to_measure(model.model, img_size=size, **model.arguments)
                export(built, folder, format=FORMATS[engine], precision=precision if engine == "paddle" else "fp32")
            except UserError as error:
                print(f"  left out: {name}: {error}", flush=True)
            else:
                yield replace(plain, name=name, engine=engine, folder=str(folder), precision=precision)


def _folder_specs(args: Namespace) -> list[Spec]:
    """Every exported folder with every engine; dygraph is the model of its config."""
    from ppattn.deploy.predictor import Predictor

    specs: list[Spec] = []
    for folder in args.folder:
        predictor = Predictor(folder)
        plain = Spec("", threads=args.threads, img_size=predictor.preprocess.img_size)
        if "config" in predictor.source:
            model = make_config(predictor.source["config"]).model
            arguments = model.arguments() | {"num_classes": len(predictor.classes)}
            plain = replace(plain, name=f"{model.name} dygraph", model=model.name, arguments=arguments)
        for engine in args.engines or ["dygraph", predictor.engine]:
            if engine != "dygraph":
                for precision in [PRECISIONS[dtype] for dtype in args.dtype] or [predictor.precision]:
                    path = str(Path(folder).resolve())
                    name = f"{folder} {engine} {precision}"
                    specs.append(replace(plain, name=name, engine=engine, folder=path, precision=precision))
            elif plain.model and plain not in specs:
                specs.append(plain)
    return specs


def _line(row: dict) -> str:
    cost = f"  {row['params'] / 1e6:.2f} M parameters  {row['macs'] / 1e9:.2f} GMAC" if row["params"] else ""
    share = f"  {100 * row['share_of_peak']:.0f} % of GEMM peak" if row["share_of_peak"] else ""
    return (
        f"  {row['name']:<28} {row['images_per_second']:8.1f} img/s"
        f" ({row['slowest_round']:.1f} to {row['fastest_round']:.1f})  {row['ms_per_image']:8.2f} ms"
        f"  p50 {row['step_ms_p50']:.2f} p95 {row['step_ms_p95']:.2f} ms a batch"
        f"  x{row['against_first']:.2f} of the first  {row['peak_mb']:6.0f} MB{cost}{share}"
    )
