"""Scripts in the idiom of public projects: what a lost, leaving or joining rank changes of their result.

Every rank's weights, optimizer state and step are compared with the other ranks' and with plain DDP.
`idiom_sweep.py` runs the same scripts under many more schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from idiom_sweep import Case, cases, difference, run_case, run_plain

from evergrad.testing import close_forkserver, run_job

IDIOMS = Path(__file__).parent / "idioms"


class Plain:
    """The results of plain DDP, each run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[tuple[str, int], Any] = {}

    def __call__(self, script: str, ranks: int) -> Any:
        if (script, ranks) not in self._results:
            self._results[script, ranks] = run_plain(script, ranks, self._folder / f"{script}-{ranks}")
        return self._results[script, ranks]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    yield Plain(tmp_path_factory.mktemp("plain"))
    close_forkserver()


def check(case: Case, plain: Plain, folder: Path) -> None:
    outcome = run_case(case, plain(case.script, case.ranks), folder)
    assert not outcome.wrong, "\n".join([str(case), *outcome.wrong, outcome.said])


NANO = {
    "a learning rate set by hand, a rank leaves": Case(
        "nano", ranks=2, spares=1, failures=("leave rank=1 step=5 phase=forward",),
        arguments=("--lr_first=0", "--ddp_by_env=0"), must_be_exact=True,
    ),
    "a learning rate set by hand before the batch, a rank leaves": Case(
        "nano", ranks=2, spares=1, failures=("leave rank=0 step=2 phase=optimizer",),
        arguments=("--lr_first=1", "--ddp_by_env=0"), must_be_exact=True,
    ),
    "a learning rate set by hand, a second launch": Case(
        "nano", ranks=2, failures=("leave random=2 step=3 phase=optimizer",), relaunched=True,
        arguments=("--lr_first=0", "--ddp_by_env=0", "--checkpoints={folder}/versions"),
    ),
    "a learning rate set by hand, the job grows": Case(
        "nano", ranks=2, spares=1, options=("--max-ranks", 3), awaits="1:2",
        arguments=("--lr_first=0", "--ddp_by_env=0"),
    ),
    "a spare of a script that looks for RANK": Case(
        "nano", ranks=3, spares=1, failures=("kill rank=0 step=8 phase=backward",),
        arguments=("--lr_first=0", "--ddp_by_env=1"), must_be_exact=True,
    ),
    "a rank dies in the last step": Case(
        "nano", ranks=2, spares=1, failures=("kill rank=0 step=11 phase=optimizer",),
        arguments=("--lr_first=0", "--ddp_by_env=0"),
    ),
}  # fmt: skip
MINI = {
    "a rank dies in the last step": Case(
        "mini", ranks=2, spares=1, failures=("kill rank=0 step=17 phase=optimizer",), must_be_exact=True,
    ),
    "a rank leaves in the last step of an epoch": Case(
        "mini", ranks=2, spares=1, failures=("leave rank=1 step=11 phase=forward",), must_be_exact=True,
    ),
    "a rank dies in the first step after an evaluation": Case(
        "mini", ranks=3, spares=1, failures=("kill rank=2 step=4 phase=forward",), must_be_exact=True,
    ),
    "a joiner that evaluates past epochs": Case(
        "mini", ranks=3, spares=1, failures=("kill rank=0 step=9 phase=backward",), arguments=("--careful=0",),
        must_be_exact=True,
    ),
    "a rank dies in an evaluation": Case("mini", ranks=3, spares=1, dies="eval:1"),
    "a rank is started again": Case(
        "mini", ranks=2, failures=("kill rank=1 step=7 phase=forward",), options=("--respawn",), awaits="9:2",
        arguments=("--careful=0",),
    ),
    "all ranks are started again": Case(
        "mini", ranks=2, strategy="restart", failures=("kill rank=1 step=14 phase=optimizer",),
        options=("--min-ranks", 2), arguments=("--checkpoints={folder}/versions", "--every=4", "--careful=0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NANO)
def test_a_script_with_its_own_batches_ends_as_it_says(name: str, plain: Plain, tmp_path: Path) -> None:
    check(NANO[name], plain, tmp_path)


@pytest.mark.parametrize("name", MINI)
def test_a_trainer_class_with_epochs_ends_as_it_says(name: str, plain: Plain, tmp_path: Path) -> None:
    check(MINI[name], plain, tmp_path)


@pytest.mark.parametrize("script", ["nano", "mini"])
def test_without_failures_a_script_ends_as_in_plain_ddp(script: str, plain: Plain, tmp_path: Path) -> None:
    check(Case(script, ranks=2, must_be_exact=True), plain, tmp_path)


def test_schedules_are_the_same_every_time() -> None:
    assert cases("nano") == cases("nano")
    assert len({str(case) for script in ("nano", "mini") for case in cases(script)}) > 70


def test_a_comparison_finds_what_differs(plain: Plain) -> None:
    one, other = plain("mini", 2)[0], plain("mini", 2)[1]
    assert difference(one, other) == ""
    group = dict(other["optimizer"]["param_groups"][1], lr=0.5)
    changed = dict(other["optimizer"], param_groups=[other["optimizer"]["param_groups"][0], group])
    assert "param_groups[1]['lr']" in difference(one, dict(other, optimizer=changed))
    emptied = dict(other["optimizer"], state={})
    assert "optimizer state of" in difference(one, dict(other, optimizer=emptied))
    weights = {name: tensor.clone() for name, tensor in other["model"].items()}
    weights["head.weight"][0, 0] += 1
    assert "model head.weight" in difference(one, dict(other, model=weights))


LATE_VERSION = "the newest version is that of the end of the epoch before"
RESTARTS = {
    "three ranks go on from the version of the first step": Case(
        "nano", ranks=3, failures=("leave random=3 step=0 phase=backward",), relaunched=True,
        arguments=("--checkpoints={folder}/versions",),
    ),
    "rank 0 dies before the first version": Case(
        "mini", ranks=2, spares=1, strategy="restart", failures=("kill rank=0 step=0 phase=forward",),
        arguments=("--checkpoints={folder}/versions",),
    ),
    LATE_VERSION: Case(
        "mini", ranks=2, spares=1, strategy="restart", failures=("kill rank=0 step=13 phase=forward",),
        arguments=("--checkpoints={folder}/versions", "--every=3"), must_be_exact=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESTARTS)
def test_a_restart_ends_as_it_says(name: str, plain: Plain, tmp_path: Path) -> None:
    check(RESTARTS[name], plain, tmp_path)


def test_a_batch_that_is_fetched_before_the_step_is_refused_at_once(tmp_path: Path) -> None:
    run = run_job(IDIOMS / "prefetch_trainer.py", "{folder}/out", ranks=2, folder=tmp_path / "job")
    assert run.exit_code == 2, run.stderr
    assert run.summary["steps"] == 0, run.summary
    assert "job.step" in run.summary["message"]
