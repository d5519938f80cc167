"""What saving a training costs: trials that save, pair by pair with the same steps without saves; and restarts.

strategies.py   how a training is saved: not at all, by rank 0 alone, by Evergrad: read this first
blocks.py       a rank's part: the steps of a trial with and without saves, and on from what was saved
measuring.py    a worker's part: groups of ranks, from their times to an observation
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.study.saving.measuring import perform_saving

__all__ = ["perform_saving"]


def __getattr__(name: str) -> object:
    # Ranks come through this package and need no groups of ranks themselves.
    if name not in __all__:
        raise AttributeError(f"module 'evergrad.study.saving' has no attribute {name!r}")
    value = getattr(import_module("evergrad.study.saving.measuring"), name)
    globals()[name] = value
    return value
