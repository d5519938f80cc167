"""Draws docs/figures/recovery.svg from results/recovery.json: `python benchmarks/recovery/figure.py`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from benchmarks.bars import FLOOR, OURS, THEIRS
from benchmarks.harness import seconds
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "figures" / "recovery.svg"
CASE = "a rank is lost"
LABELS = {
    "forward": "forward",
    "forward, spare": "forward, spare",
    "rollback": "rollback",
    "rollback, spare": "rollback, spare",
    "restart": "restart in process",
    "restart, new processes": "restart, new processes",
    "torchft, tuned": "torchft, tuned",
    "torchft": "torchft",
    "torchrun restart": "torchrun restart",
}


def draw(results: dict[str, Any], target: Path = TARGET) -> Path:
    """A row a contender: until the last survivor has applied a step, and, lighter, until no work is lost any more."""
    # The same picture from the same numbers: no date, fixed identifiers.
    plt.rcParams.update(
        {"font.size": 10, "svg.hashsalt": "evergrad", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    rows = {row["contender"]: row["measures"] for row in results["rows"] if row["case"] == CASE and row["measures"]}
    names = [name for name in LABELS if name in rows]
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.38 * len(names)), layout="constrained")
    for place, name in enumerate(names):
        _bar(axis, place, name, rows[name])
    steps = [rows[name]["step_s"]["median"] for name in names if not name.startswith("torch")]
    if steps:
        step = statistics.median(steps)
        axis.axvline(step, color=FLOOR, linestyle=":", linewidth=1.2, label=f"a training step ({seconds(step)})")
        bar = 2 * step + 0.1
        axis.axvline(bar, color=FLOOR, linestyle="--", linewidth=1.2, label=f"two steps + 100 ms ({seconds(bar)})")
    axis.barh([0], [0], color=FLOOR, alpha=0.3, label="until nothing is lost")
    axis.set_yticks(range(len(names)), [LABELS[name] for name in names])
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="from SIGKILL until every survivor has applied a step again")
    axis.set_xticks([0.1, 1, 10, 100], ["0.1 s", "1 s", "10 s", "100 s"])
    axis.set_xlim(0.05, 2.2 * max(rows[name].get("back_s", rows[name]["time_s"])["median"] for name in names))
    axis.minorticks_off()
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
    return target


def _bar(axis: Axes, place: int, name: str, measures: dict[str, Any]) -> None:
    last = measures["time_s"]
    colour = OURS if not name.startswith("torch") else THEIRS
    end = last["median"]
    if "back_s" in measures and measures["lost_steps"]["median"] > 0:
        end = max(end, measures["back_s"]["median"])
        axis.barh(place, end, height=0.62, color=colour, alpha=0.3, linewidth=0)
    axis.barh(place, last["median"], height=0.62, color=colour, linewidth=0)
    axis.plot([last["min"], last["max"]], [place, place], color="#1c1e21", linewidth=1)
    place_s, box = max(end, last["max"]) * 1.08, {"color": "white", "pad": 1}
    axis.text(place_s, place, seconds(last["median"]), va="center", fontsize=9, bbox=box)


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((ROOT / "benchmarks" / "results" / "recovery.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
