"""Put the last epoch of trained runs into the package: weights in ppattn/zoo/released, a card, reference logits.

python scripts/release_weights.py runs/cifar10/inline_deit_nano [RUN ...] [--name NAME] [-o data.root=DIR]
    [--about-data TEXT]

A run folder NAME on CIFAR-10 becomes the model NAME_cifar10: in ppattn/zoo/released NAME_cifar10.safetensors (matrices
in float16), NAME_cifar10.md (data, recipe, command, commit, seed, accuracy, limits), an entry in models.yaml, a row in
ppattn/zoo/costs.csv, and in tests/zoo/released.json the logits of the run's own float32 weights for a seeded input. The
last epoch is taken, not the best one, which was chosen by the test images. The card's accuracy is that of the released
file, evaluated here on the test images of the run's data set. A model that is there is replaced.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import yaml
from jinja2 import Template

import ppattn
from ppattn import weights, zoo
from ppattn.cli import guarded
from ppattn.errors import UserError
from ppattn.files.atomic import write_text
from ppattn.files.tables import read_table
from ppattn.runtime.cpu import describe_processor
from ppattn.settings import Config
from ppattn.zoo import table
from scripts import make_model_costs

LIMIT = 25e6  # bytes of all released files together
RENAMED = {"configs/cifar10/half_hour_softmax_deit_nano.yaml": "configs/cifar10/deit_nano_muon_15ep.yaml"}
LOGITS = Path(__file__).resolve().parents[1] / "tests/zoo/released.json"
CARD = Path(__file__).with_name("tables") / "card.md"


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Put every file back where the release of a run fails."""
    released = table.RELEASED.parent
    before = {path: path.read_bytes() for path in (*released.iterdir(), table.COSTS, LOGITS) if path.is_file()}
    try:
        yield
    except BaseException:
        for path in released.iterdir():
            if path.is_file() and path not in before:
                path.unlink()
        for path, content in before.items():
            path.write_bytes(content)
        raise


def release(run: Path, name: str, overrides: list[str], about_data: str) -> str:
    """Write everything about one run, as the model `name` or, if that is empty, its own; returns the name."""
    from ppattn.engine.evaluate import evaluate_split, model_runner
    from ppattn.trained import load_run, open_run

    for file in ("summary.json", "env.json"):
        if not (run / file).is_file():
            raise UserError(f"{run} is not a finished run: it has no {file}.")
    summary, env = (json.loads((run / file).read_text()) for file in ("summary.json", "env.json"))
    (config, model, classes, preprocess), provenance = open_run(run, "latest", overrides)
    if summary["epochs"] != config.train.epochs + config.schedule.cooldown_epochs:
        raise UserError(f"{run} has {summary['epochs']} epochs of {config.train.epochs}.")
    name = name or f"{run.name}_{config.data.name}"
    tensors = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    tensors = {key: array.astype("float16") if array.ndim > 1 else array for key, array in tensors.items()}
    file = table.RELEASED.parent / f"{name}.safetensors"
    settings = config.model_dump() | {"model": {"name": name}, "output": f"runs/{name}", "distill": {}}
    settings["data"] |= {"root": None}
    facts = {"config": settings, "classes": classes, "preprocess": preprocess.to_dict(), "kind": "weights"}
    facts["data"] = provenance.model_dump()["data"] if provenance else {}
    weights.save(file, tensors, facts)
    add_entry(name, config, len(classes), f"released/{file.name}")
    total = sum(path.stat().st_size for path in table.RELEASED.parent.iterdir())
    if total > LIMIT:
        raise UserError(f"The released files have {total / 1e6:.1f} MB together, more than {LIMIT / 1e6:.0f}.")
    make_model_costs.main([name])
    zoo.costs.cache_clear()

    shown, released, _, _ = load_run(name, overrides=overrides)
    result, splits = evaluate_split(model_runner(released), shown, classes, preprocess)
    accuracy, images = result.metrics["top1"], result.metrics["images"]
    if abs(accuracy - summary["top1"]) > max(0.002, 2 / images):
        raise UserError(f"{name} has {100 * accuracy:.2f} %, its run {100 * summary['top1']:.2f} %: other test images?")
    add_entry(name, config, len(classes), f"released/{file.name}", f"{config.data.name} test: {100 * accuracy:.2f} %")
    inputs = np.random.RandomState(0).standard_normal((2, model.in_chans, *model.img_size)).astype("float32")
    logits = json.loads(LOGITS.read_text()) if LOGITS.is_file() else {}
    logits[name] = [[round(float(value), 6) for value in row] for row in model_runner(model)(inputs)]
    LOGITS.write_text(json.dumps(dict(sorted(logits.items())), indent=1) + "\n")
    command, renamed = env["command"], ""
    for old, new in RENAMED.items():  # today's config, and what it was called in the commit
        if old in command:
            command, renamed = command.replace(old, new), old
    facts = {"name": name, "config": config, "summary": summary, "metrics": result.metrics, "env": env}
    facts |= {"costs": zoo.costs()[name], "img_size": model.img_size, "classes": classes, "preprocess": preprocess}
    facts |= {"train": len(splits.train), "about_data": about_data, "megabytes": file.stat().st_size / 1e6}
    facts |= {"command": command, "renamed": renamed, "machine": describe_processor(env, config.train.threads)}
    card = Template(CARD.read_text(encoding="utf-8"), keep_trailing_newline=True).render(facts)
    file.with_suffix(".md").write_text(card)
    return name


def add_entry(name: str, config: Config, classes: int, file: str, note: str = "") -> None:
    """An entry of released/models.yaml with every argument of the model, so that it stays what it is."""
    base, given = zoo.model_entry(config.model.name), {**config.model.arguments(), "num_classes": classes}
    entries = read_table(table.RELEASED)
    entries[name] = {
        "backbone": base.backbone,
        "arguments": {**base.arguments, **given},
        "note": note,
        "weights": {"file": file, "licence": "Apache-2.0"},
    }
    text = yaml.safe_dump(dict(sorted(entries.items())), sort_keys=False, default_flow_style=None, width=120)
    write_text(table.RELEASED, f"# Written by scripts/release_weights.py; models.yaml explains the fields.\n{text}")
    zoo.model_entries.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="finished run folders")
    parser.add_argument("--name", default="", help="of the model, for a single run")
    parser.add_argument("-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--about-data", default="", metavar="TEXT", help="what the card says about the images")
    args = parser.parse_args()
    if args.name and len(args.runs) > 1:
        parser.error("--name is for a single run")
    ppattn.setup(device="cpu")
    for run in args.runs:
        with all_or_nothing():
            name = release(run, args.name, args.override, args.about_data)
        print(f"released as {name}", flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
