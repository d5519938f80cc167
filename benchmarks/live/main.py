"""What does a live injection cost that waits for its step, or has gone?

`python benchmarks/live/main.py [--quick] [--device cuda]`
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, perf_counter_ns, process_time_ns

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks.harness import RESULTS, Column, Report, Sample, interleave, say, seconds
from torch import nn

import evergrad as eg
from evergrad.injection import LiveInjection

TITLE = "Live injection that waits, or has gone: what a training step costs"
FAR = 1 << 40
NONE, WAITING, GONE = "none", "scheduled", "removed"


class Training:
    """One model, trained on the same batch again and again."""

    def __init__(self, width: int, depth: int, batch: int, device: str) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.batch = torch.randn(batch, width, device=device)
        self._wait: Callable[[], object] = torch.cuda.synchronize if device != "cpu" else lambda: None

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def block(self, steps: int) -> Sample:
        """The medians of so many steps: by the clock, and of this process's own time on a core."""
        times, busy = [], []
        self.step()
        for _ in range(steps):
            begin, own = perf_counter_ns(), process_time_ns()
            self.step()
            self._wait()
            busy.append((process_time_ns() - own) / 1e9)
            times.append((perf_counter_ns() - begin) / 1e9)
        return {"step_s": statistics.median(times), "core_s": statistics.median(busy)}


def contenders(training: Training, twin: Training, steps: int) -> dict[str, Callable[[], Sample]]:
    """The same training without, with a fault that waits, and after one that was taken back.

    Scheduling takes as long as a step or more, and leaves the caches with other things: it comes before every block,
    without an injection for a twin.
    """

    def schedule(chosen: Training) -> LiveInjection:
        return eg.inject_live(chosen.model, chosen.optimizer, eg.BitFlip(), count=1, step=FAR)

    def waiting() -> Sample:
        with schedule(training):
            return training.block(steps)

    def removed(chosen: Training) -> Sample:
        schedule(chosen).remove()
        return training.block(steps)

    return {NONE: lambda: removed(twin), WAITING: waiting, GONE: lambda: removed(training)}


def paired(samples: dict[str, list[Sample]]) -> dict[str, list[Sample]]:
    """Each block with its ratio to the one without, of the same round."""
    return {
        name: [
            {**sample, "paired": sample["step_s"] / plain["step_s"], "core": sample["core_s"] / plain["core_s"]}
            for sample, plain in zip(blocks, samples[NONE], strict=True)
        ]
        for name, blocks in samples.items()
    }


def verdict(case: str, name: str, report: Report) -> str:
    """What the ratios of one contender say: the median with its 95 % interval, by the order of the values alone."""
    ratios = sorted(
        next(row for row in report.rows if (row.case, row.contender) == (case, name)).measures["core"].values
    )
    half = 0.98 * len(ratios) ** 0.5
    low, high = ratios[int(len(ratios) / 2 - half)], ratios[min(int(len(ratios) / 2 + half), len(ratios) - 1)]
    middle, (first, _, third) = statistics.median(ratios), statistics.quantiles(ratios, n=4)
    what = "none that can be measured" if low <= 1 <= high else f"{middle - 1:+.2%}"
    spread = f"95 % interval {low:.4f} to {high:.4f}, half of the blocks {first:.4f} to {third:.4f}"
    return f"{case}, {name}: {middle:.4f} of the core time of a step without ({spread}). Cost: {what}."


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few blocks; results are not kept")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=401)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    blocks, steps = (5, 10) if given.quick else (given.blocks, given.steps)
    torch.set_num_threads(1)
    begin = perf_counter()
    columns = [
        Column("step_s", "step", seconds),
        Column("paired", "× none, same round", lambda ratio: f"{ratio:.4f}"),
        Column("core_s", "on a core", seconds),
        Column("core", "× none, same round", lambda ratio: f"{ratio:.4f}"),
    ]
    report = Report("live", TITLE, columns, baseline=NONE, ratio_of="step_s")
    for width, depth, batch in ((32, 2, 8), (256, 6, 32)):
        training = Training(width, depth, batch, given.device)
        training.block(20)
        case = f"{depth} layers of {width}"
        twin = Training(width, depth, batch, given.device)
        twin.block(1)
        tried = contenders(training, twin, steps)
        report.add(case, paired(interleave(tried, dict.fromkeys(tried, blocks))))
        for name in (WAITING, GONE):
            report.notes.append(verdict(case, name, report))
            say(f"  {report.notes[-1]}")
    report.notes.append(
        f"On {given.device}, one thread; {blocks} blocks of {steps} steps each, in turns; a sample is the median step "
        "of a block. Scheduled: for a step that never comes. With other work on the machine, time on a core tells more."
    )
    report.print()
    say(f"{perf_counter() - begin:.0f} s")
    if given.quick:
        say("quick: results are not written")
    else:
        written = report.write()
        say(f"written: {', '.join(str(path.relative_to(RESULTS.parent.parent)) for path in written)}")


if __name__ == "__main__":
    main()
