"""Makes the 40 clean checkpoints: `python benchmarks/verify/checkpoints.py FOLDER` (two to three minutes on two cores).

Twenty small trainings, each saved early and late. Real data that is there offline: scikit-learn's handwritten digits
and breast-cancer table, the English text of Python's own language reference (`pydoc_data.topics`), and the data of
Evergrad's own workloads. Thresholds were fixed on the five trainings in `FIXED_ON`; the five in `HELD_OUT` were looked
at afterwards. The ten in `WIDER` are float32 only and were added to make the corpus less uniform: the models of
Evergrad's workloads, inputs that are always 0, inputs in physical units, pruned weights, and five optimizers. Every
checkpoint must have learnt well above chance, or making it fails.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["FIXED_ON", "HELD_OUT", "WIDER", "Training", "make"]

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """One training: what learns, how it is stored, who optimizes it, for how long."""

    model: str
    dtype: str
    optimizer: str
    learning_rate: float
    early: int
    late: int
    seed: int

    @property
    def name(self) -> str:
        """The beginning of its files' names."""
        return f"{self.model}-{self.dtype}-{self.optimizer}"


FIXED_ON = (
    Training("cnn", "float32", "adam", 2e-3, 40, 400, 1),
    Training("cnn", "bfloat16", "sgd", 0.05, 60, 400, 2),
    Training("gpt", "float16", "adam", 3e-3, 100, 500, 3),
    Training("gpt", "float32", "sgd", 0.3, 150, 500, 4),
    Training("embedding", "float32", "adam", 5e-3, 200, 600, 5),
)
HELD_OUT = (
    Training("cnn", "float16", "sgd", 0.05, 60, 400, 6),
    Training("cnn", "float32", "sgd", 0.05, 60, 400, 7),
    Training("gpt", "bfloat16", "adam", 3e-3, 60, 120, 8),
    Training("gpt", "float32", "adam", 3e-3, 100, 500, 9),
    Training("embedding", "float16", "adam", 5e-3, 200, 600, 10),
)
WIDER = (
    Training("alexnet", "float32", "adam", 1e-3, 60, 300, 11),
    Training("vgg11", "float32", "sgd", 0.02, 60, 300, 12),
    Training("resnet18", "float32", "adamw", 2e-3, 60, 300, 13),
    Training("resnet18", "float32", "sgd", 0.05, 60, 300, 14),
    Training("workload-gpt", "float32", "adamw", 3e-3, 150, 300, 15),
    Training("table", "float32", "adam", 5e-3, 100, 800, 16),
    Training("pixels", "float32", "adam", 2e-3, 100, 800, 17),
    Training("pixels", "float32", "rmsprop", 1e-3, 100, 800, 18),
    Training("table", "float32", "adagrad", 0.02, 100, 800, 19),
    Training("pruned", "float32", "sgd", 0.05, 60, 400, 20),
)


class Digits:
    """Handwritten digits, 8×8; a convolutional network with BatchNorm; chance is one in ten."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        self.images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
        self.labels = torch.tensor(data.target)[order]

    def network(self) -> nn.Module:
        """Two convolutions, two BatchNorms, two linear layers."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def batch(self, generator: torch.Generator) -> Batch:
        """Images of the first 1,400."""
        chosen = torch.randint(1400, (64,), generator=generator)
        return self.images[chosen], self.labels[chosen]

    def tidy(self, network: nn.Module) -> None:
        """Called after every step."""

    def score(self, network: nn.Module) -> tuple[str, float, float, bool]:
        """Accuracy on those never trained on."""
        right = _run(network, self.images[1400:]).argmax(1) == self.labels[1400:]
        accuracy = right.float().mean().item()
        return "accuracy", accuracy, 0.1, accuracy > 0.5


