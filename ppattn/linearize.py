"""From a trained softmax model to cheaper attentions: `ppattn linearize`.

1. Alignment, once for each new attention: every block gets it, all parameters that fit are copied, and the new layers
   alone are trained to repeat the attention outputs of the teacher on the teacher's own tokens (relative mean squared
   error). Blocks do not see each other there, so this one training fits all of them.
2. Sensitivity: the error of every aligned block, and the score of the teacher with this block alone replaced.
3. Choice: blocks are replaced one by one, each time the one among the cheapest that keeps most of the score: a front of
   loss against time, from which the budget, the speed or the number of blocks picks. With several attentions or a
   speed, cheap means least loss per millisecond saved, with the time measured here at the wanted size.
4. Training: a short training of the chosen model with labels, the teacher's logits and its attention outputs; without
   labels on the final features and the attention outputs. Its start is the result if that has a higher score.

The score is top-1, or the cosine of the final features to the teacher's, on images held out from training. Steps 1 and
4 are ordinary trainings and the result is an ordinary run folder; each step is resumed where it was stopped.

Sources: alignment as in ViT-AdaLA (arXiv 2603.16063); labels plus attention outputs as in "Copy the Same, Distill the
Difference" (arXiv 2609.35745); a higher learning rate for new parameters as in T^5 (arXiv 2605.02772); blocks chosen by
the task's own metric as in JetViT (arXiv 2605.26636) and Distill-then-Replace (arXiv 2601.11667).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any, Literal, NamedTuple

import numpy as np
import paddle
from tqdm import tqdm

from ppattn import weights
from ppattn.attention import ATTENTIONS, LayerState
from ppattn.attention.window import WindowAttention
from ppattn.backbones.base import AttentionCall, Backbone, Block, recording_blocks
from ppattn.benchmark import measure_costs
from ppattn.config import config_differences, load_config, make_config, merged_config, override_config
from ppattn.data import EvalLoader, Preprocess, Splits, build_datasets
from ppattn.data.check import guess_data
from ppattn.data.sources import FIXED, own_splits
from ppattn.data.splits import Split, Subset
from ppattn.engine.evaluate import compare_features, evaluate, model_runner
from ppattn.engine.teacher import compare_data, weights_digest
from ppattn.engine.trainer import train
from ppattn.errors import UserError, reading_untrusted, unknown_name
from ppattn.files.atomic import write_json
from ppattn.files.tables import read_table
from ppattn.plots.curves import draw_linearized
from ppattn.settings import Config
from ppattn.trained import load_run, open_run
from ppattn.validation import check_above_zero
from ppattn.zoo import create_model, model_arguments

FOLDER = "linearize"  # inside the run folder of the result
BEAM = 3  # blocks that are tried at each step of the choice
IMAGES, FEATURE_IMAGES = 2000, 256  # held-out images for the choice
ROUNDS = 5  # of measuring the time of an attention
Blocks = dict[int, str]  # replaced blocks, counted from 0, and their new attentions
ALIGNMENT, TRAINING, GIVEN = read_table(Path(__file__).with_suffix(".yaml")).values()


class Move(NamedTuple):
    """A block that may be replaced."""

    block: int
    name: str  # of the attention
    alone: float  # score of the teacher with this block alone replaced
    saved: float  # milliseconds


@dataclass(frozen=True)
class Request:
    """Arguments of `linearize`."""

    model: str  # the teacher, see `ppattn.load_run`
    to: list[str]  # the new attentions; every block gets one of them or keeps its own
    budget: float | None = None  # largest loss on the held-out images, in points of top-1 or of the cosine
    blocks: int | None = None  # to replace; None: as many as the budget or the speed asks for, or all
    speed: float | None = None  # how many times faster the result should be
    size: int | None = None  # side in pixels of the images for the time; None: the model's
    metric: Literal["top1", "features"] | None = None  # the score; None: top-1 if there is a classifier
    epochs: int = 3  # of the training at the end
    align_epochs: int = 1
    images: int | None = None  # held-out images for the choice, at most; None: 2,000, or 256 to compare features
    new_lr: float = 1.0  # factor on the learning rate of parameters that the teacher does not have
    options: dict[str, Any] = field(default_factory=dict)  # of the new attentions

    def part(self, name: str) -> str:
        """What tells the folder and the figures of a new attention from those of the others, if there are any."""
        return f" {name}" if len(self.to) > 1 else ""


def base_config(model: str, config: str | None, data: str | None, output: str, overrides: list[str]) -> Config:
    """A YAML file's settings, or the teacher's own, with `overrides`, other `data` and the run folder of the result."""
    if ignored := [item for item in overrides if item.startswith(tuple(GIVEN))]:
        raise UserError(f"-o {ignored[0]} has no effect in linearize: see --to, --options, --epochs and --model.")
    settings, _, classes, _ = load_run(model)
    tree = load_config(config)[0].model_dump() if config else merged_config(settings.model_dump(), TRAINING)
    if tree["distill"]["teacher"] is None:
        tree["distill"] |= TRAINING["distill"]
    if not classes:
        tree["data"]["labels"] = False
        tree["distill"] |= {"labels": 0.0, "logits": 0.0, "features": 1.0}
    tree["model"] = settings.model.model_dump()
    if data is not None:
        tree["data"] |= {"root": data} | (guess_data(Path(data)) if tree["data"]["name"] in FIXED else {})
    tree["data"]["holdout_seed"] = settings.holdout_seed  # whatever train.seed is, the teacher has not seen them
    found = override_config(tree | {"output": output}, overrides)
    if found.data.held:
        return found
    train = own_splits(override_config(found.model_dump(), ["data.holdout=1"])).train
    images = min(5000, max(len(train) // 10, len(set(train.labels))))
    batch = max(1, min(found.data.batch_size, len(train) - images))  # a small folder is one batch
    accumulate = min(found.train.accumulate, max(1, (len(train) - images) // batch))
    fitted = {"data.holdout": images, "data.batch_size": batch, "train.accumulate": accumulate}
    return override_config(found.model_dump(), [f"{key}={value}" for key, value in fitted.items()])


class Results:
    """Measurements so far, kept in a file so that a stopped call does not repeat them."""

    def __init__(self, path: Path):
        self.path = path
        with reading_untrusted(path, "what linearize measured; remove it to measure again"):
            self.tree: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self.tree:
            self.tree[key] = compute()
            write_json(self.path, self.tree)
        return self.tree[key]


@contextmanager
def swapped(teacher: Backbone, blocks: dict[int, Block]) -> Iterator[Backbone]:
    """The teacher, which has these blocks in place of its own until the context ends."""
    layers, own = dict(teacher.named_sublayers()), teacher.blocks_flat()
    places = [name.rpartition(".") for name in teacher.block_names()]
    try:
        for i, block in blocks.items():
            layers[places[i][0]][int(places[i][2])] = block
        yield teacher
    finally:
        for i in blocks:
            layers[places[i][0]][int(places[i][2])] = own[i]


def linearize(request: Request, base: Config, command: str = "", say: Callable[[str], None] = print) -> dict:
    """Do the steps that are not done yet; returns what linearize/report.json holds.

    `base` has data, augmentation, training and optimizer of the last step, and in `output` the run folder of the
    result; `command`, what the user typed, is for env.json; `say` gets a line at a time about the progress.

    Raises `UserError` for what cannot be swapped or measured, a budget that was not met, and a folder that holds
    something else; `Preempted` after a signal: the same call continues.
    """
    folder = Path(base.output) / FOLDER
    (settings, teacher, classes, preprocess), provenance = open_run(request.model)
    validate_request(request, teacher)
    data = {"mean": list(preprocess.mean), "std": list(preprocess.std)}
    common = merged_config(base.model_dump(), {"model": settings.model.model_dump(), "data": data})
    by_features = (request.metric or ("top1" if teacher.num_classes else "features")) == "features"
    splits = build_datasets(make_config(common))
    compare_data(f"The teacher {request.model}", base, splits, classes, preprocess)  # before hours of alignment
    images = {part: getattr(splits, part).digest() for part in ("train", "val")}
    measure = Measure(splits, preprocess, base, request.images, load_run(request.model)[1] if by_features else None)
    students, aligned = {}, {}
    for name in request.to:
        students[name], aligned[name] = alignment(request, name, settings, teacher)
        if request.blocks or request.budget is not None or request.speed:
            model_section(request, settings, teacher, {0: name})  # refuses options that contradict each other
    results, count = Results(folder / "measured.json"), len(teacher.blocks_flat())
    points, unit = (1, "cosine {:.4f}") if by_features else (100, "top-1 {:.2f} %")

    def show(score: float) -> str:
        return unit.format(points * score)

    def fit(output: Path, changes: dict) -> None:
        if not (output / "summary.json").exists():
            train(make_config(merged_config(common, changes | {"output": str(output)})), "auto", command)

    def times() -> dict:
        found = milliseconds(teacher, students, (request.size, request.size) if request.size else teacher.img_size)
        check_speed(request.speed, found, request.to)
        return found

    time = results.tree.get("milliseconds") or times()  # before the folder is made: another request may follow
    save_request(folder / "request.json", request, base, {"teacher": weights_digest(teacher), "images": images})
    results.get("milliseconds", lambda: time)
    for name in request.to:
        say(f"1/4 alignment of {count} blocks, {name}, {request.align_epochs} epoch(s)")
        output = folder / f"align{request.part(name)}".replace(" ", "_")
        fit(output, aligned[name])
        students[name] = load_run(output, "latest")[1]

    def hybrid(blocks: Blocks) -> AbstractContextManager[Backbone]:
        return swapped(teacher, {i: students[name].blocks_flat()[i] for i, name in blocks.items()})

    def measured(blocks: Blocks, every_image: bool = False) -> float:
        with hybrid(blocks) as model:
            return measure.score(model, every_image)

    say("2/4 sensitivity: error of every block, and score with this block alone replaced")
    before, moves = results.get("teacher", lambda: measure.score(teacher)), list[Move]()
    for name in request.to:
        part = request.part(name)
        errors = results.get(f"errors{part}", partial(measure.errors, teacher, students[name]))
        for i in range(count):
            alone = results.get(f"alone {i}{part}", partial(measured, {i: name}))
            moves.append(Move(i, name, alone, time["teacher"][i] - time[name][i]))
            say(f"  block {i + 1}{part}: error {errors[i]:.4f}, {show(alone)} (teacher {show(before)})")

    say("3/4 choice of the blocks")
    timed = request.speed is not None or len(request.to) > 1

    def tried(blocks: Blocks) -> float:
        listed = [f"{i} {blocks[i]}" for i in sorted(blocks)] if timed else sorted(blocks)
        return results.get(f"blocks {listed}", partial(measured, blocks))

    path = []
    for step in search(moves, before, timed, tried):
        step["loss"] = points * (before - step["score"])
        step["milliseconds"] = time["model"] - step.pop("saved")
        say(f"  {len(step['blocks'])} replaced, {step['milliseconds']:.1f} ms: {show(step['score'])}")
        path.append(step)
    chosen = choose(request, path, time["model"])

    say(f"4/4 training with {len(chosen)} of {count} blocks replaced, {request.epochs} epoch(s)")
    start = folder / "start.safetensors"
    if not start.exists():
        with hybrid(chosen) as model:
            weights.save(start, model.state_dict(), {})
    fit(Path(base.output), training(request, settings, teacher, students, chosen, start))

    config, model, *_ = load_run(base.output)
    untrained = results.get("untrained", partial(measured, chosen, every_image=True))
    trained = results.get("trained", lambda: measure.score(model, every_image=True))
    if untrained > trained:
        say(f"  the training lost, {show(untrained)} to {show(trained)}: the result is its start")
        best = Path(base.output) / "checkpoints/best.safetensors"
        metrics = {"cosine" if by_features else "top1": untrained}
        weights.save(best, weights.read(start)[0], weights.read(best)[1] | {"metrics": metrics})
        model = load_run(base.output)[1]

    say("report: score and speed before and after")
    final = results.get("final", lambda: max(untrained, trained))
    whole = results.get("teacher, every image", lambda: measure.score(teacher, every_image=True))
    if len(set(splits.train.labels)) > 1 and not splits.classes:
        for key, one in (("teacher", teacher), ("result", model)):
            results.get(f"20 nearest neighbours, {key}", partial(measure.neighbours, one, splits.train))
    models = {"teacher": settings.model, "result": config.model}
    none = {"blocks": {}, "loss": 0.0, "milliseconds": time["model"]}
    report = {
        "request": asdict(request),
        "metric": "features" if by_features else "top1",
        "teacher_saw_held_out_images": not provenance or provenance.data["train"].sha256 != images["train"],  # or may
        "blocks": teacher.block_names(),
        "chosen": chosen,
        "front": [none, *({key: step[key] for key in none} for step in path)],
        "measured": results.tree,
        "cost": results.get("cost", lambda: measure_costs(models, teacher, request.size)),
    }
    write_json(folder / "report.json", report)
    draw_linearized(report, folder / "report.png")
    lost = points * (whole - final)
    if request.budget is not None and lost > request.budget:
        became = f"with {len(chosen)} blocks replaced, {show(whole)} became {show(final)} (held-out images)"
        raise UserError(f"The budget of {request.budget:g} is not met: {became} in {base.output}. Try more --epochs.")
    return report


def validate_request(request: Request, teacher: Backbone) -> None:
    """Raise `UserError` for what cannot be swapped or measured, and for out-of-range numbers."""
    teacher.check_images()
    count, own = len(teacher.blocks_flat()), {type(block.attn) for block in teacher.blocks_flat()}
    wanted = {ATTENTIONS.get(name): name for name in request.to}
    if len(wanted) < len(request.to):
        raise UserError(f"--to {','.join(request.to)} is not allowed: every attention once.")
    if ATTENTIONS.get("less") in {*wanted, *own}:
        raise UserError("less cannot be swapped: its layers use the score maps of the layers before them.")
    for cls in own & wanted.keys():
        raise UserError(f"{request.model} has {wanted[cls]} attention already.")
    known = {option for cls in wanted for option in cls.options()}
    for option in request.options.keys() - known:
        raise unknown_name("attention option", option, known)
    if request.metric == "top1" and not teacher.num_classes:
        raise UserError(f"--metric top1 is not allowed: {request.model} has no classifier.")
    if request.blocks is not None and not 1 <= request.blocks <= count:
        raise UserError(f"--blocks {request.blocks} is not allowed: {request.model} has {count} blocks.")
    for option in ("epochs", "align_epochs", "images", "new_lr", "speed", "size"):
        check_above_zero(f"--{option.replace('_', '-')}", getattr(request, option))
    if request.budget is not None and not 0 <= request.budget <= 100:
        raise UserError(f"--budget {request.budget} is not allowed: it is in points, from 0 to 100, or of the cosine.")


def save_request(path: Path, request: Request, base: Config, digests: dict) -> None:
    """Save the request; raise `UserError` if the folder is the result of another one, another teacher or other data."""
    asked = json.loads(json.dumps({"request": asdict(request), "config": base.model_dump(), "SHA-256 of": digests}))
    if not path.exists():
        if any((path.parents[1] / name).exists() for name in ("checkpoints", "config.yaml", "summary.json")):
            raise UserError(f"{path.parents[1]} holds another run: name another --output.")
        write_json(path, asked)
    with reading_untrusted(path, "what linearize was asked for; name another --output"):
        different = config_differences(json.loads(path.read_text()), asked)
    for key, before, now in different:
        raise UserError(f"{path.parent} was begun with {key} = {before!r}, not {now!r}: name another --output.")


def model_section(request: Request, settings: Config, teacher: Backbone, blocks: Blocks) -> dict:
    """Changes of the config's model: the attention of every block, and the options of new and of kept attentions."""
    stages: dict[str, list[str]] = {}
    for i, (prefix, block) in enumerate(zip(teacher.block_names(), teacher.blocks_flat(), strict=True)):
        stages.setdefault(prefix.rpartition(".")[0], []).append(blocks.get(i) or ATTENTIONS.name_of(type(block.attn)))
    own = model_arguments(settings.model.name, settings.model.arguments())["attention_options"]
    asked = {name: request.options if name in blocks.values() else own for stage in stages.values() for name in stage}
    wanted = {name: {k: asked[name].get(k, v) for k, v in ATTENTIONS.get(name).options().items()} for name in asked}
    given = {key: wanted[name][key] for name in asked for key in asked[name].keys() & wanted[name].keys()}
    for name, values in wanted.items():
        for key in (key for key in values if values[key] != given.get(key, values[key])):
            both = f"The blocks with {name} would get {key} = {given[key]!r} from the others"
            raise UserError(f"{both}: give both the same {key} by --options, or replace all blocks.")
    return {"attention": [*stages.values()], "attention_options": given, "reset_head": False, "allow": [], "freeze": []}


