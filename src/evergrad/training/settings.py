"""What determines a training, besides a fault: two trainings of equal settings end with the same bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.wording import checked_choice, shown

PRECISIONS = ("float16", "bfloat16", "float32", "float64")
OPTIMIZERS = ("sgd", "adam")

_LEAST = {"ranks": 1, "samples": 0, "batch_size": 1, "checkpoint": 1, "epochs": 0, "seed": 0}
_ABOVE_ZERO = ("width", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training up to a checkpoint, and on from there.

    >>> Training(model="vgg16", epochs=2).key == Training(model="vgg16", epochs=3).key
    False
    """

    workload: str = ""
    """A workload of your own, `file.py:function`; otherwise `model` and `data` say which."""
    model: str = "alexnet"
    data: str = "digits"
    mechanism: str = "single"
    ranks: int = 1
    precision: str = "float32"
    """Of the state and of the arithmetic."""
    width: float = 1.0
    """Of every layer, against the published model's."""
    samples: int = 0
    """Of the training set, the first so many; 0: all."""
    batch_size: int = 64
    optimizer: str = "sgd"
    """`sgd` has momentum 0.9; `adam` in float16 has eps 1e-4, the default of 1e-8 being 0 there."""
    learning_rate: float = 0.01
    checkpoint: int = 1
    """Epochs before the checkpoint."""
    epochs: int = 1
    """Epochs after it; 0 is inference: what the restored model says, without training."""
    seed: int = 0
    device: str = "cpu"
    base: str = ""
    """The folder that a workload's file is sought from; where that is makes no other training."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name in _LEAST:
                if type(value) is not int or not _LEAST[field.name] <= value < 1 << 63:
                    least = _LEAST[field.name]
                    raise UsageError(f"{field.name}: expected a whole number, {least} or more, found {shown(value)}")
            elif field.name in _ABOVE_ZERO:
                if type(value) not in (int, float) or not 0 < value < 1e6:
                    raise UsageError(f"{field.name}: expected a number above 0, found {shown(value)}")
                object.__setattr__(self, field.name, float(value))
            elif not isinstance(value, str):
                raise UsageError(f"{field.name}: expected a text, found {shown(value)}")
        checked_choice("precision", self.precision, PRECISIONS)
        checked_choice("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.workload or self.model

    @property
    def key(self) -> str:
        """A short name for exactly these settings."""
        text = json.dumps({name: value for name, value in self.to_json().items() if name != "base"}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Json]:
        """Every setting by its name."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Json]) -> Training:
        """Back from `to_json`; `UsageError` for a setting that is unknown or wrong."""
        known = [field.name for field in fields(cls)]
        for name in told:
            checked_choice("training", name, known)
        values: Any = dict(told)
        return cls(**values)
