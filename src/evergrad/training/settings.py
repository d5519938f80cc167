"""What determines a training, besides a fault: two trainings of equal settings end with the same bits."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.wording import checked_choice, short_repr

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
                    raise UsageError(
                        f"{field.name}: expected a whole number, {least} or more, found {short_repr(value)}"
                    )
            elif field.name in _ABOVE_ZERO:
                if type(value) not in (int, float) or not 0 < value < 1e6:
                    raise UsageError(f"{field.name}: expected a number above 0, found {short_repr(value)}")
                object.__setattr__(self, field.name, float(value))
            elif not isinstance(value, str):
                raise UsageError(f"{field.name}: expected a text, found {short_repr(value)}")
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


# The direction of a metric: higher values are better (accuracy, PSNR), or lower ones (loss, error, perplexity).
#
# A plan or a workload states it; where neither does, the metric's name decides, and higher is better if it says
# nothing.

PATTERN = "pattern:"
"""The prefix of a metric that is found by a regular expression, not by a key."""

_LOWER_ENDINGS = ("loss", "losses", "error", "errors", "perplexity", "xent", "crossentropy")
_LOWER = frozenset(
    {"cost", "costs", "err", "errs", "ppl", "nll", "mse", "rmse", "mae", "mape", "wer", "cer", "fid", "bpb", "bpc",
     "bpd"}
)  # fmt: skip
_HIGHER = frozenset(
    {"acc", "accuracy", "score", "f1", "auc", "auroc", "bleu", "rouge", "psnr", "ssim", "map", "iou", "miou", "dice",
     "recall", "precision", "reward", "likelihood", "r2"}
)  # fmt: skip
_NEGATED = ("neg", "negative")
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
# What is skipped on the way to the first group: escapes, character classes, groups that capture nothing.
_GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<group>\((?!\?)|\(\?P<(?P<name>\w+)>)", re.DOTALL)
_ESCAPE = re.compile(r"\\[A-Za-z]|\(\?[a-zA-Z-]*[:=!<)]")


class Direction(StrEnum):
    """Which values of a metric are better."""

    HIGHER = "higher_is_better"
    LOWER = "lower_is_better"

    @property
    def words(self) -> str:
        """As tables say it: `lower is better`."""
        return self.value.replace("_", " ")

    @property
    def sign(self) -> int:
        """The factor that makes higher values the better ones: 1 or -1."""
        return 1 if self is Direction.HIGHER else -1


def direction_by_name(metric: str) -> Direction:
    """The direction that a metric's name states; of a pattern, the name nearest to the number that it finds.

    >>> direction_by_name("val_loss"), direction_by_name("top1_accuracy")
    (<Direction.LOWER: 'lower_is_better'>, <Direction.HIGHER: 'higher_is_better'>)
    >>> direction_by_name(r"pattern:loss \\S+, acc (\\S+)").words
    'higher is better'
    """
    if not metric.startswith(PATTERN):
        return _stated(metric, last=True) or Direction.HIGHER
    before, name, after = _around_group(metric.removeprefix(PATTERN))
    # Programs print the name before the number; the text after it counts if there is no word before it.
    nearest = _stated(before, last=True) if _WORD.search(before) else _stated(after)
    return _stated(name) or nearest or Direction.HIGHER


def _stated(text: str, *, last: bool = False) -> Direction | None:
    """The direction that the first word with one states, or the last such word; None if there is no such word."""
    text = re.sub(r"(?i)cross[-_ ]?entropy", "crossentropy", text)
    words = [word.lower() for word in _WORD.findall(text)]
    known = [(place, found) for place, word in enumerate(words) if (found := _of_word(word)) is not None]
    if not known:
        return None
    place, found = known[-1 if last else 0]
    if not any(word in _NEGATED for word in words[:place]):
        return found
    # scikit-learn's neg_mean_squared_error; negative_log_likelihood.
    return Direction.HIGHER if found is Direction.LOWER else Direction.LOWER


def _of_word(word: str) -> Direction | None:
    if word in _LOWER or word.endswith(_LOWER_ENDINGS):
        return Direction.LOWER
    return Direction.HIGHER if word in _HIGHER else None


def _around_group(pattern: str) -> tuple[str, str, str]:
    """The text before a pattern's first group, the group's name if it has one, and the text after its beginning."""
    for found in _GROUP.finditer(pattern):
        if found["group"]:
            before, after = pattern[: found.start()], pattern[found.end() :]
            return _ESCAPE.sub(" ", before), found["name"] or "", _ESCAPE.sub(" ", after)
    return _ESCAPE.sub(" ", pattern), "", ""
