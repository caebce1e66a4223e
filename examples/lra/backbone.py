"""A transformer for sequences of tokens, for any attention; its default shape is that of Long Range Arena.

Token or value embedding, learned positions, pre-norm blocks, final norm, mean over the tokens, and a head of two linear
layers with ReLU (Tay et al., ICLR 2021, arXiv 2011.04006; sizes: mlpen/Nystromformer, `LRA/code`). LayerNorm eps 1e-5.

Padding is never computed: the sequences of a batch that are equally long go through the blocks together, one length
after the other. So the result cannot depend on padding, and an attention needs no mask: it sees a grid of 1 x N tokens,
on which a two-dimensional local term acts along the sequence with the middle row of its kernel. The price is one pass
for every length in a batch. `less` is refused, because its weights fix the number of tokens.

Differences from the code of Nystromformer: the mean is over the tokens, there over the padding (as zeros), too; weights
are normal(0, 0.02).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Normal

from examples.lra.data import Tokens, TrainTokens
from ppattn.attention import LayerState
from ppattn.backbones.base import Backbone, Block, StageBuilder, register_backbone
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Linear, position_table
from ppattn.ops import dropout
from ppattn.settings import Augment, Config
from ppattn.validation import AboveZero, BelowOne, Count, Fraction, Names, Positive, Size


@register_backbone("sequence")
class Sequence(Backbone):
    """A classifier of sequences.

    Args:
        vocab_size: number of different tokens. max_len: most tokens of a sequence.
        embedding: "token": a vector per token, looked up; "value": a linear layer of the value of a pixel.
        pairs: an example is two sequences, ids and mask [B, 2, N]; the head gets [a, b, a * b, a - b] (Retrieval).
    """

    input_kind = "sequences"
    refusal = "It computes a batch length by length, which no exported program does: train, eval and benchmark know it."
    no_decay = ("pos_embed", "embed.weight")

    def __init__(
        self,
        attention: Names = "softmax",
        attention_options: dict | None = None,
        vocab_size: Positive = 256,
        max_len: Positive = 1024,
        num_classes: Count = 10,
        embed_dim: Positive = 64,
        depth: Positive = 2,
        num_heads: Positive = 2,
        mlp_ratio: AboveZero = 2.0,
        qkv_bias: bool = True,
        drop_rate: Fraction = 0.0,
        attn_drop_rate: Fraction = 0.0,
        drop_path_rate: BelowOne = 0.0,
        embedding: Literal["token", "value"] = "token",
        pairs: bool = False,
    ):
        width = 4 * embed_dim if pairs else embed_dim
        super().__init__([1, max_len], 1, num_classes, feat_channels=[width], strides=[1])
        self.vocab_size, self.max_len, self.drop_rate, self.pairs = vocab_size, max_len, drop_rate, pairs
        self.values = embedding == "value"
        table = paddle.ParamAttr(initializer=Normal(0.0, 0.02))
        self.embed = Linear(1, embed_dim) if self.values else nn.Embedding(vocab_size, embed_dim, weight_attr=table)
        self.pos_embed = position_table(self, max_len, embed_dim)
        shared = {"qkv_bias": qkv_bias, "attn_drop": attn_drop_rate, "proj_drop": drop_rate, "sequence": True}
        build = StageBuilder(attention, attention_options, [depth], drop_path_rate, **shared)
        block = partial(Block, mlp_ratio=mlp_ratio, drop=drop_rate, epsilon=1e-5)
        self.blocks = nn.LayerList(build.blocks(block, (1, max_len), {"dim": embed_dim, "num_heads": num_heads}))
        self.norm = LayerNorm(embed_dim, 1e-5)
        self.build_head()

    def build_head(self) -> None:
        width, hidden, count = self.feat_channels[0], 2 * self.pos_embed.shape[-1], self.num_classes
        layers = [Linear(width, hidden), nn.ReLU(), Linear(hidden, count)] if count else []
        self.head = nn.Sequential(*layers)

    @classmethod
    def sized(cls, size: Size) -> dict[str, Any]:
        return {"max_len": size if isinstance(size, int) else size[-1]}

    def example(
        self, batch: int = 1, size: tuple[int, int] | None = None, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Random ids, int64 [batch, max_len] or [batch, 2, max_len]."""
        shape = batch, *[2] * self.pairs, size[-1] if size else self.max_len
        return (rng or np.random.default_rng(0)).integers(0, self.vocab_size, shape)

    def preprocess(self, config: Config, mean: Any, std: Any) -> Tokens:
        return Tokens(self.max_len, self.pairs)

    def train_transform(self, augment: Augment, preprocess: Tokens) -> TrainTokens:
        return TrainTokens(augment, preprocess)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits [B, num_classes] of ids [B, N] int64, or pooled features [B, C], of pairs [B, 4 C], without head.

        `mask` [B, N] is true for tokens, wherever they are; without it an id below 0 is padding. N may be any number,
        the tokens of a sequence at most `max_len`.
        """
        if not paddle.in_dynamic_mode():  # traced to count its products: no padding
            pooled = self.encode(ids.reshape([-1, ids.shape[-1]]))
        else:
            groups, order = self.by_length(ids, mask)
            parts = [self.encode(paddle.to_tensor(group)) for group in groups]
            pooled = parts[0] if len(parts) == 1 else paddle.concat(parts)[paddle.to_tensor(order)]
        if self.pairs:
            a, b = pooled.reshape([-1, 2, pooled.shape[1]]).unbind(axis=1)
            pooled = paddle.concat([a, b, a * b, a - b], axis=1)
        return self.head(pooled)

    def forward_train(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        return self(ids, mask), None

    def forward_features(self, ids: Tensor) -> list[Tensor]:
        raise UserError("A sequence model has no feature maps.")

    def by_length(self, ids: Tensor, mask: Tensor | None) -> tuple[list[np.ndarray], np.ndarray]:
        """The sequences without padding, [b, n] for every length n, and where each of the batch is among them."""
        if ids.ndim != 2 + self.pairs or (self.pairs and ids.shape[1] != 2):
            raise UserError(f"The model takes ids {'[B, 2, N]' if self.pairs else '[B, N]'}, not {list(ids.shape)}.")
        if mask is not None and mask.shape != ids.shape:
            raise UserError(f"The mask {list(mask.shape)} has another shape than the ids {list(ids.shape)}.")
        numbers = ids.numpy().reshape(-1, ids.shape[-1])
        kept = numbers >= 0 if mask is None else mask.numpy().astype(bool).reshape(numbers.shape)
        lengths = kept.sum(axis=1)
        if not len(lengths) or not 0 < lengths.min() <= lengths.max() <= self.max_len:
            raise UserError(f"A sequence has 1 to max_len = {self.max_len} tokens, not {sorted({*lengths.tolist()})}.")
        tokens = numbers[kept]
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise UserError(
                f"Tokens are 0 to {self.vocab_size - 1} (vocab_size), not {tokens.min()} to {tokens.max()}."
            )
        rows = [np.flatnonzero(lengths == n) for n in np.unique(lengths)]
        groups = [numbers[row][kept[row]].reshape(len(row), -1) for row in rows]
        return groups, np.argsort(np.concatenate(rows))

    def encode(self, ids: Tensor) -> Tensor:
        """The mean token [B, C] of ids [B, n] without padding."""
        n = ids.shape[1]
        if self.values:
            x = self.embed((ids.astype(self.pos_embed.dtype) / max(self.vocab_size - 1, 1)).unsqueeze(-1))
        else:
            x = self.embed(ids)
        x = dropout(x + self.pos_embed[:, :n], self.drop_rate, self.training)
        x, _ = self.run(self.blocks, x, (1, n), LayerState())
        return self.norm(x).mean(axis=1)
