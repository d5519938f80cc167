"""Soft errors in checkpoints and running trainings: which bits change, where, how often; logged and repeatable.

faults.py               what happens to bits: flips, masks, stuck bits, scaling, values; faults as text
sampling.py             which numbers may be hit, and which are drawn; rng.py: draws equal on every platform
injection_plan.py          drawn sites and a fault become old and new bits
injector.py             `inject`: plan, dry run, log, and only then write; in place or into a copy
byte_patches.py              the blocks of a file that change
log.py · undo.py · replay.py    the injection log, and what can be done with it
published_settings.py   the settings of the published injector, by their names

In a running training:
live.py                 `inject_live`, `comm_faults`: on which ranks and at which step
live_targets.py         weights, buffers, optimizer state, gradients, activations
live_faults.py          faults drawn from a seed, or read from a log
"""

from evergrad.injection.faults import BitFlip, BitMask, Fault, Scale, SetValue, StuckAt
from evergrad.injection.injection_plan import Column, Hit
from evergrad.injection.injector import inject
from evergrad.injection.live import LiveInjection, comm_faults, inject_live
from evergrad.injection.log import InjectionLog
from evergrad.injection.published_settings import PublishedSettings
from evergrad.injection.replay import replay
from evergrad.injection.rng import Draws
from evergrad.injection.undo import FoundState, UndoResult, undo

__all__ = [
    "BitFlip",
    "BitMask",
    "Column",
    "Draws",
    "Fault",
    "FoundState",
    "Hit",
    "InjectionLog",
    "LiveInjection",
    "PublishedSettings",
    "Scale",
    "SetValue",
    "StuckAt",
    "UndoResult",
    "comm_faults",
    "inject",
    "inject_live",
    "replay",
    "undo",
]
