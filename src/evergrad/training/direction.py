"""The direction of a metric: higher values are better (accuracy, PSNR), or lower ones (loss, error, perplexity).

A plan or a workload states it; where neither does, the metric's name decides, and higher is better if it says nothing.
"""

from __future__ import annotations

import re
from enum import StrEnum

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
