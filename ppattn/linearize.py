"""From a trained softmax model to a cheaper attention: `ppattn linearize`.

1. Alignment: every block gets the new attention, all parameters that fit are copied, and the new layers alone are
   trained to repeat the attention outputs of the teacher on the teacher's own tokens (relative mean squared error).
   Blocks do not see each other there, so this one training fits all of them.
2. Sensitivity: the error of every aligned block, and the accuracy of the teacher with this block alone replaced.
3. Choice: blocks are replaced one by one, each time the one among the least sensitive that keeps most accuracy, until
   the budget or the number of blocks is reached.
4. Training: a short training of the chosen model with labels, the teacher's logits and its attention outputs. The best
   checkpoint is the start of this training if that has a higher accuracy on the held-out images.

Accuracy in steps 2 and 3 is measured on images held out from training. Steps 1 and 4 are ordinary trainings and the
result is an ordinary run folder; each step is resumed where it was stopped.

Sources: alignment on the teacher's inputs as in ViT-AdaLA (arXiv 2603.16063); labels plus attention outputs as in "Copy
the Same, Distill the Difference" (arXiv 2609.35745); a higher learning rate for new parameters as in T^5 (arXiv
2605.02772). Choosing blocks by the accuracy of the task is the second step of JetViT's search (arXiv 2605.26636).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from pydantic import TypeAdapter
from tqdm import tqdm

from ppattn import weights
from ppattn.attention import ATTENTIONS, LayerState
from ppattn.backbones.base import Backbone, Block, recording
from ppattn.benchmark import costs
from ppattn.config import differences, load_config, make_config, merged, override
from ppattn.data import EvalLoader, Preprocess, Splits, build_datasets
from ppattn.data.sources import own_splits
from ppattn.data.splits import Split, Subset
from ppattn.engine.evaluate import evaluate, model_runner
from ppattn.engine.teacher import weights_digest
from ppattn.engine.trainer import train
from ppattn.errors import UserError, reading
from ppattn.files.atomic import write_json
from ppattn.plots.curves import draw_linearized
from ppattn.settings import Config
from ppattn.trained import load_run, open_run
from ppattn.validation import check_above_zero
from ppattn.zoo import all_arguments, create_model

FOLDER = "linearize"  # inside the run folder of the result
BEAM = 3  # blocks that are tried at each step of the choice
# The teacher's own learning rates do not fit.
EVEN: dict[str, Any] = {"layer_decay": None, "lr_scale": {}, "lr_batch": None}
ALIGNMENT = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0} | EVEN
SCHEDULE = {"name": "cosine", "per": "step", "warmup_lr": 0.0, "cooldown_epochs": 0}
TRAINING = {  # of the last step, where no config is given
    "augment": {"progressive_resize": None},
    "optimizer": {"name": "adamw", "lr": 5e-4, "weight_decay": 0.05} | EVEN,
    "schedule": SCHEDULE | {"warmup_epochs": 0.1, "min_lr": 1e-5},
    "train": {"eval_every": 1, "early_stop": None, "max_steps": None, "ema": None},
    "distill": {"labels": 1.0, "logits": 1.0, "temperature": 2.0, "blocks": 0.0, "attention": 1.0},
}


@dataclass(frozen=True)
class Request:
    """Arguments of `linearize`."""

    model: str  # the teacher, see `ppattn.load_run`
    to: str  # the new attention
    budget: float | None = None  # points of top-1 that the replacement may cost on the held-out images
    blocks: int | None = None  # how many to replace; None: as many as the budget allows, or all without a budget
    epochs: int = 3  # of the training at the end
    align_epochs: int = 1  # of the alignment
    images: int = 2000  # held-out images on which blocks are chosen, at most
    new_lr: float = 1.0  # factor on the learning rate of parameters that the teacher does not have
    options: dict[str, Any] = field(default_factory=dict)  # of the new attention


def base_config(model: str, config: str | None, data: str | None, output: str, overrides: list[str]) -> Config:
    """The config that `linearize` works with: a config file's settings, or the teacher's own.

    Args:
        model: the teacher.
        config: a YAML file, or None.
        data: folder or archive of the data; None: as in the config.
        output: the run folder of the result.
        overrides: `section.key=value` items, which go before everything else.
    """
    settings = load_run(model).config
    tree = load_config(config)[0].model_dump() if config else merged(settings.model_dump(), TRAINING)
    if tree["distill"]["teacher"] is None:
        tree["distill"] |= TRAINING["distill"]
    tree["model"] = settings.model.model_dump()
    if data is not None:
        tree["data"]["root"] = data
    tree["data"]["holdout_seed"] = settings.holdout_seed  # whatever train.seed is, the teacher has not seen them
    found = override(tree | {"output": output}, overrides)
    if not found.data.held:
        splits = own_splits(override(found.model_dump(), ["data.holdout=1"]))
        images = min(5000, max(len(splits.train) // 10, len(splits.classes)))
        found = override(found.model_dump(), [f"data.holdout={images}"])
    return found


class Results:
    """Measurements so far, kept in a file so that a stopped call does not repeat them."""

    def __init__(self, path: Path):
        self.path = path
        self.tree: dict[str, Any] = {}
        if path.exists():
            with reading(path, "what linearize measured; remove it to measure again"):
                self.tree = TypeAdapter(dict[str, float | list]).validate_json(path.read_bytes())

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self.tree:
            self.tree[key] = compute()
            write_json(self.path, self.tree)
        return self.tree[key]


@contextmanager
def swapped(teacher: Backbone, student: Backbone, blocks: list[int]) -> Iterator[Backbone]:
    """The teacher with these blocks of the student, until the block ends."""
    layers, names = dict(teacher.named_sublayers()), teacher.block_names()

    def put(source: list[Block]) -> None:
        for i in blocks:
            parent, _, index = names[i].rpartition(".")
            layers[parent][int(index)] = source[i]

    own = teacher.blocks_flat()
    put(student.blocks_flat())
    try:
        yield teacher
    finally:
        put(own)


def linearize(request: Request, base: Config, command: str = "", say: Callable[[str], None] = print) -> dict:
    """Do the steps that are not done yet; returns what linearize/report.json holds.

    Args:
        base: data, augmentation, training and optimizer of the last step; `output` is the run folder of the result.
            The teacher and the steps determine the model and distill sections.
        command: what the user typed, for env.json.
        say: gets a line at a time about the progress.

    Raises:
        UserError: a teacher or an attention that cannot be swapped, data without held-out images, a budget that was
            not met, or a folder that holds something else.
        Preempted: a signal came; the same call continues.
    """
    folder = Path(base.output) / FOLDER
    (settings, teacher, _, preprocess), provenance = open_run(request.model)
    validate_request(request, teacher)
    data = {"mean": list(preprocess.mean), "std": list(preprocess.std)}
    common = merged(base.model_dump(), {"model": settings.model.model_dump(), "data": data})
    splits = build_datasets(make_config(common))
    images = {part: getattr(splits, part).digest() for part in ("train", "val")}
    measure = Measure(splits, preprocess, base, request.images)
    aligned = alignment(request, settings, teacher)
    save_request(folder / "request.json", request, base, {"teacher": weights_digest(teacher), "images": images})
    every = list(range(len(teacher.blocks_flat())))

    def fit(output: Path, changes: dict) -> None:
        if not (output / "summary.json").exists():
            train(make_config(merged(common, changes | {"output": str(output)})), "auto", command)

    say(f"1/4 alignment of {len(every)} blocks, {request.align_epochs} epoch(s)")
    fit(folder / "align", aligned)
    student = load_run(folder / "align", "latest").model
    results = Results(folder / "measured.json")

    def measured(blocks: list[int], every_image: bool = False) -> float:
        with swapped(teacher, student, blocks) as model:
            return measure.top1(model, every_image)

    say("2/4 sensitivity: error of every block, and accuracy with this block alone replaced")
    before = results.get("teacher", lambda: measure.top1(teacher))
    errors = results.get("errors", lambda: measure.errors(teacher, student))
    alone = []
    for i in every:
        alone.append(results.get(f"alone {i}", partial(measured, [i])))
        say(f"  block {i + 1}: error {errors[i]:.4f}, top-1 {100 * alone[i]:.2f} % (teacher {100 * before:.2f} %)")

    say("3/4 choice of the blocks")
    path = search(alone, lambda blocks: results.get(f"blocks {blocks}", partial(measured, blocks)), say)
    chosen = choose(request, path, before)

    say(f"4/4 training with {len(chosen)} of {len(every)} blocks replaced, {request.epochs} epoch(s)")
    start = folder / "start.safetensors"
    if not start.exists():
        with swapped(teacher, student, chosen) as model:
            weights.save(start, model.state_dict(), {})
    fit(Path(base.output), training(request, settings, teacher, student, chosen, start))

    config, model, *_ = load_run(base.output)
    untrained = results.get("untrained", partial(measured, chosen, every_image=True))
    trained = results.get("trained", lambda: measure.top1(model, every_image=True))
    if untrained > trained:
        say(f"  the training lost accuracy, {100 * untrained:.2f} to {100 * trained:.2f} %: the result is its start")
        best = Path(base.output) / "checkpoints/best.safetensors"
        weights.save(best, weights.read(start)[0], weights.read(best)[1] | {"metrics": {"top1": untrained}})

    say("report: accuracy and speed before and after")
    results.get("final", lambda: max(untrained, trained))
    results.get("teacher, every image", lambda: measure.top1(teacher, every_image=True))
    report = {
        "request": asdict(request),
        "teacher_saw_held_out_images": not provenance or provenance.data["train"].sha256 != images["train"],  # or may
        "blocks": teacher.block_names(),
        "chosen": chosen,
        "path": path,
        "measured": results.tree,
        "cost": results.get("cost", lambda: costs({"teacher": settings.model, "result": config.model}, teacher)),
    }
    write_json(folder / "report.json", report)
    draw_linearized(report, folder / "report.png")
    reached = 100 * (results.tree["final"] - results.tree["teacher, every image"])
    if request.budget is not None and -reached > request.budget:
        raise UserError(
            f"The budget of {request.budget:g} points is not met: with {len(chosen)} blocks replaced, top-1 on the "
            f"held-out images changed by {reached:+.2f} points. The run is in {base.output}; more --epochs may help."
        )
    return report


def validate_request(request: Request, teacher: Backbone) -> None:
    """Raise `UserError` for what cannot be swapped or measured, and for out-of-range numbers."""
    teacher.check_images()
    wanted = ATTENTIONS.get(request.to)
    present = [type(block.attn) for block in teacher.blocks_flat()]
    if ATTENTIONS.get("less") in (wanted, *present):
        raise UserError("less cannot be swapped: its layers use the score maps of the layers before them.")
    if not teacher.num_classes:
        raise UserError(
            f"{request.model} has no classifier, whose accuracy shows what a block costs: train one first "
            "(model.weights, model.freeze) and linearise that run."
        )
    if wanted in present:
        raise UserError(f"{request.model} has {request.to} attention already.")
    if request.blocks is not None and not 1 <= request.blocks <= len(present):
        raise UserError(f"--blocks {request.blocks} is not allowed: {request.model} has {len(present)} blocks.")
    for option in ("epochs", "align_epochs", "images", "new_lr"):
        check_above_zero(f"--{option.replace('_', '-')}", getattr(request, option))
    if request.budget is not None and not 0 <= request.budget <= 100:
        raise UserError(f"--budget {request.budget} is not allowed: it is in points, from 0 to 100.")


def save_request(path: Path, request: Request, base: Config, digests: dict) -> None:
    """Save the request; raise `UserError` if the folder is the result of another one, another teacher or other data."""
    asked = json.loads(json.dumps({"request": asdict(request), "config": base.model_dump(), "SHA-256 of": digests}))
    if not path.exists():
        output = path.parents[1]
        if any((output / name).exists() for name in ("checkpoints", "config.yaml", "summary.json")):
            raise UserError(f"{output} holds another run: name another --output.")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asked)
    with reading(path, "what linearize was asked for; name another --output"):
        different = differences(json.loads(path.read_text()), asked)
    if different:
        key, before, now = different[0]
        raise UserError(
            f"{path.parent} was begun with {key} = {before!r}, not {now!r}: name another --output, or repeat the "
            "first call to continue it."
        )


def model_section(request: Request, settings: Config, teacher: Backbone, blocks: list[int]) -> dict:
    """Changes of the config's model: the attention of every block, and options that an attention in use knows."""
    stages: dict[str, list[str]] = {}
    for i, (prefix, block) in enumerate(zip(teacher.block_names(), teacher.blocks_flat(), strict=True)):
        name = request.to if i in blocks else ATTENTIONS.name_of(type(block.attn))
        stages.setdefault(prefix.rpartition(".")[0], []).append(name)
    known = {key for stage in stages.values() for name in stage for key in ATTENTIONS.get(name).options()}
    own = all_arguments(settings.model.name, settings.model.arguments())["attention_options"]
    given = {key: value for key, value in own.items() if key in known}
    options = {"attention": list(stages.values()), "attention_options": given | request.options}
    return options | {"reset_head": False, "allow": [], "freeze": []}


