"""A character-level transformer of a few thousand parameters, its data, and the result files of a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

TEXT = "".join(f"{n} times {n + 3} is {n * (n + 3)}; " for n in range(1, 120))
SYMBOLS = sorted(set(TEXT))
TOKENS = torch.tensor([SYMBOLS.index(symbol) for symbol in TEXT])


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm and with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        chance = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=chance, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that predicts the next character."""

    def __init__(self, layers: int = 1, heads: int = 2, width: int = 16, block: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(SYMBOLS), width), nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(SYMBOLS), bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.norm(self.blocks(self.drop(self.tokens(x) + here))))
        return logits, functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizer(self, weight_decay: float, learning_rate: float) -> torch.optim.AdamW:
        """AdamW with weight decay for matrices and without it for vectors."""
        matrices = [one for one in self.parameters() if one.dim() >= 2]
        vectors = [one for one in self.parameters() if one.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def leave_result(folder: str, rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's final weights, optimizer state, step and generator, to be compared across ranks and runs."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    result = {
        "rank": rank, "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "generator": torch.get_rng_state(),
    }  # fmt: skip
    torch.save(result, Path(folder) / f"rank{rank}-{os.getpid()}.pt")


def die_here(place: str, rank: int) -> None:
    """Kill this process if IDIOM_DIE is `PLACE:RANK:FILE`, once: the file marks that it has happened.

    Schedules of failures reach the phases of a step; this reaches the parts of a script that lie outside of steps.
    """
    wanted = os.environ.get("IDIOM_DIE", "").split(":")
    if wanted[:2] == [place, str(rank)] and not Path(wanted[2]).exists():
        Path(wanted[2]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def await_joiner(step: int) -> None:
    """Wait before this step until a process waits to join, if IDIOM_AWAIT is `STEP:UID`; later steps take longer.

    A process that is started during the job takes seconds to come, and a step milliseconds.
    """
    wanted = os.environ.get("IDIOM_AWAIT")
    if wanted and step >= int(wanted.split(":")[0]):
        from evergrad.recovery.membership import StoreKeys
        from evergrad.recovery.store import StoreClient

        host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
        StoreClient(host, int(port), secret=None).wait(StoreKeys.waiting(int(wanted.split(":")[1])))
        time.sleep(0.05)
