"""Find where a training stops being finite: replay it from its last checkpoint and look at every step.

A run is a function of its config and the step, so the replay meets the same images, random numbers and weights. (GPU
kernels may add in varying order; the replay usually still fails at the same step.)
"""

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import paddle

from ppattn.config import load_config
from ppattn.data.loader import Batch
from ppattn.engine.build import Run, build_run
from ppattn.engine.trainer import backward, update
from ppattn.errors import UserError
from ppattn.validation import check_above_zero


def debug(folder: Path, steps: int | None = None) -> str:
    """Replay a run folder from `checkpoints/latest`, or from the start, for `steps` at most; nothing in it is changed.

    Returns a sentence that names the step, the micro-batch and the layer, or says that nothing was found. The
    micro-batch is written to `nonfinite_*.npz` there: `images` and `targets` after augmentation and mixing.
    """
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run folder: there is no config.yaml in it.")
    check_above_zero("--steps", steps)
    config, _ = load_config(folder / "config.yaml")
    config.output = str(folder)
    run = build_run(config, "auto")
    first = run.state.progress.step
    last = min(run.last_step, first + steps) if steps else run.last_step
    if first >= last:
        return f"The run is finished: its {first} steps are done."
    with closing(run.loader):
        for step in range(first, last):
            if found := replay(run, step):
                return found
    return f"All losses and weights are finite in steps {first + 1} to {last} of the run."


def replay(run: Run, step: int) -> str | None:
    """Do a step; returns a sentence if something in it was not finite, on this process or another."""
    run.state.optimizer.set_lr(run.learning_rate(step))
    numbers = run.loader.numbers(step)
    position = f"{run.position(step)} (step {step + 1} of the run)"
    for batch in run.loader.micro_batches(step):
        finite = bool(np.isfinite(backward(run, batch, len(numbers)).item()))
        if run.processes.sum(not finite):
            where = "on another process" if finite else f"{first_layer(run, batch)}; {keep(run, step, batch)}"
            part = f"micro-batch {batch.number - numbers[0] + 1} of {len(numbers)}"
            return f"The loss is not finite at {position}, {part}: {where}."
    update(run)
    run.state.progress.step = step + 1
    if name := run.state.nonfinite_weight():
        why = "its gradient or its running statistics overflow"
        return f"{name} is not finite after {position}, all losses of which are: {why}; {keep(run, step, batch)}."
    return None


def keep(run: Run, step: int, batch: Batch) -> str:
    """Write the micro-batch to a file, and say where it is."""
    path = Path(run.config.output) / f"nonfinite_step{step + 1}_batch{batch.number}_rank{run.processes.rank}.npz"
    np.savez(path, images=batch.images, targets=batch.targets)
    return f"the micro-batch is in {path}"


@paddle.no_grad()
def first_layer(run: Run, batch: Batch) -> str:
    """Run a micro-batch again and say where the first value that is not finite comes up."""
    for key in ("images", "targets"):
        if not np.isfinite(getattr(batch, key)).all():
            return f"the {key} themselves are not finite"
    found: list[str] = []

    def look(name, layer, inputs, outputs):
        tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        floats = [t for t in tensors if isinstance(t, paddle.Tensor) and t.is_floating_point()]
        if not found and not all(bool(paddle.isfinite(tensor).all()) for tensor in floats):
            found.append(name)

    with ExitStack() as hooks, run.autocast():
        for name, layer in run.state.model.named_sublayers():
            hooks.callback(layer.register_forward_post_hook(partial(look, name)).remove)
        run.seed(batch.number)
        run.loss(paddle.to_tensor(batch.images), paddle.to_tensor(batch.targets))
    if found:
        return f"the first layer whose output is not finite is {found[0]}"
    return "every layer's output is finite, so look at the targets, the teacher or the loss"
