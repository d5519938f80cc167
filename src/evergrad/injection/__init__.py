"""Soft errors in checkpoints and running trainings: what happens to bits, where, how often; logged, repeatable.

faults.py      what happens to bits: flips, masks, stuck bits, scaling, values; the contract for your own
fields.py      bits by number and by field
draws.py       random draws that are the same on every platform
population.py  the numbers that may be hit, every byte once
sampling.py    how many, and where: by element or by tensor
plan.py        sites and a fault become columns of old and new bits
execution.py   from a plan to altered files: rehearse, log, then write
log.py         the injection log; columns.py what happened to a tensor, and to one number in a person's words
patches.py     the blocks of a file that change; rewriting.py files that have to be rewritten
workplace.py   in place, or in a copy
published.py   the settings of the published injector, by their names; published_files.py reads them
injector.py · undo.py · replay.py    what people call; order.py which logs follow which
live.py        the same in tensors in memory · spelling.py faults as words

In a running training:
live_injection.py   what people call, and what it refuses
live_scheduling.py  when: steps counted, hooks that come off · live_ranks.py on which ranks
live_targets.py     what: weights, buffers, optimizer state, gradients
live_passing.py     activations · live_buckets.py what ranks send each other
live_order.py       what is to happen to them: drawn from a seed, or a log again
"""

from evergrad.injection.bit_changes import Column, Hit
from evergrad.injection.faults import BitFlip, BitMask, Fault, Scale, SetValue, StuckAt
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
