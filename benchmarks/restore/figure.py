"""Draws docs/figures/restore.svg from results/restore.json: `python benchmarks/restore/figure.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.save.figure import FLOOR, OURS, PANELS, THEIRS, short
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "figures" / "restore.svg"
LABELS = {
    "evergrad, memory": "Evergrad, shared memory",
    "evergrad": "Evergrad, disk",
    "safetensors": "safetensors safe_open",
    "torch.load, mmap": "torch.load(mmap=True)",
    "torch.load": "torch.load",
    "torchsnapshot": "torchsnapshot restore",
    "DCP load": "DCP load",
}


def panel(axis: Axes, results: dict[str, Any], state: str) -> None:
    """Two bars a contender: from the page cache, and, paler, without it."""
    rows = {(row["case"], row["contender"]): row["measures"].get("time_s") for row in results["rows"]}
    for place, name in enumerate(LABELS):
        colour = OURS if name.startswith("evergrad") else THEIRS
        for offset, case, alpha in ((-0.2, "warm", 1.0), (0.2, "cold", 0.35)):
            found = rows.get((f"{state}, {case}", name))
            if found is None:
                continue
            axis.barh(place + offset, found["median"], height=0.36, color=colour, alpha=alpha, linewidth=0)
            axis.text(found["median"] * 1.1, place + offset, short(found["median"]), va="center", fontsize=8)
    axis.set(xscale="log", title=PANELS[state], xlabel="time")
    axis.set_xticks([1e-2, 0.1, 1, 10], ["10 ms", "0.1 s", "1 s", "10 s"])
    axis.set_xlim(5e-3, 100)
    axis.minorticks_off()
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def draw(results: dict[str, Any], target: Path = TARGET) -> Path:
    """A panel a state; time is logarithmic."""
    # The same picture from the same numbers: no date, fixed identifiers.
    plt.rcParams.update(
        {"font.size": 10, "svg.hashsalt": "evergrad", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 4), sharey=True, layout="constrained")
    for axis, state in zip(axes, PANELS, strict=True):
        panel(axis, results, state)
    axes[0].set_yticks(range(len(LABELS)), LABELS.values())
    axes[0].invert_yaxis()
    axes[0].barh([0], [0], color=FLOOR, label="from the page cache")
    axes[0].barh([0], [0], color=FLOOR, alpha=0.35, label="from the disk")
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
    return target


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((ROOT / "benchmarks" / "results" / "restore.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
