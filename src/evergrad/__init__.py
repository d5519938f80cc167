"""Evergrad keeps distributed PyTorch training alive through crashes and silent data corruption.

>>> import evergrad as eg
>>> with eg.open_checkpoint("model.pt") as ck:                          # doctest: +SKIP
...     ck.read("model/fc.weight")

Names are loaded when they are first used: importing evergrad costs no torch import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.checkpoint import (
        Checkpointer,
        CheckpointWarning,
        Compress,
        EverySeconds,
        EverySteps,
        Local,
        MaxOverhead,
        Memory,
        Persistent,
        YoungDaly,
        rng_state,
    )
    from evergrad.errors import EvergradError
    from evergrad.formats import load_hdf5, open_checkpoint, save_hdf5

    # From their modules: these functions have a module's name, which a type checker would take in their place.
    from evergrad.formats.compare import compare
    from evergrad.formats.convert import convert
    from evergrad.formats.match import match
    from evergrad.formats.verify import verify
    from evergrad.injection import (
        BitFlip,
        BitMask,
        InjectionLog,
        Scale,
        SetValue,
        StuckAt,
        comm_faults,
        inject,
        inject_live,
    )
    from evergrad.injection.replay import replay
    from evergrad.injection.undo import undo
    from evergrad.recovery import join
    from evergrad.state import flatten, select, unflatten
    from evergrad.study import run_study

__version__ = "0.1.0"

_HOMES = {
    "BitFlip": "injection",
    "BitMask": "injection",
    "CheckpointWarning": "checkpoint",
    "Checkpointer": "checkpoint",
    "Compress": "checkpoint",
    "EvergradError": "errors",
    "EverySeconds": "checkpoint",
    "EverySteps": "checkpoint",
    "InjectionLog": "injection",
    "Local": "checkpoint",
    "MaxOverhead": "checkpoint",
    "Memory": "checkpoint",
    "Persistent": "checkpoint",
    "Scale": "injection",
    "SetValue": "injection",
    "StuckAt": "injection",
    "YoungDaly": "checkpoint",
    "comm_faults": "injection",
    "compare": "formats",
    "convert": "formats",
    "flatten": "state",
    "inject": "injection",
    "inject_live": "injection",
    "join": "recovery",
    "load_hdf5": "formats",
    "match": "formats",
    "open_checkpoint": "formats",
    "replay": "injection",
    "rng_state": "checkpoint",
    "run_study": "study",
    "save_hdf5": "formats",
    "select": "state",
    "undo": "injection",
    "unflatten": "state",
    "verify": "formats",
}

__all__ = [
    "BitFlip",
    "BitMask",
    "CheckpointWarning",
    "Checkpointer",
    "Compress",
    "EvergradError",
    "EverySeconds",
    "EverySteps",
    "InjectionLog",
    "Local",
    "MaxOverhead",
    "Memory",
    "Persistent",
    "Scale",
    "SetValue",
    "StuckAt",
    "YoungDaly",
    "comm_faults",
    "compare",
    "convert",
    "flatten",
    "inject",
    "inject_live",
    "join",
    "load_hdf5",
    "match",
    "open_checkpoint",
    "replay",
    "rng_state",
    "run_study",
    "save_hdf5",
    "select",
    "undo",
    "unflatten",
    "verify",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'evergrad' has no attribute {name!r}")
    value = getattr(import_module(f"evergrad.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
