"""Studies: what a soft error does to training, with intervals.

    plan → trials → (golden run | fault → training) → observations in a journal → outcomes → statistics → tables

runner.py        `run_study`: golden runs first, then every missing trial
plan.py          the question as data; plan_reader.py: checked cells; plan_files.py: TOML; gallery/; run_estimate.py
trials.py        the records: a trial, its observation, its outcome
tasks.py         what a worker does; golden.py, loaded_trainings.py: the fault-free run and what stays loaded
observe.py       watches a training step by step; probes.py: how far a fault spreads, what guards see; probe_base.py
target_selection.py · checkpoint_cost.py    where faults aim · what saving costs
external_training.py   trainings that are programs; external_process.py, reaper.py: running one
rank_group.py    warm processes of a training that is spread over ranks; rank_process.py: one of them
executors/       where trials run: this machine, Dask, Slurm
folder.py        plan, journal and lock of a study; results.py: its cells and progress; provenance.py
statistics.py · comparisons.py    intervals · which cells differ
tables.py · probe_tables.py · table_formats.py · replay.py    tables in every form · one trial again
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.study.plan import Plan
    from evergrad.study.plan_files import gallery, read_plan_text
    from evergrad.study.results import Cell, Results, results_of
    from evergrad.study.run_estimate import Estimate, estimate
    from evergrad.study.runner import ExecutorSettings, StudyRunStatus, run_study
    from evergrad.study.table_formats import format_table
    from evergrad.study.tables import study_table

_HOMES = {
    "Cell": "results",
    "Estimate": "run_estimate",
    "ExecutorSettings": "runner",
    "Plan": "plan",
    "StudyRunStatus": "runner",
    "Results": "results",
    "estimate": "run_estimate",
    "gallery": "plan_files",
    "read_plan_text": "plan_files",
    "results_of": "results",
    "run_study": "runner",
    "study_table": "tables",
    "format_table": "table_formats",
}

__all__ = [
    "Cell",
    "Estimate",
    "ExecutorSettings",
    "Plan",
    "Results",
    "StudyRunStatus",
    "estimate",
    "format_table",
    "gallery",
    "read_plan_text",
    "results_of",
    "run_study",
    "study_table",
]


def __getattr__(name: str) -> object:
    # When first used: every worker process comes through this package.
    if name not in _HOMES:
        raise AttributeError(f"module 'evergrad.study' has no attribute {name!r}")
    return getattr(import_module(f"evergrad.study.{_HOMES[name]}"), name)