def alignment(request: Request, settings: Config, teacher: Backbone) -> dict:
    """Changes of the config for the alignment: all blocks replaced, everything but the attentions frozen."""
    section = model_section(request, settings, teacher, list(range(len(teacher.blocks_flat()))))
    arguments = settings.model.model_copy(update=section).arguments() | {"num_classes": teacher.num_classes}
    student = create_model(settings.model.name, **arguments)
    section["allow"] = differing(teacher, student)
    section["freeze"] = [name for name, _ in student.named_parameters() if ".attn." not in name]
    distill = {"labels": 0.0, "logits": 0.0, "blocks": 0.0, "attention": 1.0, "inputs": "teacher"}
    return {
        "model": section | {"weights": request.model},
        "distill": distill | {"teacher": request.model},
        "train": {"epochs": request.align_epochs, "eval_every": request.align_epochs, "ema": None, "early_stop": None},
        "augment": {"progressive_resize": None},
        "optimizer": ALIGNMENT,
        "schedule": SCHEDULE | {"warmup_epochs": 0.0},
    }


def training(
    request: Request, settings: Config, teacher: Backbone, student: Backbone, blocks: list[int], start: Path
) -> dict:
    """Changes of the config for the training at the end, which starts from the weights in `start`."""
    chosen = tuple(f"{teacher.block_names()[i]}." for i in blocks)
    new = differing(teacher, student) if request.new_lr != 1 else []
    own = [name for name, _ in student.named_parameters() if name in new and name.startswith(chosen)]
    return {
        "model": model_section(request, settings, teacher, blocks) | {"weights": str(start)},
        "distill": {"teacher": request.model, "inputs": "student"},
        "train": {"epochs": request.epochs},
        "optimizer": {"lr_scale": dict.fromkeys(own, request.new_lr)} if own else {},
    }


