"""Draws docs/figures/inject.svg from results/inject.json: `python benchmarks/inject/figure.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "figures" / "inject.svg"
COLOURS = {"HDF5": "#0b7a4b", "torch zip": "#2f6db5", "safetensors": "#8a5fb0"}
LOOP, LOOP_COLOUR = "h5py loop", "#b5482f"
STYLES = {10_000: "s--", 1: "o-"}

Points = list[tuple[float, float, float, float]]
"""Size or faults; median, minimum and maximum of the time."""


def rows(results: dict[str, Any], title: str, contender: str) -> list[tuple[float, int, dict[str, float]]]:
    """Size in GB, faults and time of every case of a format."""
    found = []
    for row in results["rows"]:
        case = re.fullmatch(rf"{title}, ([\d.e+]+) GB, ([\d,]+) faults?", row["case"])
        if case and row["contender"] == contender:
            found.append((float(case[1]), int(case[2].replace(",", "")), row["measures"]["time_s"]))
    return found


def plot(axis: Axes, points: Points, colour: str, label: str, style: str = "o-") -> None:
    """Medians with their extremes."""
    points = sorted(points)
    x = [point[0] for point in points]
    axis.plot(x, [point[1] for point in points], style, color=colour, label=label, linewidth=1.8, markersize=5)
    low, high = [point[2] for point in points], [point[3] for point in points]
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def draw(results: dict[str, Any], target: Path = TARGET) -> Path:
    """Left, time against faults; right, time against the file's size; all axes logarithmic."""
    # The same picture from the same numbers: no date, fixed identifiers.
    plt.rcParams.update(
        {"font.size": 10, "svg.hashsalt": "evergrad", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    smallest = min(size for title in COLOURS for size, _, _ in rows(results, title, "evergrad"))
    contenders = [(title, "evergrad", colour, f"Evergrad, {title}") for title, colour in COLOURS.items()]
    for title, contender, colour, label in [("HDF5", LOOP, LOOP_COLOUR, "one h5py call a flip, no log"), *contenders]:
        found = [row for row in rows(results, title, contender) if row[0] == smallest]
        plot(left, [(count, t["median"], t["min"], t["max"]) for _, count, t in found], colour, label)
    for title, colour in COLOURS.items():
        found = rows(results, title, "evergrad")
        for count, style in STYLES.items():
            points = [(size, t["median"], t["min"], t["max"]) for size, faults, t in found if faults == count]
            plot(right, points, colour, "_", style)
    for count, style in STYLES.items():
        right.plot([], [], style, color="#6b6f76", label=f"{count:,} fault{'s' if count > 1 else ''}", markersize=5)
    left.set(xscale="log", yscale="log", title=f"file of {smallest:g} GB", xlabel="faults")
    left.set_xticks([1, 100, 10_000, 1_000_000], ["1", "100", "10,000", "1,000,000"])
    right.set(xscale="log", title="the same faults in larger files", xlabel="file size, GB")
    right.set_xticks([0.25, 1, 2.5, 10], ["0.25", "1", "2.5", "10"])
    left.set_yticks([1e-2, 0.1, 1, 10], ["10 ms", "0.1 s", "1 s", "10 s"])
    left.set_ylabel("time")
    for axis in (left, right):
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    left.legend(frameon=False, loc="upper left", fontsize=9)
    right.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    return target


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((ROOT / "benchmarks" / "results" / "inject.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
