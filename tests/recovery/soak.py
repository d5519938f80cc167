"""A hundred failures of all kinds in one run of four ranks and two spares, each of which is started again.

`make soak` runs it and writes benchmarks/results/recovery_soak.txt: what was to happen, what happened, and whether the
job ended as it should: finished, with the same weights on all ranks, every sample of every epoch used once.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from evergrad.testing import Failures, JobRun, run_job

RANKS, SPARES = 4, 2
SAMPLES = 960
KINDS = {
    "kill": "",
    "exception": "",
    "stop": "for=4",
    "slow": "by=4 for=2",
    "cut": "for=4",
    "leave": "",
    "flip": "where=model/** bits=exponent",
}
PHASES = ("data", "forward", "backward", "optimizer")
IN_RECOVERY = ("agreement", "recovery")


def schedule(count: int, apart: int, seed: int) -> Failures:
    """So many failures, one every few steps; now and then another one while the job recovers from it."""
    drawn, texts, step = random.Random(seed), list[str](), 3
    while len(texts) < count:
        kind = drawn.choice(list(KINDS))
        texts.append(
            f"{kind} random=1 step={step} phase={drawn.choice(PHASES)} seed={drawn.randrange(1, 1000)} {KINDS[kind]}"
        )
        if kind == "kill" and len(texts) < count and drawn.random() < 0.5:
            texts.append(f"kill random=1 step={step} phase={drawn.choice(IN_RECOVERY)} seed={drawn.randrange(1, 1000)}")
        step += drawn.randrange(1, 2 * apart)
    return Failures.parse(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--apart", type=int, default=8, help="steps between two failures, about")
    parser.add_argument("--pause", type=float, default=0.15, help="seconds that a batch takes at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1500.0)
    options = parser.parse_args()
    failures = schedule(options.failures, options.apart, options.seed)
    last = max(failure.step or 0 for failure in failures)
    # With fewer ranks an epoch has more steps: as many epochs as it takes with all.
    epochs = last // (SAMPLES // (4 * 2 * RANKS)) + 2
    trainer = Path(__file__).parent / "trainer.py"
    folder = Path(tempfile.mkdtemp(prefix="evergrad-soak-"))
    ran = run_job(
        trainer, "{folder}/out", "--epochs", str(epochs), "--samples", str(SAMPLES), "--pause", str(options.pause),
        "--guard", "5", "--checkpoints", "{folder}/ck", "--every", "10",
        ranks=RANKS, spares=SPARES, failures=failures, timeout=options.timeout, folder=folder / "job",
        options=("--respawn", "--max-restarts", "100", "--hang-timeout", "20", "--warn-after", "5"),
    )  # fmt: skip
    print(f"{len(failures)} failures scheduled, seed {options.seed}: {dict(Counter(one.kind for one in failures))}")
    print(report(ran, epochs))
    wrong = judged(ran, epochs)
    print(wrong or f"all is well: {ran.summary['message'] if ran.summary else ''}")
    if wrong:
        print(f"left in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def report(ran: JobRun, epochs: int) -> str:
    """What happened, in numbers and a line for each generation."""
    counts = Counter(event.event for event in ran.timeline)
    shown = ("kill_injected", "stop_injected", "slowdown_injected", "network_cut_injected", "bit_flip_injected",
             "leave_injected", "leave_requested", "process_lost", "corruption_found", "rollback_to_version",
             "restored", "process_restarted", "change_requested", "plan")  # fmt: skip
    lines = [", ".join(f"{name} {counts[name]}" for name in shown)]
    begun = ran.timeline[0].monotonic
    for event in ran.timeline:
        at_s = event.monotonic - begun
        fields = event.fields
        if event.event == "plan":
            lines.append(
                f"{at_s:7.2f} s  generation {fields['generation']:3}: {len(fields['members'])} ranks, "  # type: ignore[arg-type]
                f"{fields['verdicts']}, dead {fields['dead']}, left {fields['left']}, joined {fields['joiners']}"
                + (", from a checkpoint" if fields["restart"] else "")
            )
        elif event.event == "process_lost":
            lines.append(f"{at_s:7.2f} s  process {fields['uid']} (rank {fields['rank']}): {fields['how']}")
    lines += [f"epoch {epoch} of {epochs}: {books}" for epoch, books in ran.sample_counts.items()]
    return "\n".join(lines)


def judged(ran: JobRun, epochs: int) -> str:
    """What is wrong; empty if nothing is."""
    try:
        ran.assert_no_hang()
        ran.assert_finished()
        ran.assert_failures_happened()
        ran.assert_equal_weights()
        ran.assert_no_sample_lost()
        ran.assert_no_sample_repeated()
    except AssertionError as error:
        return f"WRONG: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
