"""Draws docs/figures/restore.svg from results/restore.json: `python benchmarks/restore/figure.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import bars

TARGET = bars.ROOT / "docs" / "figures" / "restore.svg"
LABELS = {
    "evergrad, memory": "Evergrad, shared memory",
    "evergrad": "Evergrad, disk",
    "safetensors": "safetensors safe_open",
    "torch.load, mmap": "torch.load(mmap=True)",
    "torch.load": "torch.load",
    "torchsnapshot": "torchsnapshot restore",
    "DCP load": "DCP load",
}


def draw(results: dict[str, Any], target: Path = TARGET) -> Path:
    """From what was measured."""
    medians: dict[tuple[str, str, str], float] = {
        (row["case"], row["contender"], measure): spread["median"]
        for row in results["rows"]
        for measure, spread in row["measures"].items()
    }

    def median(state: str, name: str, bar: int) -> float | None:
        return medians.get((f"{state}, {('warm', 'cold')[bar]}", name, "time_s"))

    return bars.draw(LABELS, ("from the page cache", "from the disk"), median, target, 100.0)


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((bars.ROOT / "benchmarks" / "results" / "restore.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