def differing(teacher: Backbone, student: Backbone) -> list[str]:
    """Names of tensors that only one of the models has, or both in different shapes."""
    old, new = ({name: t.shape for name, t in model.state_dict().items()} for model in (teacher, student))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


class Measure:
    """Accuracy and errors on the held-out images.

    Args:
        images: how many of them the choice uses; accuracy of the result is measured on all of them.
    """

    def __init__(self, splits: Splits, preprocess: Preprocess, base: Config, images: int):
        self.preprocess, self.data, self.all = preprocess, base.data, splits.val
        drawn = np.random.default_rng(base.train.seed).permutation(len(self.all))[:images]
        self.some = Subset(self.all, np.sort(drawn))

    def loader(self, split: Split) -> EvalLoader:
        size = self.data.eval_batch_size or self.data.batch_size
        loader = EvalLoader(split, self.preprocess, size, num_workers=self.data.num_workers)
        return tqdm(loader, "measuring", unit="batch", leave=False, disable=None)

    def top1(self, model: Backbone, every_image: bool = False) -> float:
        model.eval()
        split = self.all if every_image else self.some
        result = evaluate(model_runner(model), self.loader(split), split)
        assert result is not None  # nothing stops it
        return result.metrics["top1"]

    def errors(self, teacher: Backbone, student: Backbone) -> list[float]:
        """|student - teacher|^2 / |teacher|^2 of every attention's output on the teacher's input."""
        blocks = student.blocks_flat()
        sums = np.zeros([2, len(blocks)])
        with paddle.no_grad():
            for images, *_ in self.loader(self.some):
                with recording(teacher.blocks_flat()) as calls:
                    teacher(paddle.to_tensor(images))
                for i, (block, call) in enumerate(zip(blocks, calls, strict=True)):
                    y = block.attend(call.x, call.hw, LayerState())[0]
                    sums[:, i] += float((y - call.y).square().sum()), float(call.y.square().sum())
        return (sums[0] / sums[1]).tolist()


