"""A small state of one step, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["holds", "state", "until"]


def state(step: int) -> dict[str, Any]:
    """Return a state in which every value is the step's."""
    return {"w": torch.full((5_000,), float(step)), "step": step}


def holds(found: dict[str, Any], step: int) -> bool:
    """Return True if the state is that of this step."""
    return bool((found["w"] == step).all()) and found["step"] == step


def until(so: Callable[[], Any], patience_s: float = 120.0) -> None:
    """Wait until this is so; fail if it never becomes so."""
    end = time.monotonic() + patience_s
    while not so():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)
