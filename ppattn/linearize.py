"""From a trained softmax model to a cheaper attention: `ppattn linearize`.

1. Alignment: every block gets the new attention, all parameters that fit are copied, and the new layers alone are
   trained to repeat the attention outputs of the teacher on the teacher's own tokens (relative mean squared error).
   Blocks do not see each other there, so this one training fits all of them.
2. Sensitivity: the error of every aligned block, and the accuracy of the teacher with this block alone replaced.
3. Choice: blocks are replaced one by one, each time the one among the least sensitive that keeps most accuracy, until
   the budget or the number of blocks is reached.
4. Training: a short training of the chosen model with labels, the teacher's logits and its attention outputs.

Accuracy in steps 2 and 3 is that on images held out from training. Steps 1 and 4 are ordinary trainings and the result
is an ordinary run folder; each step is resumed where it was stopped.

Sources: alignment on the teacher's inputs as in ViT-AdaLA (arXiv 2603.16063); labels plus attention outputs as in "Copy
the Same, Distill the Difference" (arXiv 2609.35745); a higher learning rate for new parameters as in T^5 (arXiv
2605.02772). Choosing blocks by the accuracy of the task is the second step of JetViT's search (arXiv 2605.26636).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppattn import weights
from ppattn.config import make_config
from ppattn.errors import UserError
from ppattn.files import write_json
from ppattn.settings import Config
from ppattn.zoo import create_model

if TYPE_CHECKING:
    from paddle import nn

    from ppattn.backbones import Backbone
    from ppattn.data import Splits

FOLDER = "linearize"  # inside the run folder of the result
BEAM = 3  # blocks that are tried at each step of the choice
ALIGNMENT = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}
TRAINING = {  # of the last step, where no config is given
    "optimizer": {"name": "adamw", "lr": 5e-4, "weight_decay": 0.05},
    "schedule": {"name": "cosine", "warmup_epochs": 0.1, "min_lr": 1e-5},
    "train": {"eval_every": 1, "early_stop": None, "max_steps": None, "ema": None},
    "distill": {"labels": 1.0, "logits": 1.0, "temperature": 2.0, "blocks": 0.0, "attention": 1.0},
}
PIXELS = (1, 2, 4)  # sizes of the table of speeds, in multiples of the pixels of the model's own size


@dataclass(frozen=True)
class Request:
    """What to do.

    Attributes:
        model: the teacher, see `ppattn.load_run`.
        to: the new attention.
        budget: points of top-1 that the replacement may cost on the held-out images, or None.
        blocks: how many blocks to replace; None: as many as the budget allows, or all of them without a budget.
        epochs: of the training at the end.
        align_epochs: of the alignment.
        images: held-out images on which blocks are chosen, at most.
        new_lr: factor on the learning rate of parameters that the teacher does not have.
        options: of the new attention.
    """

    model: str
    to: str
    budget: float | None = None
    blocks: int | None = None
    epochs: int = 3
    align_epochs: int = 1
    images: int = 2000
    new_lr: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


def base_config(model: str, config: str | None, data: str | None, output: str, overrides: list[str]) -> Config:
    """What `linearize` works with: a config file's settings, or those that the teacher was trained with.

    Args:
        model: the teacher.
        config: a YAML file, or None.
        data: folder or archive of the data, or None for that of the config.
        output: the run folder of the result.
        overrides: `section.key=value` items, which go before everything else.
    """
    from ppattn.config import load_config, override
    from ppattn.data import build_datasets
    from ppattn.trained import load_run
    from ppattn.zoo import entries

    settings = load_run(model)[0]
    tree = load_config(config)[0].model_dump() if config else merged(settings.model_dump(), TRAINING)
    if tree["distill"]["teacher"] is None:
        tree["distill"] |= TRAINING["distill"]
    tree["model"] = settings.model.model_dump()
    if data is not None:
        published = model in entries() and entries()[model].published
        tree["data"] |= {"root": data, "name": "folder" if published and not config else tree["data"]["name"]}
    found, _ = override(tree | {"output": output}, overrides)
    if not found.data.holdout:
        images = min(5000, len(build_datasets(found).train) // 10)
        found, _ = override(found.model_dump(), [f"data.holdout={images}"])
    return found


class Results:
    """What was measured so far, kept in a file so that a stopped call does not measure it again."""

    def __init__(self, path: Path):
        self.path = path
        self.tree: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self.tree:
            self.tree[key] = compute()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.tree)
        return self.tree[key]


@dataclass
class Swap:
    """Teacher, aligned student and a third model that takes its blocks from either of them."""

    teacher: Backbone
    student: Backbone
    hybrid: Backbone

    def replace(self, blocks: list[int]) -> Backbone:
        """The hybrid with these blocks of the student and the others of the teacher."""
        layers = dict(self.hybrid.named_sublayers())
        pairs = zip(self.teacher.block_list(), self.student.block_list(), strict=True)
        for i, (name, (old, new)) in enumerate(zip(self.hybrid.blocks_in_order(), pairs, strict=True)):
            parent, _, index = name.rpartition(".")
            layers[parent][int(index)] = new if i in blocks else old
        return self.hybrid


def linearize(request: Request, base: Config, command: str = "", say: Callable[[str], None] = print) -> dict:
    """Do the steps that are not done yet; returns what linearize/report.json holds.

    Args:
        base: data, augmentation, training and optimizer of the last step; `output` is the run folder of the result.
            The model and distill sections are those of the teacher and of the steps.
        command: what the user typed, for env.json.
        say: gets a line at a time about the progress.

    Raises:
        UserError: a teacher or an attention that cannot be swapped, data without held-out images, a budget that was
            not met, or a folder that holds something else.
        Preempted: a signal came; the same call continues.
    """
    from ppattn.data import build_datasets
    from ppattn.engine.trainer import train
    from ppattn.trained import load_run

    folder = Path(base.output) / FOLDER
    settings, teacher, classes, preprocess = load_run(request.model)
    count = len(teacher.block_list())
    check(request, base, teacher)
    remember(folder / "request.json", request, base)
    data = {"mean": list(preprocess.mean), "std": list(preprocess.std)}
    common = merged(base.model_dump(), {"model": settings.model.model_dump(), "data": data})

    say(f"1/4 alignment of {count} blocks, {request.align_epochs} epoch(s)")
    every = list(range(count))
    tree = merged(common, alignment(request, settings, teacher, folder / "align"))
    aligned = folder / "align" / "summary.json"
    if not aligned.exists():
        train(make_config(tree), "auto", command)

    swap = Swap(teacher, load_run(folder / "align", "latest")[1], load_run(request.model)[1])
    splits = build_datasets(make_config(common))
    measure = Measure(splits, preprocess, base, request.images)
    results = Results(folder / "measured.json")

    def measured(blocks: list[int]) -> float:
        return measure.top1(swap.replace(blocks))

    say("2/4 sensitivity: error of every block, and accuracy with this block alone replaced")
    before = results.get("teacher", lambda: measure.top1(teacher))
    errors = results.get("errors", lambda: measure.errors(swap))
    alone = []
    for i in every:
        alone.append(results.get(f"alone {i}", partial(measured, [i])))
        say(f"  block {i + 1}: error {errors[i]:.4f}, top-1 {100 * alone[i]:.2f} % (teacher {100 * before:.2f} %)")

    say("3/4 choice of the blocks")
    path = search(alone, lambda blocks: results.get(f"blocks {blocks}", partial(measured, blocks)), say)
    chosen = choose(request, path, before)

    say(f"4/4 training with {len(chosen)} of {count} blocks replaced, {request.epochs} epoch(s)")
    start = folder / "start.safetensors"
    if not start.exists():
        weights.save(start, swap.replace(chosen).state_dict(), {})
    fresh = new_parameters(teacher, swap.student, chosen)
    tree = merged(common, training(request, settings, teacher, chosen, start, fresh))
    if not (Path(base.output) / "summary.json").exists():
        train(make_config(tree), "auto", command)

    say("report: accuracy and speed before and after")
    config, final, *_ = load_run(base.output)
    results.get("final", lambda: measure.top1(final, every_image=True))
    results.get("teacher, every image", lambda: measure.top1(teacher, every_image=True))
    report = {
        "request": asdict(request),
        "teacher_saw_held_out_images": saw_held_out(settings, base),
        "blocks": teacher.blocks_in_order(),
        "chosen": chosen,
        "path": path,
        "measured": results.tree,
        "cost": results.get("cost", lambda: costs(settings, config, teacher)),
    }
    write_json(folder / "report.json", report)
    draw(report, folder / "report.png")
    reached = 100 * (results.tree["final"] - results.tree["teacher, every image"])
    if request.budget is not None and -reached > request.budget:
        raise UserError(
            f"The budget of {request.budget:g} points is not met: with {len(chosen)} blocks replaced, top-1 on the "
            f"held-out images changed by {reached:+.2f} points. The run is in {base.output}; more --epochs may help."
        )
    return report


def check(request: Request, base: Config, teacher: Backbone) -> None:
    """Raise `UserError` for what cannot be swapped or measured."""
    from ppattn.attention import ATTENTIONS

    count, wanted = len(teacher.block_list()), ATTENTIONS.get(request.to)
    for cls in {wanted, *(type(block.attn) for block in teacher.block_list())}:
        if cls is ATTENTIONS.get("less"):
            raise UserError("less cannot be swapped: its layers use the score maps of the layers before them.")
    if any(type(block.attn) is wanted for block in teacher.block_list()):
        raise UserError(f"{request.model} has {request.to} attention already.")
    if request.blocks is not None and not 1 <= request.blocks <= count:
        raise UserError(f"--blocks {request.blocks} is not allowed: {request.model} has {count} blocks.")
    if not base.data.holdout:
        raise UserError("Blocks are chosen on held-out training images: data.holdout must be above 0.")


def remember(path: Path, request: Request, base: Config) -> None:
    """Write down what was asked for; raise `UserError` if the folder is the result of another request."""
    asked = json.loads(json.dumps({"request": asdict(request), "config": base.model_dump()}))
    if path.exists():
        before = json.loads(path.read_text())
        for part in asked:
            for key in asked[part]:
                if before[part].get(key) != asked[part][key]:
                    raise UserError(
                        f"{path.parent} was begun with {part} {key} = {before[part].get(key)!r}, not "
                        f"{asked[part][key]!r}: name another --output, or repeat the first call to continue it."
                    )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asked)


def merged(tree: dict, changes: dict) -> dict:
    """A config tree with changed sections; keys that are not named stay."""
    return {
        key: value | changes.get(key, {}) if isinstance(value, dict) else changes.get(key, value)
        for key, value in tree.items()
    }


def attention_names(model: Backbone, to: str, blocks: list[int]) -> list[list[str]]:
    """The attention of every block, stage by stage, with `to` in the given ones."""
    from ppattn.attention import ATTENTIONS

    names = {ATTENTIONS.get(name): name for name in ATTENTIONS.list()}
    stages: dict[str, list[str]] = {}
    for i, (prefix, block) in enumerate(zip(model.blocks_in_order(), model.block_list(), strict=True)):
        stages.setdefault(prefix.rpartition(".")[0], []).append(to if i in blocks else names[type(block.attn)])
    return list(stages.values())


def attention_options(request: Request, given: dict, names: list[list[str]]) -> dict:
    """Options of the teacher that an attention in use still knows, and those asked for."""
    from ppattn.attention import ATTENTIONS

    known = {key for stage in names for name in stage for key in ATTENTIONS.get(name).options()}
    return {key: value for key, value in given.items() if key in known} | request.options


def model_section(request: Request, settings: Config, teacher: Backbone, blocks: list[int]) -> dict:
    names = attention_names(teacher, request.to, blocks)
    options = attention_options(request, settings.model.attention_options, names)
    return {"attention": names, "attention_options": options, "reset_head": False, "allow": [], "freeze": []}


def alignment(request: Request, settings: Config, teacher: Backbone, output: Path) -> dict:
    """Changes of the config for the alignment: all blocks replaced, everything but the attentions frozen."""
    section = model_section(request, settings, teacher, list(range(len(teacher.block_list()))))
    arguments = settings.model.model_copy(update=section).arguments() | {"num_classes": teacher.num_classes}
    student = create_model(settings.model.name, **arguments)
    old, new = (shapes(model) for model in (teacher, student))
    section["allow"] = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    section["freeze"] = [name for name, _ in student.named_parameters() if ".attn." not in name]
    distill = {"labels": 0.0, "logits": 0.0, "blocks": 0.0, "attention": 1.0, "inputs": "teacher"}
    return {
        "model": section | {"weights": request.model},
        "distill": distill | {"teacher": request.model},
        "train": {"epochs": request.align_epochs, "eval_every": request.align_epochs, "ema": None, "early_stop": None},
        "optimizer": ALIGNMENT,
        "schedule": {"name": "cosine", "warmup_epochs": 0.0, "cooldown_epochs": 0},
        "output": str(output),
    }


def training(
    request: Request, settings: Config, teacher: Backbone, blocks: list[int], start: Path, fresh: list[str]
) -> dict:
    """Changes of the config for the training at the end; `fresh` are the parameters with a rate of their own."""
    return {
        "model": model_section(request, settings, teacher, blocks) | {"weights": str(start)},
        "distill": {"teacher": request.model, "inputs": "student"},
        "train": {"epochs": request.epochs},
        "optimizer": {"lr_scale": dict.fromkeys(fresh, request.new_lr)} if request.new_lr != 1 else {},
    }


def shapes(model: Backbone) -> dict[str, list[int]]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def new_parameters(teacher: Backbone, student: Backbone, blocks: list[int]) -> list[str]:
    """Parameters of the replaced blocks that the teacher does not have, or has in another shape."""
    old, prefixes = shapes(teacher), [f"{student.blocks_in_order()[i]}." for i in blocks]
    own = {name: p.shape for name, p in student.named_parameters() if name.startswith(tuple(prefixes))}
    return [name for name, shape in own.items() if old.get(name) != shape]


class Measure:
    """Accuracy and errors on the held-out images.

    Args:
        images: how many of them the choice uses; accuracy of the result is measured on all of them.
    """

    def __init__(self, splits: Splits, preprocess: Any, base: Config, images: int):
        from ppattn.data.splits import Subset

        self.preprocess, self.data = preprocess, base.data
        self.all = splits.val
        drawn = np.random.default_rng(base.train.seed).permutation(len(self.all))[:images]
        self.some = Subset(self.all, np.sort(drawn))

    def _loader(self, every_image: bool = False) -> Any:
        from ppattn.data import EvalLoader

        split = self.all if every_image else self.some
        size = self.data.eval_batch_size or self.data.batch_size
        return EvalLoader(split, self.preprocess, size, num_workers=self.data.num_workers)

    def top1(self, model: nn.Layer, every_image: bool = False) -> float:
        from ppattn.evaluation import evaluate, model_runner

        model.eval()
        result = evaluate(model_runner(model), self._loader(every_image), len(self.all if every_image else self.some))
        assert result is not None  # nothing stops it
        return result.metrics["top1"]

    def errors(self, swap: Swap) -> list[float]:
        """|student - teacher|^2 / |teacher|^2 of every attention's output on what the teacher's attention gets."""
        import paddle

        from ppattn.attention import LayerState
        from ppattn.backbones.base import recorded_attention

        swap.student.eval()
        sums = np.zeros([2, len(swap.teacher.block_list())])
        with paddle.no_grad():
            for images, *_ in self._loader():
                with recorded_attention(swap.teacher) as calls:
                    swap.teacher(paddle.to_tensor(images))
                for i, (block, call) in enumerate(zip(swap.student.block_list(), calls, strict=True)):
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
    left = sorted(range(len(alone)), key=lambda i: (-alone[i], i))
    path: list[dict] = []
    while left:
        done = path[-1]["blocks"] if path else []
        tried = [(alone[i] if not done else top1(sorted([*done, i])), -i) for i in left[:BEAM]]
        accuracy, negative = max(tried)
        left.remove(-negative)
        path.append({"blocks": sorted([*done, -negative]), "top1": accuracy})
        say(f"  {len(path[-1]['blocks'])} replaced: top-1 {100 * accuracy:.2f} %")
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


def saw_held_out(settings: Config, base: Config) -> bool:
    """Whether the teacher may have been trained on the held-out images."""
    data = ("name", "holdout")
    same = all(getattr(settings.data, key) == getattr(base.data, key) for key in data)
    return not (same and settings.train.seed == base.train.seed)


def costs(settings: Config, config: Config, teacher: Backbone) -> list[dict]:
    """Parameters, MACs, images/s and memory of teacher and result at 1, 2 and 4 times the pixels, measured in turn."""
    from ppattn import cost
    from ppattn.benchmark import Spec, Worker, measure

    rows = []
    for factor in PIXELS:
        stride = max(teacher.strides)
        size = tuple(round(side * factor**0.5 / stride) * stride for side in teacher.img_size)
        specs = [
            Spec(
                name,
                model=section.name,
                arguments=section.arguments() | {"num_classes": teacher.num_classes},
                img_size=size,
                batch=max(1, 32 // factor),
            )
            for name, section in (("teacher", settings.model), ("result", config.model))
        ]
        workers: list[Worker] = []
        try:
            for spec in specs:
                workers.append(Worker(spec))
            measured = measure(workers, rounds=3, seconds=0.5)
        finally:
            for worker in workers:
                worker.close()
        for spec, row in zip(specs, measured, strict=True):
            model = create_model(spec.model, **spec.arguments | {"img_size": list(size)})
            keys = ("name", "img_size", "images_per_second", "step_mb")
            rows.append({key: row[key] for key in keys} | {"params": cost.params(model), "macs": cost.macs(model)})
    return rows


def summary(report: dict) -> str:
    """The result as a table for people."""
    measured, count = report["measured"], len(report["blocks"])
    lines = [
        f"{len(report['chosen'])} of {count} blocks have {report['request']['to']} attention: "
        + ", ".join(str(i + 1) for i in report["chosen"]),
        f"top-1 on the held-out images: {100 * measured['teacher, every image']:.2f} % before, "
        f"{100 * measured['final']:.2f} % after",
    ]
    if report["teacher_saw_held_out_images"]:
        lines.append("The teacher may have been trained on the held-out images; the first figure is then too high.")
    lines.append(f"{'':8} {'size':>9} {'parameters':>12} {'GMACs':>8} {'images/s':>9} {'memory':>9}")
    for row in report["cost"]:
        lines.append(
            f"{row['name']:8} {row['img_size']:>9} {row['params']:>12,} {row['macs'] / 1e9:>8.3f} "
            f"{row['images_per_second']:>9.1f} {row['step_mb']:>6.0f} MB"
        )
    return "\n".join(lines)


def draw(report: dict, path: Path) -> None:
    """Error and accuracy per block, and accuracy against the number of replaced blocks."""
    from ppattn.text import picture

    measured, count = report["measured"], len(report["blocks"])
    blocks, before = range(1, count + 1), 100 * measured["teacher"]
    with picture(path, 12, 3.6, f"{report['request']['model']} to {report['request']['to']}") as figure:
        left, middle, right = figure.subplots(1, 3)
        left.bar(blocks, measured["errors"], color="tab:blue")
        left.set(title="error of the aligned attention", xlabel="block", ylabel="relative mean squared error")
        middle.bar(blocks, [100 * measured[f"alone {i}"] - before for i in range(count)], color="tab:orange")
        middle.set(title="this block alone replaced", xlabel="block", ylabel="change of top-1, points")
        right.plot([0, *blocks], [before, *(100 * step["top1"] for step in report["path"])], "o-", label="aligned only")
        after = 100 * measured["final"]
        right.plot(len(report["chosen"]), after, "*", markersize=14, color="tab:green", label="after the training")
        right.axhline(before, color="grey", linestyle="--", linewidth=1)
        right.set(title="accuracy on held-out images", xlabel="replaced blocks", ylabel="top-1 %")
        right.legend()
        for axes in (left, middle, right):
            axes.grid(alpha=0.3)
