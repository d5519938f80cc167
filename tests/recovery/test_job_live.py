"""Whole jobs of real scripts: equal to plain DDP to the bit, and the same promises when ranks are lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forkserver import FOLDER, JobRunner, Ran

Launch = Callable[..., Ran]
TWINS, RICH = FOLDER / "twins.py", FOLDER / "rich_trainer.py"
HARD = ["--loader", "stream", "--scaler", "--hooks"]
"""A loader that only its rank knows, a scaler that overflows, compression."""
PLAIN = ["--one-optimizer", "--samples", "96"]
NEVER = "kill rank=0 step=3 bucket=99"
"""There are not so many buckets."""


@pytest.fixture(scope="session")
def undisturbed(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """The same script without failures; each kind is run once."""
    known: dict[tuple[str, ...], Ran] = {}

    def run(*arguments: str) -> Ran:
        if arguments not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[arguments] = job_runner.run(folder, "-n", 2, script=RICH, arguments=arguments)
            assert known[arguments].code == 0, known[arguments].said
        return known[arguments]

    return run


def by_rank(ran: Ran, *names: str) -> dict[int, tuple[Any, ...]]:
    """What each rank had in the end."""
    return {result["rank"]: tuple(result[name] for name in names) for result in ran.results.values()}


def steps_of(ran: Ran) -> dict[tuple[int, str], dict[str, Any]]:
    """What was seen of each step, by rank of the end and step."""
    return {(result["rank"], step): seen for result in ran.results.values() for step, seen in result["steps"].items()}


def assert_finished(ran: Ran, *, ranks: int, deaths: int = 0) -> None:
    """It ended well, with so many ranks, all with the same weights, after so many deaths."""
    assert ran.code == 0, ran.said
    assert len(ran.results) == ranks, ran.said
    assert len({result["weights"] for result in ran.results.values()}) == 1, ran.said
    assert sum(event["rank"] is not None for event in ran.events("process_lost")) == deaths, ran.said


def assert_balanced(ran: Ran, epochs: int = 2) -> None:
    """Every sample of every epoch was used once."""
    books = ran.events("epoch")
    assert len(books) == epochs
    assert all(not (book["twice"] or book["unused"] or book["lost"]) for book in books), books


# As plain DDP.


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [(4, []), (3, ["--branch"]), pytest.param(3, [], marks=pytest.mark.slow)],
    ids=["4 ranks", "3 ranks, a branch that one of them uses", "3 ranks"],
)
def test_a_job_trains_as_plain_ddp_does_to_the_last_bit(launch: Launch, ranks: int, arguments: list[str]) -> None:
    """Batch norm, dropout, channels last, padding, accumulation under no_sync or a branch used on one rank only."""
    ran = launch("-n", ranks, script=TWINS, arguments=arguments)
    assert ran.code == 0, ran.said
    assert len(ran.results) == ranks
    for uid, result in ran.results.items():
        for what in ("losses", "samples", "weights", *(["state"] if uid == 0 else [])):  # buffers are rank 0's
            assert result["wrapped"][what] == result["plain"][what]
        assert len(result["plain"]["losses"]) >= 12
    assert len({result["wrapped"]["weights"] for result in ran.results.values()}) == 1
    assert len({tuple(result["wrapped"]["losses"]) for result in ran.results.values()}) == ranks, (
        "each has its own data"
    )


def test_a_branch_that_nobody_was_told_of_ends_the_job_with_one_line(launch: Launch) -> None:
    ran = launch("-n", 2, script=TWINS, arguments=["--branch", "--unsaid"])
    assert ran.code == 2, ran.said
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("evergrad: fatal: rank ")
    assert "job.wrap(model, find_unused_parameters=True)" in last


# Everything at once, and two ranks lost.


def test_spares_take_over_scaler_hooks_optimizers_and_a_stream_exactly(
    launch: Launch, undisturbed: Callable[..., Ran]
) -> None:
    """Rank 1 dies in a step that overflows, rank 0 in one that does not."""
    ran = launch(
        "-n", 2, "--spares", 2, "--fail", "kill rank=1 step=2 bucket=0 at=during", "--fail",
        "kill rank=0 step=4 phase=forward", script=RICH, arguments=HARD,
    )  # fmt: skip
    golden = undisturbed(*HARD)
    assert_finished(ran, ranks=2, deaths=2)
    assert by_rank(ran, "state", "scale", "applied") == by_rank(golden, "state", "scale", "applied")
    mine, theirs = steps_of(ran), steps_of(golden)
    assert mine == {key: theirs[key] for key in mine}
    assert min(int(step) for _, step in mine) == 2


def test_an_overflow_on_one_rank_is_a_step_that_none_applies(undisturbed: Callable[..., Ran]) -> None:
    golden = undisturbed(*HARD)
    applied = {key: seen["applied"] for key, seen in steps_of(golden).items()}
    assert applied == {(rank, str(step)): step not in (2, 5) for rank in range(2) for step in range(12)}
    scales = [seen["scale"] for (rank, _), seen in steps_of(golden).items() if rank == 0]
    assert scales == [64, 128, 64, 64, 128, 64, 64, 128, 128, 256, 256, 512]
    assert {tuple(seen["hooked"]) for (_, step), seen in steps_of(golden).items() if step != "0"} == {(0, 1)}


def test_forward_recovery_repairs_through_the_hooks(launch: Launch) -> None:
    ran = launch(
        "-n", 3, "--strategy", "forward", "--fail", "kill rank=1 step=3 bucket=1 at=before",
        script=RICH, arguments=["--hooks"],
    )  # fmt: skip
    assert_finished(ran, ranks=2, deaths=1)
    plan = ran.events("plan")[1]
    assert plan["verdicts"] == {"repair": 2}
    for result in ran.results.values():
        hooked = result["steps"]["3"]["hooked"]
        assert hooked[:2] == [0, 1]
        # Whoever heard of the loss before its own second bucket sends that through the hooks once, in the repair.
        assert hooked[2:] in ([], [1], [0, 1]), "what was not reduced everywhere went through them again"
        assert result["steps"]["4"]["hooked"] == [0, 1]
    assert sum(epoch["lost"] for epoch in ran.events("epoch")) == 4


# Fewer ranks.


@pytest.fixture(scope="session")
def constant(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A weighted sampler, which draws on each rank otherwise and has to be shared; workers that load; a rank lost."""
    return job_runner.run(
        tmp_path_factory.mktemp("constant"), "-n", 3, "--batch-policy", "constant", "--fail", NEVER, "--fail",
        "kill rank=1 step=2 phase=backward", script=RICH, arguments=["--loader", "weighted", "--workers", 2],
    )  # fmt: skip


