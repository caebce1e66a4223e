"""Measure on CIFAR-10 what linearising costs: results/linearize/runs.json, run folders in runs/linearize.

python -m scripts.studies.linearize_study inline_42 copied_inline_42 --data data/cifar10
python -m scripts.studies.linearize_study --speed linear inline   # seconds per step of every kind of training, in turn
python -m scripts.studies.linearize_study --cost inline_256_42    # speed and memory of finished runs, in turn

`TARGET_SEED` runs `ppattn linearize` for all blocks, `TARGET_half_SEED` for half of them, and `TARGET_long_SEED` trains
for two epochs with Muon; both take the alignment of the first where there is one. With `256` they are for a teacher
with 256 tokens: `256free` uses neither labels nor head, `hybrid_256long_SEED` chooses among HYBRID for 1.7 times the
speed at 1,024 tokens. The others train all blocks of inline for one epoch from copied weights, without alignment:
`copied` with labels alone, `mlp` the same with attentions that start afresh, `logits` with labels and the teacher's
logits, `outputs` with labels and its attention outputs. `scratch` is the teacher's recipe with inline attention and few
epochs. The test images are looked at once, at the end. SIGTERM: exit code 75, and the same command continues.
"""

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import ppattn
from ppattn import cli, weights
from ppattn.benchmark import measure_costs
from ppattn.data import build_datasets
from ppattn.files.atomic import write_json
from ppattn.linearize import ALIGNMENT, TRAINING, Measure
from ppattn.runtime.environment import environment
from ppattn.trained import load_run
from ppattn.zoo import find_weights
from scripts.run_grid import ROOT

RECIPE = "cifar10/deit_nano_muon_15ep"
INLINE = ["train", "-c", RECIPE, "--resume", "auto", "-o", "model.attention=inline"]
HYBRID = ("inline", "window")
TARGETS = ("linear", "inline", "polaformer", "mala", "t5", "window", "hybrid")
STARTS: dict[str, dict] = {"copied": {}, "mlp": {}, "logits": {"logits": 1}, "outputs": {"attention": 1}}  # losses
MUON = ["optimizer.name=muon", "optimizer.momentum=0.95"]
FREE = ["distill.labels=0", "distill.logits=0", "distill.features=1"]
PARTS: dict[str, tuple[list[str], list[str]]] = {  # of `linearize`: options and overrides
    "": (["--epochs", "1"], []),
    "half": (["--epochs", "1", "--blocks", "3"], []),
    "long": (["--epochs", "2"], [*MUON, "optimizer.lr=7.0e-4"]),
    "256": (["--epochs", "1"], []),
    "256long": (["--epochs", "2"], [*MUON, "optimizer.lr=2.0e-3"]),
    "256free": (["--epochs", "2", "--metric", "features"], [*MUON, "optimizer.lr=2.0e-3", *FREE]),
    "256half": (["--epochs", "2", "--blocks", "3"], [*MUON, "optimizer.lr=2.0e-3"]),
}


def names() -> list[str]:
    linearized = [f"{to}{'_' * bool(part)}{part}_{seed}" for to in TARGETS for part in PARTS for seed in (42, 43, 44)]
    return linearized + [f"{start}_inline_{seed}" for start in (*STARTS, "scratch") for seed in (42, 43, 44)]


def command(arguments: list[str]) -> None:
    if code := cli.main(arguments):
        sys.exit(code)


def flat(section: str, values: dict) -> list[str]:
    return [f"{section}.{key}={json.dumps(value)}" for key, value in values.items()]


def from_copies(start: str, folder: Path, teacher: str, common: list[str]) -> list[str]:
    """Arguments of `train` for a student that starts from copied weights, without alignment."""
    source = folder.with_name(f"{start}.safetensors")
    tensors = {n: t for n, t in load_run(teacher)[1].state_dict().items() if start != "mlp" or ".attn." not in n}
    weights.save(source, tensors, {})
    given = [f"model.weights={source}", 'model.allow=["*.attn.*"]', "train.epochs=1"]
    given += [*flat("optimizer", TRAINING["optimizer"]), *flat("schedule", TRAINING["schedule"])]
    if STARTS[start]:
        losses = {"labels": 1, "logits": 0, "attention": 0} | STARTS[start]
        given += [*flat("distill", losses), "distill.temperature=2.0", f"distill.teacher={teacher}"]
    return [*INLINE, *common, *given, f"output={folder}"]


def run(name: str, folder: Path, teacher: str, data: str, threads: int) -> dict:
    """One run of the study; returns what runs.json holds of it."""
    kind, *parts, seed = name.split("_")
    common = [f"data.root={data}", f"train.seed={seed}", f"train.threads={threads}"]
    if kind in TARGETS:
        part = "".join(parts)
        options, overrides = PARTS[part]
        to, fast = (HYBRID, ["--speed", "1.7", "--size", "64"]) if kind == "hybrid" else ((kind,), [])
        for one in to:
            aligned = folder.with_name(f"{one}_256_{seed}" if "256" in part else f"{one}_{seed}") / "linearize/align"
            copy = folder / "linearize" / (f"align_{one}" if kind == "hybrid" else "align")
            if aligned.exists() and not copy.exists():
                shutil.copytree(aligned, copy)
        given = ["--model", teacher, "--to", ",".join(to), "--images", "1000", *options, *fast]
        command(["linearize", *given, "--output", str(folder), "-o", *common, *overrides])
    else:
        common += ["data.holdout=5000", "data.holdout_seed=42", "train.eval_every=1000"]
        scratch = [*INLINE, *common, "train.epochs=3", f"output={folder}"]
        command(from_copies(kind, folder, teacher, common) if kind in STARTS else scratch)
    return {"teacher": teacher, "threads": threads} | result(folder, data, teacher, kind)


