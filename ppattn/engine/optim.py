"""Learning rate as a pure function of the step, and the optimizers with the papers' parameter groups."""

import fnmatch
import math
from collections.abc import Iterable

import paddle
from paddle import Tensor

from ppattn.errors import UserError, unknown_name
from ppattn.settings import Config

ACCUMULATORS = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc", "velocity")


def lr_at(step: int, config: Config, steps_per_epoch: int, total_batch: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run, for `total_batch` images per step.

    Warm-up rises linearly from `warmup_lr`; the cosine is a function of the time since the start of training, not since
    the end of the warm-up, and reaches `min_lr` after `train.epochs`, where it stays for the cooldown (timm's
    `CosineLRScheduler`, one cycle). `schedule.per: epoch` holds the rate still inside an epoch.
    """
    schedule, optimizer = config.schedule, config.optimizer
    factor = total_batch / optimizer.lr_batch if optimizer.lr_batch else 1.0
    ends = factor if optimizer.lr_batch_scales == "all" else 1.0
    peak, low, start = optimizer.lr * factor, schedule.min_lr * ends, schedule.warmup_lr * ends
    now, steps = (step // steps_per_epoch, 1) if schedule.per == "epoch" else (step, steps_per_epoch)
    warmup, length = schedule.warmup_epochs * steps, config.train.epochs * steps
    if now < warmup:
        return start + (peak - start) * now / warmup
    if schedule.name == "constant" and now < length:
        return peak
    if now >= length:
        return low
    if schedule.name == "step":
        return max(low, peak * schedule.decay_rate ** (now // (schedule.decay_epochs * steps)))
    return low + 0.5 * (peak - low) * (1.0 + math.cos(math.pi * now / length))


def matching(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """The names that a pattern of the setting `key` matches; raises `UserError` if there are none."""
    if not (found := fnmatch.filter(names, pattern)):
        raise unknown_name(f"pattern in {key}", pattern, names)
    return found


def freeze(model: paddle.nn.Layer, patterns: list[str]) -> list[str]:
    """Exclude the parameters whose names match from training; returns their names."""
    parameters = dict(model.named_parameters())
    frozen = {name for pattern in patterns for name in matching(pattern, parameters, "model.freeze")}
    for name in frozen:
        parameters[name].stop_gradient = True
    for prefix, layer in model.named_sublayers():
        if f"{prefix}._mean" in frozen:
            layer._use_global_stats = True
    if len(frozen) == len(parameters):
        raise UserError("model.freeze leaves no parameter to train.")
    return sorted(frozen)


def build_optimizer(config: Config, model: paddle.nn.Layer) -> paddle.optimizer.Optimizer:
    """Adam and SGD with coupled L2 on every parameter, or AdamW and Muon with decay on weights of 2 or more axes.

    Muon takes the 2-D weights of the blocks (with `muon_convs` also convolutions), AdamW the rest. Neither decays 1-D
    parameters, biases and what `model.no_weight_decay()` names. `layer_decay` multiplies the rate of group i of n by
    layer_decay ** (n - 1 - i). The list of parameters is flat: Paddle clips per group, the papers by the global norm.
    """
    options, clip = config.optimizer, config.train.clip_grad
    by_name = dict(model.named_parameters())
    names = {p.name: name for name, p in by_name.items()}  # Paddle's names to the model's
    parameters = [p for p in by_name.values() if not p.stop_gradient]
    if options.layer_decay is not None:
        groups = model.layer_groups()
        for depth, group in enumerate(groups):
            for name in group:
                by_name[name].optimize_attr["learning_rate"] = options.layer_decay ** (len(groups) - 1 - depth)
    for pattern, factor in options.lr_scale.items():
        for name in matching(pattern, by_name, "optimizer.lr_scale"):
            by_name[name].optimize_attr["learning_rate"] *= factor
    common = {"learning_rate": options.lr, "parameters": parameters, "weight_decay": options.weight_decay}
    common["grad_clip"] = paddle.nn.ClipGradByGlobalNorm(clip) if clip else None
    paddle.nn.clip._clip_by_global_norm_using_mp_type(True)  # the norm of gradients in half precision is a float32
    if options.name == "sgd":
        return paddle.optimizer.Momentum(momentum=options.momentum, **common)
    common |= {"beta1": options.betas[0], "beta2": options.betas[1], "epsilon": options.eps}
    if options.name == "adam":
        return paddle.optimizer.Adam(**common)
    exempt = set(model.no_weight_decay())
    matrices = [p for p in parameters if p.ndim > 1 and not names[p.name].endswith(".bias")]
    decayed = {p.name for p in matrices if names[p.name] not in exempt}
    common["apply_decay_param_fun"] = decayed.__contains__
    if options.name == "adamw":
        return paddle.optimizer.AdamW(**common)
    blocks = tuple(f"{block}." for block in model.block_names())
    inside = [p for p in matrices if p.ndim == 2 and names[p.name].startswith(blocks)]
    inside += [p for p in matrices if options.muon_convs and p.ndim == 4 and p.shape[1] not in (1, model.in_chans)]
    chosen = [p.name for p in inside if p.name in decayed and names[p.name].endswith(".weight")]
    return Muon(chosen, options.momentum, **common)


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n] -> [m, n] with the same singular vectors and singular values near 1 (about 0.7 to 1.2): five steps of X <-
    a X + (b A + c A A) X with A = X X^T, from Frobenius norm 1 (github.com/KellerJordan/Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


class Muon(paddle.optimizer.AdamW):
    """Muon (K. Jordan et al., 2024) in the form that shares AdamW's learning rate.

        M <- mu M + (1 - mu) G;  W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonalised(mu M + (1 - mu) G).

    The factor 0.2 sqrt(max(m, n)) gives an update about the root mean square of AdamW's (Liu et al., "Muon is scalable
    for LLM training", 2025, equation 4), so one learning rate and one decay serve both. A fused projection [C, 3C]
    counts as one matrix, a convolution as one with a row per filter. `matrices` are Paddle's names of the parameters to
    update this way, `momentum` is mu, M is AdamW's `moment1`. All other parameters take AdamW's step.
    """

    def __init__(self, matrices: Iterable[str], momentum: float, **adamw):
        if not hasattr(paddle.optimizer.AdamW, "_append_optimize_op"):  # private: else this would be plain AdamW
            raise UserError(f"Muon does not work with Paddle {paddle.__version__}: set optimizer.name to adamw.")
        super().__init__(**adamw)
        self.matrices, self.momentum = frozenset(matrices), momentum

    def _append_optimize_op(self, block, param_and_grad):
        parameter, gradient = param_and_grad
        if parameter.name not in self.matrices:
            return super()._append_optimize_op(block, param_and_grad)
        momentum = self._get_accumulator_master(self._moment1_acc_str, parameter)
        weight = self._master_weights.get(parameter.name, parameter)
        gradient = gradient.astype(momentum.dtype)
        paddle.assign(paddle.lerp(gradient, momentum, self.momentum), momentum)
        matrix = paddle.lerp(gradient, momentum, self.momentum).flatten(1)
        direction = orthogonalised(matrix).reshape(parameter.shape)
        rate = self._create_param_lr(param_and_grad)
        scale = 0.2 * max(matrix.shape) ** 0.5
        paddle.assign(weight * (1 - rate * self._weight_decay) - rate * scale * direction, weight)
        if weight is not parameter:
            paddle.assign(weight.astype(parameter.dtype), parameter)


def optimizer_tensors(optimizer: paddle.optimizer.Optimizer, model: paddle.nn.Layer) -> dict:
    """The optimizer's state as {"optimizer/<parameter>/<accumulator>": tensor}, under the model's own names."""
    state = optimizer.state_dict()
    masters = state.get("master_weights", {})
    found = {}
    for name, p in model.named_parameters():
        owner = p.name
        if owner in masters:
            found[f"optimizer/{name}/master"] = masters[owner]
            owner = masters[owner].name
        for kind in ACCUMULATORS:
            if f"{owner}_{kind}_0" in state:
                found[f"optimizer/{name}/{kind}"] = state[f"{owner}_{kind}_0"]
    return found


def load_optimizer(optimizer: paddle.optimizer.Optimizer, model: paddle.nn.Layer, tensors: dict) -> None:
    """The reverse of `optimizer_tensors`, for an optimizer that has not stepped yet."""
    state, masters = {}, {}
    for name, p in model.named_parameters():
        key, owner = f"optimizer/{name}", p.name
        if f"{key}/master" in tensors:
            master = paddle.to_tensor(tensors[f"{key}/master"])
            master.name = f"{p.name}_fp32_master_0"
            masters[p.name], owner = master, master.name
        for kind in ACCUMULATORS:
            if f"{key}/{kind}" in tensors:
                if tensors[f"{key}/{kind}"].size not in (1, math.prod(p.shape)):
                    raise ValueError(f"{key}/{kind} has another shape than the parameter")
                state[f"{owner}_{kind}_0"] = paddle.to_tensor(tensors[f"{key}/{kind}"])
    if masters:
        state["master_weights"] = masters
    optimizer.set_state_dict(state)
