"""Layers of all backbones: linear, norm, MLP, patches, position tables; evaluation mode.

Initial values follow the official PyTorch code: Linear weights normal(0, 0.02) with zero bias, convolutions uniform in
+-1/sqrt(fan_in) for weight and bias, position tables and class tokens normal(0, 0.02).
"""

import contextlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Normal, Uniform

from ppattn import ops
from ppattn.errors import UserError
from ppattn.ops import interpolation_matrix, is_dynamic, pad_to_multiple


class Linear(nn.Layer):
    """y = x W + b for x [..., in]; weight [in, out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.weight = self.create_parameter([in_features, out_features], default_initializer=Normal(0.0, 0.02))
        self.bias = self.create_parameter([out_features], is_bias=True) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


def kaiming(model: nn.Layer) -> None:
    """Initialise all `nn.Conv2D` with variance 2 / fan-out (He et al., ICCV 2015) and zero bias."""
    for layer in model.sublayers():
        if isinstance(layer, nn.Conv2D):
            out, _, height, width = layer.weight.shape
            Normal(0.0, math.sqrt(2.0 * layer._groups / (out * height * width)))(layer.weight)
            if layer.bias is not None:
                Constant(0.0)(layer.bias)


class LayerNorm(nn.Layer):
    """Normalisation over the last axis, statistics in float32."""

    def __init__(self, dim: int, epsilon: float = 1e-5):
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([dim], is_bias=True)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.epsilon)


class Conv2D(nn.Conv2D):
    """`nn.Conv2D` by `ops.conv2d`: square kernels, without groups."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(x, self.weight, self.bias, self._stride[0], self._padding)


def conv2d(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    padding: int = 0,
    groups: int = 1,
    bias: bool = True,
) -> nn.Conv2D:
    """A convolution with PyTorch's default initial values."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    bound = 1.0 / math.sqrt(in_channels // groups * height * width)
    attr = paddle.ParamAttr(initializer=Uniform(-bound, bound))
    initial = {"weight_attr": attr, "bias_attr": attr if bias else False}
    layer = nn.Conv2D if groups > 1 or height != width else Conv2D
    return layer(in_channels, out_channels, kernel, stride, padding, groups=groups, **initial)


def replaceable(*layers: nn.Layer) -> bool:
    """Whether an operator may take the weights of layers instead of calling them: they are ours, and have no hooks."""
    hooked = any(layer._forward_pre_hooks or layer._forward_post_hooks for layer in layers)
    return not hooked and {Linear, LayerNorm, Mlp}.issuperset(map(type, layers))


class Mlp(nn.Layer):
    """Linear, GELU, Linear; `approximate` is the tanh form of GELU."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0, approximate: bool = False):
        super().__init__()
        self.fc1, self.fc2 = Linear(dim, hidden), Linear(hidden, dim)
        self.drop, self.approximate = drop, approximate

    @property
    def weights(self) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        return self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias

    def forward(self, x: Tensor) -> Tensor:
        if not replaceable(self.fc1, self.fc2) or (self.training and self.drop > 0.0):
            x = ops.dropout(ops.gelu(self.fc1(x), self.approximate), self.drop, self.training)
            return ops.dropout(self.fc2(x), self.drop, self.training)
        return ops.mlp(x, *self.weights, self.approximate)


