"""Studies: what a soft error does to training, with intervals.

    plan → trials → (golden run | fault → training) → observations in a journal → outcomes → statistics → tables

plan.py        what is asked, as data: read this first; plan_reading.py (checked), plan_files.py, gallery/*.toml
trials.py      the records: a trial, and what is observed of it
work.py        what a worker does; golden_runs.py, warming.py (what it keeps loaded), hitting.py (faults), observing.py
ranks/         groups of warm processes, for trainings that are spread over ranks
watching/      how far a fault spreads, what guards see · saving/ what checkpointing costs
commands/      any program at all
executors/     where trials run: contract.py first; local processes, Dask, Slurm
runner.py      what is missing, into the journal; journal.py, folder.py (one lock), tally.py (cells, as trials come)
outcomes.py    what an observation means; statistics.py, sequential.py (looking while it runs), comparisons.py
results.py     cells; tables.py, watched_tables.py, columns.py, rendering.py, facts.py, exporting.py: what people see
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.study.estimates import Estimate, estimate
    from evergrad.study.plan import Plan
    from evergrad.study.plan_files import gallery, read_plan_text
    from evergrad.study.results import Cell, Results, results_of
    from evergrad.study.runner import ExecutorSettings, StudyRunStatus, run_study
    from evergrad.study.table_formats import format_table
    from evergrad.study.tables import study_table

_HOMES = {
    "Cell": "results",
    "Estimate": "estimates",
    "ExecutorSettings": "runner",
    "Plan": "plan",
    "StudyRunStatus": "runner",
    "Results": "results",
    "estimate": "estimates",
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