def alignment(request: Request, name: str, settings: Config, teacher: Backbone) -> tuple[Backbone, dict]:
    """The model with all blocks replaced, untrained, and changes of the config to train its attentions alone."""
    section = model_section(request, settings, teacher, dict.fromkeys(range(len(teacher.blocks_flat())), name))
    arguments = settings.model.model_copy(update=section).arguments() | {"num_classes": teacher.num_classes}
    student = create_model(settings.model.name, **arguments)
    student.eval()
    for attn in (block.attn for block in student.blocks_flat()):
        if isinstance(attn, WindowAttention) and attn.window_size >= max(attn.spec.grid):
            grid = "{} x {}".format(*attn.spec.grid)
            measured = f"a window of {attn.window_size} covers the {grid} tokens on which the loss is measured"
            raise UserError(f"window attention changes nothing: {measured}. Make it smaller: --options.")
    section["allow"] = differing(teacher, student)
    section["freeze"] = [name for name, _ in student.named_parameters() if ".attn." not in name]
    epochs = {"epochs": request.align_epochs, "eval_every": request.align_epochs}
    changes = merged_config(ALIGNMENT, {"distill": {"teacher": request.model}, "train": epochs})
    return student, changes | {"model": section | {"weights": request.model}}


def training(
    request: Request, settings: Config, teacher: Backbone, students: dict[str, Backbone], blocks: Blocks, start: Path
) -> dict:
    """Changes of the config for the training at the end, which starts from the weights in `start`."""
    new = {name: differing(teacher, student) if request.new_lr != 1 else [] for name, student in students.items()}
    own = [key for i, name in blocks.items() for key in new[name] if key.startswith(f"{teacher.block_names()[i]}.")]
    trained = {name for student in students.values() for name, _ in student.named_parameters()}
    return {
        "model": model_section(request, settings, teacher, blocks) | {"weights": str(start)},
        "distill": {"teacher": request.model, "inputs": "student"},
        "train": {"epochs": request.epochs},
        "optimizer": {"lr_scale": {key: request.new_lr for key in own if key in trained}} if own else {},
    }