class SwiGLU(nn.Layer):
    """w3(silu(w1 x) * (w2 x)) (Shazeer, 2020, arXiv 2002.05202); `approximate` has no effect."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0, approximate: bool = False):
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(dim, hidden), Linear(dim, hidden), Linear(hidden, dim)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        x = ops.dropout(ops.silu(self.w1(x)) * self.w2(x), self.drop, self.training)
        return ops.dropout(self.w3(x), self.drop, self.training)


def add_mlp_branch(x: Tensor, norm: LayerNorm, mlp: Mlp, path: float) -> Tensor:
    """x + drop_path(mlp(norm(x))) for x [B, N, C]; one operator unless there is dropout inside."""
    if not replaceable(norm, mlp) or not replaceable(mlp.fc1, mlp.fc2) or (mlp.training and mlp.drop > 0.0):
        return x + ops.drop_path(mlp(norm(x)), path, mlp.training)
    keep = ops.keep_factors(x, path) if mlp.training and path else None
    return ops.residual_mlp(x, norm.weight, norm.bias, norm.epsilon, *mlp.weights, mlp.approximate, keep)


class PatchEmbed(nn.Layer):
    """Non-overlapping patches: convolution with kernel = stride, optional LayerNorm.

    [B, in, H, W] -> tokens [B, H'*W', dim] and (H', W'). Incomplete patches are padded, or cropped with `pad=False`.
    """

    def __init__(self, in_chans: int, dim: int, patch: int, norm: bool = False, pad: bool = True):
        super().__init__()
        self.proj = conv2d(in_chans, dim, patch, patch)
        self.norm = LayerNorm(dim) if norm else None
        self.patch, self.pad = patch, pad

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        p = self.patch
        x = pad_to_multiple(x, p, p) if self.pad else x
        c, height, width = x.shape[1:]
        h, w = height // p, width // p
        if not is_dynamic(h, w) and min(h, w) < 1:
            raise UserError(f"A map of {height} x {width} is smaller than one patch of {p} x {p}.")
        if not is_dynamic(h, w) and (h * p, w * p) != (height, width):
            x = x[:, :, : h * p, : w * p]
        # A convolution whose kernel equals its stride is one matrix product over patches.
        x = x.reshape([-1, c, h, p, w, p]).transpose([0, 2, 4, 1, 3, 5]).reshape([-1, h * w, c * p * p])
        x = ops.linear(x, self.proj.weight.reshape([self.proj.weight.shape[0], -1]).t(), self.proj.bias)
        return (x if self.norm is None else self.norm(x)), (h, w)


class ConvEmbed(nn.Layer):
    """3 x 3 convolutions (in, out, stride), BatchNorm, ReLU: [B, in, H, W] -> tokens [B, H'*W', dim] and (H', W'); with
    `pool`, max pooling after the convolution in place of its stride, and GELU."""

    def __init__(self, plan: list[tuple[int, int, int]], pool: bool = False):
        super().__init__()
        layers: list[nn.Layer] = []
        for a, b, stride in plan:
            pooling = [nn.MaxPool2D(stride, ceil_mode=True)] if pool and stride > 1 else []
            convolution, activation = conv2d(a, b, 3, 1 if pool else stride, 1), nn.GELU() if pool else nn.ReLU()
            layers += [convolution, *pooling, nn.BatchNorm2D(b), activation]
        self.proj = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(x)
        return ops.grid_tokens(x), (x.shape[2], x.shape[3])


def patch_embedding(stem: str, in_chans: int, dim: int, patch: int, **settings: bool) -> nn.Layer:
    """A `PatchEmbed`, or convolutions with twice the channels after each halving of the map.

    "conv": one of stride 2 per halving (Xiao et al., NeurIPS 2021, 2106.14881). "pool": one, then two per halving, the
    first with max pooling (airbench94, K. Jordan, arXiv 2404.00498, whose first convolution is whitening).
    """
    if stem == "patch":
        return PatchEmbed(in_chans, dim, patch, **settings)
    steps = patch.bit_length() - 1
    if patch != 2**steps or not steps:
        raise UserError(f"patch_size = {patch} is not allowed with stem = {stem}: a power of two, at least 2.")
    first, *dims = (max(dim >> i, 1) for i in range(steps, -1, -1))
    if stem == "conv":
        return ConvEmbed([(a, b, 2) for a, b in pairwise([in_chans, *dims])])
    plan = [step for a, b in pairwise([first, *dims]) for step in ((a, b, 2), (b, b, 1))]
    return ConvEmbed([(in_chans, first, 1), *plan], pool=True)


class LayerScale(nn.Layer):
    """x * gamma: a learned factor per channel (Touvron et al., ICCV 2021, arXiv 2103.17239)."""

    def __init__(self, dim: int, initial: float):
        super().__init__()
        self.gamma = self.create_parameter([dim], default_initializer=Constant(initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PositionConv(nn.Layer):
    """x + depth-wise 3 x 3 convolution of the grid: conditional position encoding (Chu et al., arXiv 2102.10882)."""

    official_names: ClassVar = {"cpe.weight": "proj.weight", "cpe.bias": "proj.bias"}

    def __init__(self, dim: int, num_prefix: int = 0):
        super().__init__()
        self.num_prefix = num_prefix
        self.proj = conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens [B, P + H*W, C] of the grid hw = (H, W); the P tokens in front are left unchanged."""
        return ops.depthwise_conv(x, self.proj.weight, self.proj.bias, hw, self.num_prefix, skip=True)


