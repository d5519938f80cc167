"""Toy trials, one of which may stay in its Slurm job until that is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import toy_work


def perform(folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """As the toys' own; a file `orders/stay-ID` keeps that trial, once, and then tells in its place in which job."""
    if work["kind"] != "golden":
        stay = folder / "orders" / f"stay-{work['trial']['id']}"
        if stay.exists():
            stay.rename(folder / f"stays-in-{os.environ['SLURM_JOB_ID']}")
            signal.pause()
    return toy_work.perform(folder, work)