def differing(teacher: Backbone, student: Backbone) -> list[str]:
    """Names of tensors that only one of the models has, or both in different shapes."""
    old, new = ({name: t.shape for name, t in model.state_dict().items()} for model in (teacher, student))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


class Measure:
    """Score and errors on the held-out images, of which the choice uses `count`, the score of the result all;
    accuracy, or features compared with the `reference`, a copy of the teacher."""

    def __init__(
        self, splits: Splits, preprocess: Preprocess, base: Config, count: int | None, reference: Backbone | None = None
    ):
        self.preprocess, self.data, self.all, self.reference = preprocess, base.data, splits.val, reference
        count = count or (IMAGES if reference is None else FEATURE_IMAGES)
        self.drawn = lambda count: np.random.default_rng(base.train.seed).permutation(count)  # the same every time
        self.some = Subset(self.all, np.sort(self.drawn(len(self.all))[:count]))

    def loader(self, split: Split) -> EvalLoader:
        size = self.data.eval_batch_size or self.data.batch_size
        loader = EvalLoader(split, self.preprocess, size, num_workers=self.data.num_workers)
        return tqdm(loader, "measuring", unit="batch", leave=False, disable=None)

    def score(self, model: Backbone, every_image: bool = False) -> float:
        """Top-1, or the cosine of the features to those of the reference."""
        model.eval()
        split = self.all if every_image else self.some
        if self.reference is None:
            result = evaluate(model_runner(model), self.loader(split), split)
        else:
            result = compare_features(self.reference, model, self.loader(split), split)
        assert result is not None  # nothing stops it
        return result.score

    def neighbours(self, model: Backbone, train: Split) -> float:
        """Accuracy of the 20 nearest of some training images, by the cosine of the pooled features."""
        parts = []
        for split in (Subset(train, np.sort(self.drawn(len(train))[:IMAGES])), self.all):
            found = [(model_runner(model)(images), labels) for images, labels, _ in self.loader(split)]
            features, labels = (np.concatenate(part) for part in zip(*found, strict=True))
            parts.append((features / np.linalg.norm(features, axis=1, keepdims=True), labels))
        (known, known_labels), (asked, labels) = parts
        nearest = known_labels[np.argsort(-asked @ known.T, axis=1, kind="stable")[:, :20]]
        return float(np.mean([np.bincount(row).argmax() == label for row, label in zip(nearest, labels, strict=True)]))

    def errors(self, teacher: Backbone, student: Backbone) -> list[float]:
        """|student - teacher|^2 / |teacher|^2 of every attention's output on the teacher's input."""
        blocks = student.blocks_flat()
        sums = np.zeros([2, len(blocks)])
        with paddle.no_grad():
            for images, *_ in self.loader(self.some):
                with recording_blocks(teacher.blocks_flat()) as calls:
                    teacher(paddle.to_tensor(images))
                for i, (block, call) in enumerate(zip(blocks, calls, strict=True)):
                    y = block.attend(call.x, call.hw, LayerState())[0]
                    sums[:, i] += float((y - call.y).square().sum()), float(call.y.square().sum())
        return (sums[0] / sums[1]).tolist()


