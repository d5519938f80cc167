"""Draws docs/figures/save.svg from results/save.json: `python benchmarks/save/figure.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import bars

TARGET = bars.ROOT / "docs" / "figures" / "save.svg"
LABELS = {
    "bare copy": "bare copy, nothing else",
    "evergrad": "Evergrad",
    "DCP async_save, cached": "DCP async_save, cached",
    "DCP async_save": "DCP async_save",
    "DCP save": "DCP save",
    "torchsnapshot": "torchsnapshot async_take",
    "safetensors": "safetensors save_file",
    "torch.save": "torch.save",
}


def draw(results: dict[str, Any], target: Path = TARGET) -> Path:
    """From what was measured."""
    medians: dict[tuple[str, str, str], float] = {
        (row["case"], row["contender"], measure): spread["median"]
        for row in results["rows"]
        for measure, spread in row["measures"].items()
    }

    def median(state: str, name: str, bar: int) -> float | None:
        return medians.get((state, name, ("blocks_s", "durable_s")[bar]))

    return bars.draw(LABELS, ("training waits", "until on the disk"), median, target, 60.0)


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((bars.ROOT / "benchmarks" / "results" / "save.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