def search(alone: list[float], top1: Callable[[list[int]], float], say: Callable[[str], None]) -> list[dict]:
    """Replace block after block, each time the one of the `BEAM` least sensitive ones left that keeps most accuracy.

    Args:
        alone: accuracy with one block replaced, per block.
        top1: accuracy with a sorted list of blocks replaced.

    Returns:
        After each step the blocks that are replaced and the accuracy, from none to all of them.
    """
    waiting = sorted(range(len(alone)), key=lambda i: (-alone[i], i))
    path: list[dict] = []
    done: list[int] = []
    while waiting:
        tried = {i: top1(sorted([*done, i])) if done else alone[i] for i in waiting[:BEAM]}
        best = max(tried, key=lambda i: (tried[i], -i))
        waiting.remove(best)
        done = sorted([*done, best])
        path.append({"blocks": done, "top1": tried[best]})
        say(f"  {len(done)} replaced: top-1 {100 * tried[best]:.2f} %")
    return path


def choose(request: Request, path: list[dict], before: float) -> list[int]:
    """The blocks to replace: as many as asked for, or as many as the budget allows before the training."""
    if request.blocks is not None:
        return path[request.blocks - 1]["blocks"]
    if request.budget is None:
        return path[-1]["blocks"]
    fitting = [step["blocks"] for step in path if 100 * (before - step["top1"]) <= request.budget]
    if not fitting:
        lost = 100 * (before - path[0]["top1"])
        raise UserError(
            f"The budget of {request.budget:g} points is not met by any block: block {path[0]['blocks'][0] + 1} costs "
            f"least, {lost:.2f} points. More --align-epochs or another attention may help."
        )
    return fitting[-1]