class Pixels(Digits):
    """The digits as 64 numbers from 0 to 16, some of which are always 0: their weights never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.images = self.images.flatten(1) * 16

    def network(self) -> nn.Module:
        """Three layers with PReLU, a parameter of one element."""
        return nn.Sequential(
            nn.Linear(64, 128), nn.PReLU(), nn.Linear(128, 64), nn.PReLU(), nn.Linear(64, 10)
        )  # fmt: skip


class Pruned(Digits):
    """The convolutional network with half of each large weight held at 0, as magnitude pruning leaves it."""

    def tidy(self, network: nn.Module) -> None:
        """Set the smaller half to 0, once they are chosen always the same."""
        if not hasattr(self, "kept"):
            self.kept = [w.abs() > w.abs().median() for w in network.parameters() if w.dim() > 1]
        with torch.no_grad():
            for weight, kept in zip((w for w in network.parameters() if w.dim() > 1), self.kept, strict=True):
                weight.mul_(kept)


class Table(Digits):
    """Breast-cancer measurements in their own units (0.05 to 4,000), two classes; chance is the larger class."""

    def __init__(self) -> None:
        from sklearn.datasets import load_breast_cancer

        data = load_breast_cancer()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        self.images = torch.tensor(data.data, dtype=torch.float32)[order]
        self.labels = torch.tensor(data.target)[order]

    def network(self) -> nn.Module:
        """BatchNorm takes the units away; its statistics keep them."""
        return nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 2))

    def batch(self, generator: torch.Generator) -> Batch:
        """Rows of the first 400."""
        chosen = torch.randint(400, (64,), generator=generator)
        return self.images[chosen], self.labels[chosen]

    def score(self, network: nn.Module) -> tuple[str, float, float, bool]:
        """Accuracy on those never trained on."""
        right = _run(network, self.images[400:]).argmax(1) == self.labels[400:]
        accuracy = right.float().mean().item()
        return "accuracy", accuracy, 0.627, accuracy > 0.85


class OfWorkload:
    """A model and data of Evergrad's own workloads, narrow enough for a CPU."""

    def __init__(self, model: str, data: str, width: float) -> None:
        from evergrad.training.settings import Training as Settings
        from evergrad.training.workloads.registry import make_workload

        self.workload = make_workload(Settings(model=model, data=data, width=width))

    def network(self) -> nn.Module:
        """As the workload makes it."""
        return self.workload.model()

    def batch(self, generator: torch.Generator) -> Batch:
        """Samples of the training set."""
        data = self.workload.data
        chosen = torch.randint(len(data.train_x), (32,), generator=generator)
        return data.train_x[chosen], data.train_y[chosen]

    def tidy(self, network: nn.Module) -> None:
        """Called after every step."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As the workload says."""
        return self.workload.loss(outputs, targets)

    def score(self, network: nn.Module) -> tuple[str, float, float, bool]:
        """The workload's metric on the first hundred samples to judge by; higher is better."""
        data = self.workload.data
        metric = self.workload.metric(_run(network, data.test_x[:100]), data.test_y[:100]).item()
        chance = data.chance or 0.0
        return "metric", metric, chance, metric > chance + 0.05


class Characters:
    """The next character of English text; a small GPT; chance is guessing by each character's frequency."""

    context = 64

    def __init__(self) -> None:
        text = "".join(topics[key] for key in sorted(topics))
        alphabet = sorted(set(text))
        self.size = len(alphabet)
        self.data = torch.tensor([alphabet.index(c) for c in text[:400_000]])

    def network(self) -> nn.Module:
        """Two blocks, four heads, 64 wide."""
        return Gpt(self.size, self.context)

    def batch(self, generator: torch.Generator) -> Batch:
        """Windows of the first nine tenths."""
        return self._windows(torch.randint(360_000 - self.context - 1, (24,), generator=generator))

    def tidy(self, network: nn.Module) -> None:
        """Called after every step."""

    def score(self, network: nn.Module) -> tuple[str, float, float, bool]:
        """Loss on the last tenth, in nats a character."""
        x, y = self._windows(torch.arange(360_000, 399_000, 390))
        loss = functional.cross_entropy(_run(network, x).float().flatten(0, 1), y.flatten()).item()
        chance = _entropy(self.data, self.size)
        return "loss", loss, chance, loss < chance - 0.3

    def _windows(self, starts: torch.Tensor) -> Batch:
        window = self.data[starts[:, None] + torch.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]


