"""Jobs of our own scripts, as `evergrad.testing` launches users' ones: by a process that has imported torch."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evergrad.testing import JobRun, close_forkserver, run_job

FOLDER = Path(__file__).parent


@dataclass
class Ran:
    """What became of a job."""

    code: int
    stdout: str
    stderr: str
    run: Path
    job: JobRun | None = None

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The timeline, or what of it is of one kind."""
        lines = [json.loads(line) for line in (self.run / "timeline.jsonl").read_text().splitlines()]
        return [line for line in lines if kind is None or line["event"] == kind]

    @property
    def results(self) -> dict[int, dict[str, Any]]:
        """What each process that finished has left, by uid."""
        found = (self.run.parent / "out").glob("*.json")
        return {int(path.stem): json.loads(path.read_text()) for path in found}

    @property
    def said(self) -> str:
        """Everything, for a failed assertion."""
        return f"exit code {self.code}\n{self.stdout}\n{self.stderr}"


class JobRunner:
    """Runs jobs one after the other."""

    def run(self, folder: Path, *options: object, script: Path = FOLDER / "trainer.py", arguments: Any = ()) -> Ran:
        """`evergrad run OPTIONS script OUT ARGUMENTS` in a folder of its own; ranks begin when all spares wait.

        A busy machine is no reason to be taken for dead: tests of silence say how long it may be.
        """
        limit_s = float(os.environ.get("EVERGRAD_TEST_LIMIT_S", "90"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVERGRAD_WAIT_FOR_SPARES", ",".join(map(str, _spares(options))))
            patient = ("--heartbeat-timeout", 30, *options)
            job = run_job(script, folder / "out", *arguments, options=patient, timeout=limit_s, folder=folder)
        code = -signal.SIGALRM if job.timed_out else job.exit_code
        return Ran(code, job.stdout, job.stderr, folder / "run", job)

    def close(self) -> None:
        close_forkserver()


def _spares(options: Sequence[object]) -> range:
    """The numbers of the spares that these options ask for."""
    found = dict(itertools.pairwise(options))
    ranks = int(str(found.get("-n", 1)))
    return range(ranks, ranks + int(str(found.get("--spares", 0))))