def resize_grid(
    table: Tensor, built: tuple[int, int], target: tuple[int, int], num_prefix: int = 0, mode: str = "bilinear"
) -> Tensor:
    """A position table [1, P + H*W, C] for another grid: the grid part is interpolated, the prefix kept.

    Bilinear for PVT and SOFT (as in the official code), bicubic for DeiT (as its fine-tuning code), both without
    antialiasing; "offset" and "antialias" for DINOv2: see `interpolation_matrix`.
    """
    if not is_dynamic(*target) and tuple(built) == tuple(target):
        return table
    (height, width), channels = built, table.shape[2]
    prefix, grid = table[:, :num_prefix], table[:, num_prefix:]
    moved = abs(target[0] - height) + abs(target[1] - width)
    add = 0.1 * paddle.clip(moved, 0, 1) if mode == "offset" and is_dynamic(moved) else 0.1
    rows = interpolation_matrix(height, target[0], table.dtype, mode, add)
    columns = interpolation_matrix(width, target[1], table.dtype, mode, add)
    grid = paddle.matmul(rows, grid.reshape([height, width * channels]))  # since oneDNN does not resize tables
    grid = paddle.matmul(columns, grid.reshape([-1, width, channels]))
    grid = grid.reshape([1, target[0] * target[1], channels])
    return paddle.concat([prefix, grid], axis=1) if num_prefix else grid


def resized_table(array: np.ndarray, shape: tuple, img_size: tuple | None, table: tuple) -> np.ndarray | None:
    """A position table [1, P + H'*W', C] of a weights file for another grid; None if it fits already or cannot.

    `img_size`: (H, W) of the file's model; None: square, or this table's. `table`: (grid, P, mode), see `resize_grid`.
    """
    grid, num_prefix, mode = table
    built = grid_of(array.shape[1] - num_prefix, img_size)
    if array.shape[2] != shape[2] or (img_size is None and array.shape == shape) or built in (None, grid):
        return None
    return resize_grid(paddle.to_tensor(array.astype("float32")), built, grid, num_prefix, mode).numpy()


def grid_of(tokens: int, img_size: tuple[int, int] | None) -> tuple[int, int] | None:
    """The grid (H, W) with this many tokens: the image sides divided by a stride, both rounded down or both up."""
    height, width = img_size or (tokens, tokens)
    for stride in range(1, max(height, width) + 1):
        for grid in ((height // stride, width // stride), (-(-height // stride), -(-width // stride))):
            if math.prod(grid) == tokens:
                return grid
    return None


def position_table(layer: nn.Layer, tokens: int, dim: int) -> Tensor:
    """A learned table [1, tokens, dim], normal(0, 0.02)."""
    return layer.create_parameter([1, tokens, dim], default_initializer=Normal(0.0, 0.02))


@contextlib.contextmanager
def evaluating(model: nn.Layer) -> Iterator[None]:
    """The model is in evaluation mode inside; afterwards every layer has its previous mode."""
    modes = {layer: layer.training for layer in model.sublayers(include_self=True)}
    model.eval()
    try:
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training
