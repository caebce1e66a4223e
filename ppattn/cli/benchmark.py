"""`benchmark`: models side by side, in processes of their own, round by round."""

from __future__ import annotations

HELP = "Measure speed, memory and MACs of models, cells or an exported folder in one interleaved run."
DTYPES = ("float32", "bfloat16")


def add_arguments(parser) -> None:
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME", help="zoo entries or backbones")
    parser.add_argument("--attentions", nargs="*", default=[], metavar="NAME", help="put each into each backbone given")
    parser.add_argument("--sizes", nargs="*", type=int, default=[224], metavar="PIXELS", help="square input sizes")
    parser.add_argument("--modes", nargs="*", default=["infer"], choices=("infer", "train"), metavar="infer|train")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="bfloat16: an exported --folder only")
    parser.add_argument("--folder", nargs="*", default=[], metavar="DIR", help="exported folders, Paddle or ONNX")
    parser.add_argument("--batch", type=int, default=16, help="images per step (default 16)")
    parser.add_argument("--threads", type=int, help="CPU threads of each process (default: all cores)")
    parser.add_argument("--processes", type=int, default=1, help="training: processes that share the batch")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of every candidate (default 5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a burst (default 1.5)")
    parser.add_argument("--output", required=True, metavar="DIR", help="for benchmark.json, benchmark.csv and curves")


def run(args) -> None:
    from pathlib import Path

    from ppattn import zoo
    from ppattn.errors import UserError

    names = args.models or (["deit_tiny"] if args.attentions else [])
    if not names and not args.folder:
        raise UserError("Name what to measure: --models, --attentions or --folder.")
    for name in names:
        zoo.entry(name)
    if args.dtype == "bfloat16" and names:
        raise UserError("On a CPU Paddle computes models in float32; bfloat16 is for an exported --folder.")
    from ppattn.analysis import bench
    from ppattn.attention import ATTENTIONS

    for name in args.attentions:
        ATTENTIONS.get(name)
    groups = _groups(args, names)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    for title, specs in groups:
        print(f"{title}: {len(specs)} candidates, {args.rounds} rounds in turn", flush=True)
        rows += _measure_group(bench, title, specs, args)
        _write(output, rows)
    if len({row["img_size"] for row in rows if row["engine"] == "dygraph"}) > 1:
        _draw(output, rows)
    print(f"written to {output}")


def _groups(args, names: list[str]) -> list[tuple[str, list]]:
    """What is compared with each other: the same mode and input size."""
    from ppattn.analysis.bench import Spec

    common = {"batch": args.batch, "threads": args.threads}
    groups = []
    for mode in args.modes if names else ():
        for size in args.sizes:
            specs = []
            for name in names:
                for attention in args.attentions or [None]:
                    arguments = {"attention": attention} if attention else {}
                    processes = args.processes if mode == "train" else 1
                    label = f"{name} {attention}" if attention else name
                    specs.append(
                        Spec(
                            label,
                            "dygraph",
                            name,
                            arguments,
                            "",
                            mode,
                            img_size=(size, size),
                            processes=processes,
                            **common,
                        )
                    )
            groups.append((f"{mode} at {size} pixels", specs))
    if args.folder:
        groups.append(("exported folders", _folder_specs(args, common)))
    return groups


def _folder_specs(args, common: dict) -> list:
    from pathlib import Path

    from ppattn.analysis.bench import Spec
    from ppattn.deploy.predictor import Predictor
    from ppattn.errors import UserError

    specs = []
    for folder in args.folder:
        size = tuple(Predictor(folder).preprocess.img_size)
        engine = "onnx" if (Path(folder) / "model.onnx").exists() else "paddle"
        if args.dtype == "bfloat16":
            if engine == "onnx":
                raise UserError(f"{folder} is an ONNX export; bfloat16 is measured on Paddle exports.")
            engine = "paddle_bf16"
        specs.append(Spec(f"{folder} {engine}", engine, folder=str(folder), img_size=size, **common))
    return specs


def _measure_group(bench, title: str, specs: list, args) -> list[dict]:
    """Start all workers of a group, measure them in turn, add the machine's own peak and each row's share of it."""
    from ppattn.errors import UserError

    workers = [bench.Worker(bench.Spec("matrix product", "gemm", batch=1, threads=args.threads))]
    for spec in specs:
        try:
            workers.append(bench.Worker(spec))
        except UserError as error:
            print(f"  left out: {error}", flush=True)
    try:
        if len(workers) == 1:
            raise UserError(f"{title}: none of the candidates can be measured.")
        rows = bench.measure(workers, args.rounds, args.seconds, lambda text: print(f"  {text}", flush=True))
    finally:
        for worker in workers:
            worker.close()
    peak, *rows = rows
    floor = peak["macs"] * peak["images_per_second"]
    for row in rows:
        row["group"] = title
        row["gemm_gflops"] = 2e-9 * floor
        passes = 3 if row["mode"] == "train" else 1
        row["share_of_peak"] = row["macs"] * passes * row["images_per_second"] / floor if row["macs"] else None
        row["against_first"] = bench.ratio(row, rows[0])
        print(
            f"  {row['name']:<28} {row['images_per_second']:8.1f} img/s  {row['ms_per_image']:8.2f} ms"
            f"  x{row['against_first']:.2f} of the first  {row['peak_mb']:6.0f} MB"
            + (f"  {100 * row['share_of_peak']:.0f} % of the GEMM peak" if row["share_of_peak"] else ""),
            flush=True,
        )
    return rows


def _write(output, rows: list[dict]) -> None:
    import csv
    import json
    import platform

    from ppattn.engine.log import environment

    machine = {**environment("benchmark"), "platform": platform.platform()}
    (output / "benchmark.json").write_text(json.dumps({"environment": machine, "rows": rows}, indent=1) + "\n")
    columns = [key for key in rows[0] if key not in ("rounds", "fastest_to_slowest")]
    with (output / "benchmark.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def _draw(output, rows: list[dict]) -> None:
    """Milliseconds per image against tokens, a line per candidate, a picture per mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for mode in dict.fromkeys(row["mode"] for row in rows):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for name in dict.fromkeys(row["name"] for row in rows):
            points = [(r["tokens"], r["ms_per_image"]) for r in rows if r["name"] == name and r["mode"] == mode]
            if len(points) > 1:
                axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.set(xlabel="tokens of the first stage", ylabel="ms per image", title=f"{mode}, float32, CPU")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        figure.savefig(output / f"{mode}.png", dpi=120)
        plt.close(figure)