def milliseconds(teacher: Backbone, students: dict[str, Backbone], size: tuple[int, int]) -> dict:
    """Milliseconds for one image of a size: of the model, and of every block's attention in the teacher and students.

    They take turns, and each has its least time: other work only adds. A stage's blocks of one attention are alike.
    """
    image = paddle.randn([1, teacher.in_chans, *size])

    def seconds(run: Callable[[], paddle.Tensor]) -> float:
        return timeit(lambda: run().flatten()[-1].item(), number=1)  # reading a number waits for the device

    def attend(block: Block, call: AttentionCall) -> paddle.Tensor:
        return block.attend(call.x, call.hw, LayerState())[0]

    with paddle.no_grad():
        with recording_blocks(teacher.blocks_flat()) as calls:
            teacher(image)
        runs: dict[str, list] = {"model": [partial(teacher.forward, image)]}
        for name, model in {"teacher": teacher, **students}.items():
            runs[name] = [partial(attend, *pair) for pair in zip(model.blocks_flat(), calls, strict=True)]
        rounds = [{name: [seconds(run) for run in own] for name, own in runs.items()} for _ in range(1 + ROUNDS)]
    least = {name: 1e3 * np.min([one[name] for one in rounds[1:]], axis=0) for name in runs}  # the first warms up
    blocks = zip(teacher.block_names(), teacher.blocks_flat(), strict=True)
    stages = np.array([f"{name.rpartition('.')[0]} {type(block.attn).__name__}" for name, block in blocks])
    found: dict[str, Any] = {"model": least.pop("model").item()}
    return found | {name: [own[stages == stage].min().item() for stage in stages] for name, own in least.items()}


