"""Your training script as a job in a test: launched under a schedule of failures, and what became of it.

>>> run = run_job("train.py", "--lr", "0.1", ranks=4, spares=1,         # doctest: +SKIP
...               failures=Failures().kill(rank=1, step=3))
>>> run.assert_survived(1)                                              # doctest: +SKIP

The script needs no change. It runs under `evergrad run`, in the folder and with the environment of the test.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Protocol

from evergrad.errors import UsageError
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.fingerprints import RECORD_WEIGHTS
from evergrad.testing.job_run import JobRun
from evergrad.testing.nursery import Nursery, Request, launch_plainly

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # Torch looks up the name of every address it connects to; where no server answers, that takes its time.
    "RES_OPTIONS": "timeout:1 attempts:1",
    # Whoever hangs can tell where: see watching.py.
    "PYTHONFAULTHANDLER": "1",
}
_nursery = Nursery()


class RunJob(Protocol):
    """What `run_job` is, the function and the fixture."""

    def __call__(
        self,
        script: str | PathLike[str],
        *arguments: object,
        ranks: int = 1,
        spares: int = 0,
        strategy: str = "rollback",
        failures: Failures | Iterable[str] | str = (),
        timeout: float = 60.0,
        options: Iterable[object] = (),
        folder: str | PathLike[str] | None = None,
        fork: bool = True,
    ) -> JobRun: ...


def run_job(
    script: str | PathLike[str],
    *arguments: object,
    ranks: int = 1,
    spares: int = 0,
    strategy: str = "rollback",
    failures: Failures | Iterable[str] | str = (),
    timeout: float = 60.0,
    options: Iterable[object] = (),
    folder: str | PathLike[str] | None = None,
    fork: bool = True,
) -> JobRun:
    """Run a script as `evergrad run` does, to its end or until `timeout` seconds have passed. Not from several threads.

    - `arguments`: the script's; `{folder}` in one of them becomes the job's folder.
    - `failures`: a schedule, or texts as `--fail` takes them.
    - `options`: further ones of `evergrad run`, word for word: `("--nodes", 2, "--after-loss", "constant")`.
    - `folder`: for the run and what it prints, one a job; None makes one that is gone when Python ends.
    - `fork`: all processes are forks of one that has imported torch; False starts each from nothing.

    What cannot be launched (no such script, a failure of rank 7 in a job of 4) ends with exit code 2, as there.
    """
    if not 0 < timeout < 1e6:
        raise UsageError(f"run_job: timeout={timeout!r}: expected seconds, above 0 and below a million")
    place = _made(folder)
    schedule = failures if isinstance(failures, Failures) else Failures.parse(failures)
    words: list[object] = ["-n", ranks, "--spares", spares, "--strategy", strategy]
    for text in schedule.texts:
        words += ["--fail", text]
    words += [*options, os.fspath(script), *(str(one).replace("{folder}", str(place)) for one in arguments)]
    env = _DEFAULTS | os.environ | {RECORD_WEIGHTS: "1"}
    request = Request([str(word) for word in words], str(place), os.getcwd(), env, timeout)
    ending = _nursery.launch(request) if fork else launch_plainly(request)
    return JobRun.load(place, ending, timeout)


def close_nursery() -> None:
    """End the process that launches jobs; the next job starts another. Done at exit by itself; twice is fine."""
    _nursery.close()


atexit.register(close_nursery)


def _made(folder: str | PathLike[str] | None) -> Path:
    if folder is None:
        path = Path(tempfile.mkdtemp(prefix="evergrad-job-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return path
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    if taken := [name for name in ("run", "stdout", "stderr") if (path / name).exists()]:
        raise UsageError(f"run_job: folder {path}: expected one that no job has used, found {taken[0]} in it")
    return path
