"""`python study_run.py JOBS PLAN OUT`: a study over toy work in Slurm jobs, run by a process that can be killed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "study")]

from evergrad.study.executors.slurm import SlurmCluster  # noqa: E402
from evergrad.study.plan import Plan  # noqa: E402
from evergrad.study.plan_files import read_plan_text  # noqa: E402
from evergrad.study.results import Results  # noqa: E402
from evergrad.study.runner import StudyRunStatus, run_study  # noqa: E402


def run(jobs: int, plan: Path, out: Path) -> Results:
    """Run it, and say how far it is."""

    def report(at: StudyRunStatus) -> None:
        print(at.phase, at.done, at.due, flush=True)

    def executor(folder: Path) -> SlurmCluster:
        return SlurmCluster(folder, "study_work:perform", jobs=jobs, minutes=10)

    return run_study(Plan.of(read_plan_text(plan)), out, executor=executor, progress=report)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
