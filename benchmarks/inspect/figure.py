"""Draws docs/figures/inspect.svg from results/inspect.json: `python benchmarks/inspect/figure.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PANELS = {
    "torch zip": {"evergrad": "Evergrad", "torch.load": "torch.load", "torch.load mmap": "torch.load(mmap=True)"},
    "safetensors": {"evergrad": "Evergrad", "safe_open": "safe_open", "load_file": "load_file"},
}
COLOURS = ["#0b7a4b", "#b5482f", "#6b6f76"]


def series(results: dict[str, Any], container: str, contender: str) -> tuple[list[float], list[dict[str, float]]]:
    """File sizes in GB, and the listing times measured for them."""
    sizes: list[float] = []
    times: list[dict[str, float]] = []
    for row in results["rows"]:
        found = re.fullmatch(rf"{container}, ([\d.]+) GB in .*", row["case"])
        if found and row["contender"] == contender:
            sizes.append(float(found[1]))
            times.append(row["measures"]["listing_s"])
    return sizes, times


def main() -> None:
    """One panel a container, medians with their extremes, both axes logarithmic."""
    results = json.loads((ROOT / "benchmarks" / "results" / "inspect.json").read_text())
    # The same picture from the same numbers: no date, fixed identifiers.
    plt.rcParams.update(
        {"font.size": 10, "svg.hashsalt": "evergrad", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, (container, contenders) in zip(axes, PANELS.items(), strict=True):
        for colour, (contender, label) in zip(COLOURS, contenders.items(), strict=True):
            sizes, times = series(results, container, contender)
            medians = [time["median"] for time in times]
            axis.plot(sizes, medians, "o-", color=colour, label=label, linewidth=2 if contender == "evergrad" else 1.4)
            axis.fill_between(
                sizes,
                [time["min"] for time in times],
                [time["max"] for time in times],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axis.set(xscale="log", yscale="log", title=f"{container}, 100 tensors", xlabel="file size, GB")
        axis.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        axis.set_yticks([1e-3, 1e-2, 0.1, 1, 10], ["1 ms", "10 ms", "0.1 s", "1 s", "10 s"])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.legend(frameon=False)
    axes[0].set_ylabel("time to list the tensors")
    figure.savefig(ROOT / "docs" / "figures" / "inspect.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