class Words:
    """The next word from the three before; embeddings, most of whose rows are rare; chance is guessing by frequency."""

    def __init__(self) -> None:
        text = " ".join(topics[key] for key in sorted(topics))
        words = re.findall(r"[a-z]+|[.,()]", text.lower())[:75_000]
        known = {word: number for number, word in enumerate(dict.fromkeys(words))}
        self.size = len(known)
        self.data = torch.tensor([known[word] for word in words])
        # Topics differ in their words, so every tenth hundred of places is held out rather than the end.
        places = torch.arange(len(words) - 4)
        self.trained, self.held_out = places[places // 100 % 10 != 0], places[places // 100 % 10 == 0]

    def network(self) -> nn.Module:
        """An embedding, a hidden layer, a softmax over all words."""
        return nn.Sequential(
            nn.Embedding(self.size, 24), nn.Flatten(), nn.Linear(72, 64), nn.LayerNorm(64), nn.Tanh(),
            nn.Linear(64, self.size),
        )  # fmt: skip

    def batch(self, generator: torch.Generator) -> Batch:
        """Places that are not held out."""
        return self._places(self.trained[torch.randint(len(self.trained), (256,), generator=generator)])

    def tidy(self, network: nn.Module) -> None:
        """Called after every step."""

    def score(self, network: nn.Module) -> tuple[str, float, float, bool]:
        """Loss on what is held out, in nats a word."""
        x, y = self._places(self.held_out)
        loss = functional.cross_entropy(_run(network, x).float(), y).item()
        chance = _entropy(self.data, self.size)
        return "loss", loss, chance, loss < chance - 0.3

    def _places(self, starts: torch.Tensor) -> Batch:
        return self.data[starts[:, None] + torch.arange(3)], self.data[starts + 3]


class Gpt(nn.Module):
    """Token and position embeddings, two blocks, and a mask of infinities that is saved with it, as CLIP's is."""

    def __init__(self, size: int, context: int, width: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(size, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size, bias=False)
        self.register_buffer("attn_mask", torch.triu(torch.full((context, context), -math.inf), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits for the character after each."""
        h = self.token(x) + self.position.weight
        for block in self.blocks:
            h = block(h, src_mask=self.attn_mask.to(h.dtype))
        logits: torch.Tensor = self.head(self.norm(h))
        return logits


Task = Digits | Characters | Words | OfWorkload

TASKS: dict[str, Callable[[], Task]] = {
    "cnn": Digits,
    "gpt": Characters,
    "embedding": Words,
    "pixels": Pixels,
    "pruned": Pruned,
    "table": Table,
    "alexnet": lambda: OfWorkload("alexnet", "digits", 0.0625),
    "vgg11": lambda: OfWorkload("vgg11", "digits", 0.0625),
    "resnet18": lambda: OfWorkload("resnet18", "digits", 0.125),
    "workload-gpt": lambda: OfWorkload("gpt", "text", 0.25),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


def make(training: Training, folder: Path) -> list[dict[str, Any]]:
    """Train, save early and late, and say how well each had learnt."""
    torch.set_num_threads(1)  # the same sums in the same order on any machine, and no waiting for a busy core
    task = TASKS[training.model]()
    torch.manual_seed(training.seed)
    # bfloat16 is trained as such, state and all; float16 is how a float32 training's weights are stored.
    network = task.network().to(torch.bfloat16 if training.dtype == "bfloat16" else torch.float32)
    optimizer = OPTIMIZERS[training.optimizer](network.parameters(), lr=training.learning_rate)
    generator = torch.Generator().manual_seed(training.seed)
    rows = []
    for step in range(1, training.late + 1):
        x, y = task.batch(generator)
        network.train()
        logits = network(x.to(next(network.parameters()).dtype) if x.is_floating_point() else x)
        if isinstance(task, OfWorkload):
            loss = task.loss(logits, y)
        else:
            loss = functional.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        task.tidy(network)
        if step in (training.early, training.late):
            rows.append(_save(training, step, task, network, optimizer, folder))
    return rows


def _save(
    training: Training,
    step: int,
    task: Task,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
) -> dict[str, Any]:
    measure, value, chance, learnt = task.score(network)
    path = folder / f"{training.name}-{'early' if step == training.early else 'late'}.pt"
    if not learnt:
        raise RuntimeError(f"{path.name}: {measure} {value:.3f} is too near chance, {chance:.3f}")
    weights = network.state_dict()
    if training.dtype == "float16":
        weights = {key: w.half() if w.is_floating_point() else w for key, w in weights.items()}
    state = {"model": weights, "optimizer": optimizer.state_dict(), "step": step, "rng": torch.get_rng_state()}
    torch.save(state, path)
    return {"file": path.name, "step": step, "measure": measure, "value": value, "chance": chance}


def _run(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    network.eval()
    with torch.no_grad():
        out: torch.Tensor = network(x.to(next(network.parameters()).dtype) if x.is_floating_point() else x)
    return out


def _entropy(data: torch.Tensor, size: int) -> float:
    """What guessing by frequency costs, in nats."""
    share = torch.bincount(data, minlength=size).double() / len(data)
    return -(share * share.clamp_min(1e-12).log()).sum().item()


def main() -> None:
    """Make all forty and print how well each had learnt."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for training in (*FIXED_ON, *HELD_OUT, *WIDER):
        for row in make(training, folder):
            rows.append(row)
            learnt = f"{row['measure']} {row['value']:.3f}, chance {row['chance']:.3f}"
            print(f"{row['file']:34} step {row['step']:4}: {learnt}", flush=True)
    (folder / "learnt.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