def sizes_of(ran: Ran, steps: range) -> list[int]:
    """How many samples all ranks together used in these steps."""
    return [sum(len(one["steps"][str(step)]["samples"]) for one in ran.results.values()) for step in steps]


def test_a_constant_batch_stays_as_large_with_fewer_ranks(constant: Ran) -> None:
    assert_finished(constant, ranks=2, deaths=1)
    assert_balanced(constant)
    assert sizes_of(constant, range(4)) == [8, 8, 12, 12], "before the loss there was one more rank"
    assert {tuple(result["steps"]["3"]["seen_lr"]) for result in constant.results.values()} == {(0.025,)}


def test_a_failure_that_never_came_is_told_of(constant: Ran) -> None:
    assert f"never happened: '{NEVER}'" in constant.stderr
    assert constant.stderr.count("never happened") == 1


def test_scale_lr_scales_the_rate_of_the_step_and_leaves_the_scheduler_alone(launch: Launch) -> None:
    """Batches of the user's own, which only their rank draws, and each is used once."""
    ran = launch(
        "-n", 3, "--batch-policy", "scale_lr", "--fail", "kill rank=2 step=1 bucket=0",
        script=RICH, arguments=["--loader", "batches", "--samples", 96],
    )  # fmt: skip
    assert_finished(ran, ranks=2, deaths=1)
    assert_balanced(ran)
    for result in ran.results.values():
        first, *rest = result["steps"].values()
        assert first["seen_lr"] == [0.05]
        for number, seen in enumerate(rest, 1):
            assert seen["lr"] == 0.05 * 0.5 ** (number // 3), "the scheduler's own"
            assert seen["seen_lr"] == [seen["lr"] * (2 / 3)]
    used = sorted(sample for seen in steps_of(ran).values() for sample in seen["samples"])
    assert len(used) == len(set(used)) * 2 - 4, "twice in two epochs, but for the batch that the dead rank had applied"


def test_two_ranks_lost_in_the_same_step_leave_the_fewest_that_are_allowed(launch: Launch) -> None:
    ran = launch(
        "-n", 4, "--min-ranks", 2, "--fail", "kill rank=1 step=2 bucket=0 times=2", script=RICH, arguments=[]
    )  # fmt: skip
    assert_finished(ran, ranks=2, deaths=2)
    assert_balanced(ran)
    assert {result["generation"] for result in ran.results.values()} == {2}
    assert ran.results.keys() == {0, 3}


def test_after_a_break_out_of_an_epoch_the_next_one_survives_exceptions(launch: Launch) -> None:
    ran = launch(
        "-n", 3, "--fail", "exception rank=1 step=4 phase=forward", "--fail",
        "exception rank=0 step=5 bucket=1 at=after", script=RICH, arguments=["--break-after", 3],
    )  # fmt: skip
    assert_finished(ran, ranks=1, deaths=2)
    (result,) = ran.results.values()
    assert result["epochs"][0] == 3
    assert_balanced(ran, epochs=1)  # one that was left has no books
    for rank, failure in ((1, "rank=1 step=4 phase=forward"), (0, "rank=0 step=5 bucket=1 at=after")):
        shown = [line for line in ran.stderr.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert f"[rank {rank}] Traceback (most recent call last):" in shown
        assert any(f"InjectedFailure: injected failure 'exception {failure}'" in line for line in shown)


# Back to a checkpoint, or not at all.


def test_restart_goes_back_to_the_newest_checkpoint_in_process(
    launch: Launch, undisturbed: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = launch(
        "-n", 2, "--spares", 1, "--strategy", "restart", "--fail", "kill rank=1 step=23 bucket=0",
        script=RICH, arguments=[*PLAIN, "--checkpoints", tmp_path / "versions", "--every", 2],
    )  # fmt: skip
    assert_finished(ran, ranks=2, deaths=1)
    restored = [(event["step"], event["in_process"]) for event in ran.events("restored") if event["step"] is not None]
    assert len(restored) == 2
    assert {is_in_process for _, is_in_process in restored} == {True, False}, "who lived, and the spare"
    assert {step for step, _ in restored} <= {14, 16, 18, 20, 22}, "of this epoch: the newest that all have finished"
    assert by_rank(ran, "state", "applied") == by_rank(undisturbed(*PLAIN), "state", "applied")


def test_restart_without_a_checkpointer_is_refused_at_the_start(launch: Launch) -> None:
    ran = launch("-n", 2, "--strategy", "restart", script=RICH)
    assert ran.code == 2, ran.said
    assert "fatal: eg.join: strategy 'restart' goes back to the newest checkpoint, and there is no" in ran.stderr
    assert not ran.events("kill_injected")


def test_too_few_ranks_and_no_checkpointer_end_the_job_and_say_what_to_do(launch: Launch) -> None:
    ran = launch("-n", 2, "--min-ranks", 2, "--fail", "kill rank=1 step=2", script=RICH)
    assert ran.code == 4, ran.said
    last = ran.stderr.splitlines()[-1]
    assert "too few ranks: 1 of 2 left, no spare waiting, 2 needed (rank 1 ended with SIGKILL)" in last
    assert "there is no checkpointer to restart from" in last
    assert "more spares or a lower --min-ranks" in last


# What is open.


def test_a_constant_batch_stays_as_large_in_the_epochs_after_the_loss(constant: Ran) -> None:
    assert sizes_of(constant, range(4, 8)) == [12] * 4


# Longer ones.


@pytest.mark.slow
def test_too_few_ranks_begin_again_from_the_newest_checkpoint(
    launch: Launch, undisturbed: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = launch(
        "-n", 2, "--min-ranks", 2, "--fail", "kill rank=1 step=9", script=RICH,
        arguments=[*PLAIN, "--checkpoints", tmp_path / "versions", "--every", 2],
    )  # fmt: skip
    assert_finished(ran, ranks=2, deaths=1)
    assert [event["relaunch"] for event in ran.events("plan")] == [False, True], "it broke no further generation"
    assert by_rank(ran, "state", "applied") == by_rank(undisturbed(*PLAIN), "state", "applied")


@pytest.mark.slow
def test_a_process_that_is_started_for_a_dead_one_takes_the_place_of_the_next(launch: Launch) -> None:
    ran = launch(
        "-n", 3, "--respawn", "--fail", "kill rank=1 step=5", "--fail", "kill rank=0 step=9",
        script=RICH, arguments=["--await-spare", 3, "--samples", 96],
    )  # fmt: skip
    assert_finished(ran, ranks=2, deaths=2)
    assert ran.results.keys() == {2, 3}
    assert [(event["source"], event["rank"], event["exact"]) for event in ran.events("rank_joined")] == [
        ("uid 3", 0, True)
    ]


@pytest.fixture(scope="session")
def fallen(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A second rank dies while the others wait for it to form the next generation."""
    return job_runner.run(
        tmp_path_factory.mktemp("fallen"), "-n", 3, "--fail", "kill rank=2 step=1 bucket=0",
        script=RICH, arguments=["--fall", 1],
    )  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_dies_while_the_next_generation_forms_is_survived_too(fallen: Ran) -> None:
    assert_finished(fallen, ranks=1, deaths=2)
    assert_balanced(fallen)


@pytest.mark.slow
def test_nothing_is_said_of_a_connection_that_we_cut_ourselves(fallen: Ran) -> None:
    assert "frame #" not in fallen.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_torchrun_a_job_restarts_from_its_newest_checkpoint(tmp_path: Path, shm: Path) -> None:
    def run(name: str, *arguments: object) -> dict[int, tuple[Any, ...]]:
        out = tmp_path / name / "out"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", RICH, out,
            "--one-optimizer", "--checkpoints", tmp_path / name / "versions", "--every", "2", *arguments,
        ]  # fmt: skip
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        env |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(
            [str(word) for word in command], env=env, capture_output=True, text=True, check=False, timeout=110
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return by_rank(Ran(0, "", "", tmp_path / name / "run"), "state", "applied")

    killed = run("killed", "--die-once", tmp_path / "died")
    assert (tmp_path / "died").exists()
    assert killed == run("whole")
    assert killed.keys() == {0, 1}
