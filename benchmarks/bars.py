"""Two bars a contender, a panel a state, time logarithmic: the figures of `save` and `restore`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
PANELS = {"1 GB": "1 GB in 264 tensors", "20,000 × 4 KB": "82 MB in 20,000 tensors"}
OURS, THEIRS, FLOOR = "#0b7a4b", "#2f6db5", "#6b6f76"

Median = Callable[[str, str, int], float | None]
"""The time of (state, contender, first or second bar), if it was measured."""


def draw(labels: Mapping[str, str], legend: tuple[str, str], median: Median, target: Path, limit_s: float) -> Path:
    """A panel a state, a row a contender, in the order of the labels."""
    # The same picture from the same numbers: no date, fixed identifiers.
    plt.rcParams.update(
        {"font.size": 10, "svg.hashsalt": "evergrad", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    height = 1.2 + 0.4 * len(labels)
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, height), sharey=True, layout="constrained")
    for axis, state in zip(axes, PANELS, strict=True):
        _panel(axis, labels, state, median, limit_s)
    axes[0].set_yticks(range(len(labels)), labels.values())
    axes[0].invert_yaxis()
    axes[0].barh([0], [0], color=FLOOR, label=legend[0])
    axes[0].barh([0], [0], color=FLOOR, alpha=0.35, label=legend[1])
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
    return target


def _panel(axis: Axes, labels: Mapping[str, str], state: str, median: Median, limit_s: float) -> None:
    for place, name in enumerate(labels):
        colour = OURS if name.startswith("evergrad") else FLOOR if name.startswith("bare") else THEIRS
        for bar, (offset, alpha) in enumerate(((-0.2, 1.0), (0.2, 0.35))):
            found = median(state, name, bar)
            if found is not None:
                axis.barh(place + offset, found, height=0.36, color=colour, alpha=alpha, linewidth=0)
                axis.text(found * 1.1, place + offset, _short(found), va="center", fontsize=8)
        if median(state, name, 0) is None:
            axis.text(1.05e-2, place, "fails", va="center", color=FLOOR, fontsize=8)
    axis.set(xscale="log", title=PANELS[state], xlabel="time")
    axis.set_xticks([1e-2, 0.1, 1, 10], ["10 ms", "0.1 s", "1 s", "10 s"])
    axis.set_xlim(5e-3, limit_s)
    axis.minorticks_off()
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _short(value: float) -> str:
    """Two digits, in the unit that suits it."""
    if value >= 1:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value * 1e3:.2g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
