"""The reference trainings of studies: workloads (model, data, metric) and mechanisms (how they are spread).

settings.py    what determines a training: equal settings, equal bits
workloads/     models, data, and the names that plans have for them
mechanisms/    session.py: the contract; single.py: one process; ddp.py: data parallel
"""

from importlib import import_module
from typing import TYPE_CHECKING

from evergrad.training.settings import Training

if TYPE_CHECKING:
    from evergrad.training.workloads.workload import Dataset, Workload

__all__ = ["Dataset", "Training", "Workload"]


def __getattr__(name: str) -> object:
    # Plans, journals and tables speak of trainings without torch.
    if name in ("Dataset", "Workload"):
        return getattr(import_module("evergrad.training.workloads.workload"), name)
    raise AttributeError(f"module 'evergrad.training' has no attribute {name!r}")
