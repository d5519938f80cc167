"""The random number generators of a process, as an object that a checkpoint can hold.

    ck.save(step, {"model": model, "optimizer": optimizer, "rng": eg.rng_state()})

Restored into another `rng_state()`, every stream goes on as if it had never stopped. A `RngState` holds no state of
its own: it reads the generators when it is saved and sets them when it is loaded.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from evergrad.errors import StateError, UsageError

_log = logging.getLogger(__name__)

Generator: TypeAlias = "torch.Generator | np.random.Generator"


class RngState:
    """Python's, NumPy's and torch's global generators, those of all CUDA devices, and others by name.

    - Reading a generator does not advance it.
    - CUDA is left alone where it has not been started: what is not started has drawn nothing. Loading does not start
      it either; torch then sets the state when it starts.
    - A saved device that this machine does not have is passed over with a warning in the log: a job must be able to go
      on with fewer devices, though not with the same numbers.
    - Generators that were passed must be passed again, under the same names.
    """

    def __init__(self, generators: Mapping[str, Generator] | None = None) -> None:
        self._generators = dict(generators or {})
        given: dict[str, object] = dict(self._generators)
        for name, generator in given.items():
            if not isinstance(generator, (torch.Generator, np.random.Generator)):
                kind = f"{type(generator).__module__}.{type(generator).__qualname__}"
                expected = "expected a torch.Generator or numpy.random.Generator"
                raise UsageError(f"generator {name!r} is a {kind} ({expected})")

    def state_dict(self) -> dict[str, object]:
        """The state of every generator, in tensors, arrays and plain values."""
        version, words, gauss_next = random.getstate()
        return {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss_next": gauss_next},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": _read_cuda(),
            "generators": {name: _read(generator) for name, generator in self._generators.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set every generator to a saved state; `StateError`, before any is set, if it is not one of this kind."""
        try:
            python, legacy, cpu, cuda, named = (
                state[key] for key in ("python", "numpy", "torch", "cuda", "generators")
            )
            words = (int(python["version"]), tuple(np.asarray(python["words"]).tolist()), python["gauss_next"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the state of random number generators: {type(error).__name__}: {error}") from None
        if named.keys() != self._generators.keys():
            raise StateError(
                f"generators {sorted(named)} were saved, and {sorted(self._generators)} were passed to rng_state()"
            )
        random.setstate(words)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
        for name, generator in self._generators.items():
            _write(generator, named[name])
        if cuda:
            _write_cuda({int(index): saved for index, saved in cuda.items()})


def rng_state(*, generators: Mapping[str, Generator] | None = None) -> RngState:
    """The generators of this process, to be put into the state that is saved and restored.

    `generators` are others than the global ones: those of a sampler, of augmentations, one a device.
    """
    return RngState(generators)


def _read(generator: Generator) -> object:
    # torch's is a tensor, NumPy's a nested dict of numbers and small arrays.
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def _write(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _read_cuda() -> dict[int, torch.Tensor]:
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return dict(enumerate(torch.cuda.get_rng_state_all())) if started else {}


def _write_cuda(states: Mapping[int, torch.Tensor]) -> None:
    here = torch.cuda.device_count()
    for index, saved in states.items():
        if index < here:
            torch.cuda.set_rng_state(saved, index)  # queued by torch until CUDA starts
    if gone := [index for index in states if index >= here]:
        _log.warning(
            "CUDA device %s was saved and there are %d here: random numbers on it do not go on as they would have",
            ", ".join(map(str, gone)),
            here,
        )
