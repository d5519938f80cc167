"""`python toy_run.py EXECUTOR PLAN OUT`: a study over toy work, in a process of its own that can be killed."""

from __future__ import annotations

import sys
from pathlib import Path

from evergrad.study.executors.base import Executor
from evergrad.study.runner import StudyRunStatus, run_study


def executor(kind: str, folder: Path) -> Executor:
    """One of those that there are, with toy work."""
    sys.path.insert(0, str(Path(__file__).parent))
    if kind == "dask":
        from evergrad.study.executors.dask import DaskCluster

        return DaskCluster(folder, "toy_work:perform", workers=2)
    if kind == "local":
        from evergrad.study.executors.local import LocalProcesses

        return LocalProcesses(folder, "toy_work:perform", workers=2)
    from evergrad.study.executors.in_process import InProcess

    return InProcess(folder, "toy_work:perform")


def main(kind: str, plan: str, out: str) -> None:
    """Run it, and say how far it is."""

    def report(at: StudyRunStatus) -> None:
        print(at.phase, at.done, at.due, flush=True)

    run_study(plan, out, executor=lambda folder: executor(kind, folder), progress=report)


if __name__ == "__main__":
    main(*sys.argv[1:])