def result(folder: Path, data: str, teacher: str, to: str) -> dict:
    """Accuracy on the test images and cosine of the features to the teacher's; and the measurements of `linearize`
    where there are some: also after the copy of the weights alone, and after the alignment of all blocks."""
    whole = [f"data.root={data}", "data.holdout=0"]
    config, model, classes, preprocess = load_run(folder, overrides=whole)
    settings, original, *_ = load_run(teacher)
    splits, summary = build_datasets(config), json.loads((folder / "summary.json").read_text())
    test_top1 = partial(Measure(splits, preprocess, config, 1).score, every_image=True)
    found = {"test_top1": test_top1(model), "teacher_test_top1": test_top1(original), "held_out_top1": summary["top1"]}
    found["test_cosine"] = Measure(splits, preprocess, config, 1, original).score(model, every_image=True)
    found |= {"steps": {"train": summary["steps"]}, "seconds": {"train": summary["seconds"]}}
    if not (report := folder / "linearize" / "report.json").exists():
        return found
    tree = json.loads(report.read_text())
    found |= {key: tree[key] for key in ("front", "chosen", "teacher_saw_held_out_images", "cost", "measured")}
    found["held_out_top1"] = tree["measured"]["final"] if tree["metric"] == "top1" else summary["top1"]
    aligned = [json.loads(path.read_text()) for path in sorted(folder.glob("linearize/align*/summary.json"))]
    for key in ("seconds", "steps"):
        found[key]["align"] = sum(one[key] for one in aligned)
    if to == "hybrid":
        return found
    arguments = settings.model.arguments() | {"attention": to, "num_classes": len(classes)}
    copied = ppattn.create_model(settings.model.name, **arguments)
    weights.load(copied, find_weights(teacher), ["*.attn.*"])
    copied.eval()
    found["copied_test_top1"] = test_top1(copied)
    found["aligned_test_top1"] = test_top1(load_run(folder / "linearize/align", "latest", overrides=whole)[1])
    return found


def speed(targets: list[str], runs: Path, teacher: str, data: str, threads: int) -> dict:
    """Seconds per step of 128 images: training from scratch, alignment and the training at the end, per target."""
    common = [f"data.root={data}", f"train.threads={threads}", "train.max_steps=40", "data.holdout=500"]
    distill = flat("distill", TRAINING["distill"] | {"teacher": teacher})
    alone = flat("distill", ALIGNMENT["distill"] | {"teacher": teacher})
    other = ["patch_embed*", "pos_embed", "*.cpe.*", "*.mlp.*", "*.norm?.*", "norm.*", "head.*"]
    frozen, found = flat("model", {"freeze": other}), {}
    for to in ("softmax", *targets):
        kinds = {"scratch": [f"model.attention={to}"]}
        if to != "softmax":
            start = [f"model.attention={to}", f"model.weights={teacher}", 'model.allow=["*.attn.*"]']
            kinds["align"] = [*start, *alone, *frozen, *flat("optimizer", ALIGNMENT["optimizer"])]
            kinds["train"] = [*start, *distill, *flat("optimizer", TRAINING["optimizer"])]
        for kind, given in kinds.items():
            folder = runs / "speed" / f"{to}_{kind}"
            command(["train", "-c", RECIPE, "-o", *common, *given, f"output={folder}"])
            summary = json.loads((folder / "summary.json").read_text())
            found.setdefault(to, {})[kind] = 128 / summary["images_per_second"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RUN")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--data", default="data/cifar10", metavar="DIR", help="CIFAR-10")
    parser.add_argument("--teacher", default="softmax_deit_nano_cifar10", metavar="NAME|RUN")
    parser.add_argument("--runs", type=Path, default=Path("runs/linearize"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=ROOT / "results/linearize", metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.list:
        return print("\n".join(names()))
    ppattn.setup(threads=args.threads)
    args.results.mkdir(parents=True, exist_ok=True)
    if args.speed:
        found = speed(args.names or [*TARGETS], args.runs, args.teacher, args.data, args.threads)
        facts = {"environment": environment(" ".join(sys.argv)), "seconds_per_step": found}
        return write_json(args.results / "speed.json", facts)
    kept = args.results / "runs.json"
    if args.cost:
        found, (settings, teacher, *_) = json.loads(kept.read_text()), load_run(args.teacher)
        models = {name: load_run(args.runs / name)[0].model for name in args.names}
        models["teacher"] = settings.model
        rows = measure_costs(models, teacher) + measure_costs(models, teacher, 4 * teacher.img_size[0])
        for name in args.names:
            found[name]["cost"] = [row for row in rows if row["name"] in ("teacher", name)]
        return write_json(kept, found)
    for name in args.names:
        if name not in names():
            sys.exit(f"{name} is no run of this study: --list names them.")
        tree = run(name, args.runs / name, args.teacher, args.data, args.threads)
        found = json.loads(kept.read_text()) if kept.is_file() else {}
        write_json(kept, dict(sorted((found | {name: tree}).items())))
        print(f"{name}: {100 * tree['test_top1']:.2f} % on the test images", flush=True)


if __name__ == "__main__":
    main()
