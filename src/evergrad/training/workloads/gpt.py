"""A small decoder-only transformer over characters, of the blocks of GPT-2 (Radford et al., 2019).

At width 1: four blocks of 256 features in four heads, and 64 characters of context. Norms come first in a block,
positions are learnt, the activation is GELU. Attention is written out, since the fused kernels' gradients are not the
same bits on every run; the last layer is not the token table again, so that each weight has one name.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn

from evergrad.training.workloads.layers import Dense, draw_, product

CONTEXT = 64
DIFFERS = (
    "characters instead of byte pairs; 4 blocks of 256 features in 4 heads (GPT-2's smallest: 12 of 768 in 12), "
    "64 places of context, no dropout, last layer not tied"
)

_BLOCKS = 4
_HEADS = 4
_HEAD_FEATURES = 64
_SPREAD = 0.02


class Attention(nn.Module):
    """Each place attends to itself and to those before it."""

    future: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.qkv = Dense(features, 3 * features)
        self.out = Dense(features, features)
        self.register_buffer("future", torch.from_numpy(~np.tri(CONTEXT, dtype=bool)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        count, places, features = x.shape
        heads = self.qkv(x).view(count, places, 3, _HEADS, features // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = product(torch.matmul, query / math.sqrt(query.shape[-1]), key.transpose(-2, -1))
        chances = scores.masked_fill(self.future[:places, :places], -math.inf).softmax(-1)
        seen = product(torch.matmul, chances, value)
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(count, places, features))
        return mixed


class Block(nn.Module):
    """Attention, then two layers at each place; both are added to what came in."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = Attention(features)
        self.norm2 = nn.LayerNorm(features)
        self.mlp = nn.Sequential(
            OrderedDict(up=Dense(features, 4 * features), gelu=nn.GELU(), down=Dense(4 * features, features))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Scores of the next token at every place."""

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, features, _weight=torch.empty(tokens, features))
        self.position = nn.Embedding(CONTEXT, features, _weight=torch.empty(CONTEXT, features))
        self.blocks = nn.Sequential(*(Block(features) for _ in range(_BLOCKS)))
        self.norm = nn.LayerNorm(features)
        self.head = Dense(features, tokens, bias=False)
        for name, weight in self.named_parameters():
            # As GPT-2: what is added to the residual path is smaller by the number of additions.
            added = name.endswith(("attention.out.weight", "mlp.down.weight"))
            if weight.dim() > 1:
                draw_(weight, _SPREAD / math.sqrt(2 * _BLOCKS) if added else _SPREAD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[-1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def gpt(*, tokens: int, width: float = 1.0) -> GPT:
    """At any width there are four heads, of four features or more."""
    return GPT(tokens, _HEADS * max(4, round(_HEAD_FEATURES * width)))
