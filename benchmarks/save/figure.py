"""Draws docs/figures/save.svg from results/save.json: `python benchmarks/save/figure.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "figures" / "save.svg"
PANELS = {"1 GB": "1 GB in 264 tensors", "20,000 × 4 KB": "82 MB in 20,000 tensors"}
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
OURS, THEIRS, FLOOR = "#0b7a4b", "#2f6db5", "#6b6f76"


def short(value: float) -> str:
    """Two digits, in the unit that suits it."""
    if value >= 1:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value * 1e3:.2g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"


def panel(axis: Axes, results: dict[str, Any], case: str) -> None:
    """Two bars a contender: until training goes on, and, paler, until the data is on the disk."""
    rows = {row["contender"]: row["measures"] for row in results["rows"] if row["case"] == case}
    for place, name in enumerate(LABELS):
        colour = OURS if name == "evergrad" else FLOOR if name == "bare copy" else THEIRS
        for offset, measure, alpha in ((-0.2, "blocks_s", 1.0), (0.2, "durable_s", 0.35)):
            found = rows.get(name, {}).get(measure)
            if found is None:
                if measure == "blocks_s":
                    axis.text(1.05e-2, place, "fails", va="center", color=FLOOR, fontsize=8)
                continue
            axis.barh(place + offset, found["median"], height=0.36, color=colour, alpha=alpha, linewidth=0)
            axis.text(found["median"] * 1.1, place + offset, short(found["median"]), va="center", fontsize=8)
    axis.set(xscale="log", title=PANELS[case], xlabel="time")
    axis.set_xticks([1e-2, 0.1, 1, 10], ["10 ms", "0.1 s", "1 s", "10 s"])
    axis.set_xlim(5e-3, 60)
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
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 4.4), sharey=True, layout="constrained")
    for axis, case in zip(axes, PANELS, strict=True):
        panel(axis, results, case)
    axes[0].set_yticks(range(len(LABELS)), LABELS.values())
    axes[0].invert_yaxis()
    axes[0].barh([0], [0], color=FLOOR, label="training waits")
    axes[0].barh([0], [0], color=FLOOR, alpha=0.35, label="until on the disk")
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
    return target


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((ROOT / "benchmarks" / "results" / "save.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