def check_speed(speed: float | None, time: dict, names: Sequence[str]) -> None:
    """Raise `UserError` if the fastest attention in every block does not reach the speed."""
    saved = np.maximum(0.0, time["teacher"] - np.min([time[name] for name in names], axis=0)).sum()
    if speed is not None and speed > (most := time["model"] / (time["model"] - saved)):
        raise UserError(f"--speed {speed:g} is not reached: {most:.2f} is the most. Try a larger --size.")


def search(moves: list[Move], before: float, timed: bool, score: Callable[[Blocks], float]) -> Iterator[dict]:
    """Replace block after block, each time one of the `BEAM` cheapest moves left: the one that costs least.

    A move costs the score (`before`: the teacher's) that it takes, or, if `timed`, that divided by the time it saves;
    those that save none come last, and a replaced block may still get a faster attention. Yields after each step the
    blocks replaced with their attentions, the score, and the milliseconds saved.
    """
    done, now = dict[int, Move](), before

    def price(move: Move, lost: float) -> tuple:
        saved = move.saved - (done[move.block].saved if move.block in done else 0.0)
        if not timed or saved <= 0:
            return timed, lost, move.block
        return False, lost / saved if lost > 0 else lost * saved, move.block

    def alone(move: Move) -> tuple:
        return price(move, (done[move.block].alone if move.block in done else before) - move.alone)

    while left := [m for m in moves if m.block not in done or (timed and m.saved > done[m.block].saved)]:
        scored = {}
        for move in sorted(left, key=alone)[:BEAM]:
            blocks = {i: m.name for i, m in (done | {move.block: move}).items()}
            scored[move] = score(blocks) if done else move.alone
        best = min(scored, key=lambda move: price(move, now - scored[move]))
        done, now = done | {best.block: best}, scored[best]
        blocks = {i: done[i].name for i in sorted(done)}
        yield {"blocks": blocks, "score": now, "saved": sum(move.saved for move in done.values())}


def choose(request: Request, path: list[dict], teacher_time: float) -> Blocks:
    """The blocks to replace: as many as asked for, or as the budget allows before the training, or the speed needs."""
    if request.blocks is not None:
        wanted = [step for step in path if len(step["blocks"]) == request.blocks]
        return min(wanted, key=lambda step: step["loss"])["blocks"]
    if request.speed is not None:
        fast = [step for step in path if teacher_time >= request.speed * step["milliseconds"]]
        return min(fast, key=lambda step: (round(step["loss"], 4), step["milliseconds"]))["blocks"]
    if request.budget is None:
        return path[-1]["blocks"]
    fitting = [step for step in path if step["loss"] <= request.budget]
    if not fitting:
        least = f"block {next(iter(path[0]['blocks'])) + 1} costs least, {path[0]['loss']:.4g}"
        raise UserError(f"The budget of {request.budget:g} is not met by any block: {least}. Try more --align-epochs.")
    if len(request.to) > 1:
        return min(fitting, key=lambda step: step["milliseconds"])["blocks"]
    return max(fitting, key=lambda step: len(step["blocks"]))["blocks"]
