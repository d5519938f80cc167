"""Random number generators: saved without being disturbed, and going on to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sources import MemorySource

from evergrad.checkpoint.restore.load_state import prepare
from evergrad.checkpoint.rng import rng_state
from evergrad.errors import StateError, UsageError
from evergrad.state import flatten

DRAWS: dict[str, Callable[[], object]] = {
    "uniform": random.random,
    "gauss": lambda: random.gauss(0, 1),  # made in pairs: the second is kept for later
    "bits": lambda: random.getrandbits(70),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy gauss": lambda: np.random.randn(1).tolist(),  # kept for later here too
    "torch": lambda: torch.rand(5).tolist(),
    "torch gauss": lambda: torch.randn(3).tolist(),
    "torch permutation": lambda: torch.randperm(7).tolist(),
}


@pytest.fixture(autouse=True)
def _global_generators_as_before() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def _draw(names: list[str]) -> list[object]:
    return [DRAWS[name]() for name in names]


def _generators() -> dict[str, torch.Generator | np.random.Generator]:
    kinds = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    return {
        "sampler": torch.Generator().manual_seed(5),
        **{kind.__name__: np.random.Generator(kind(7)) for kind in kinds},
    }


@given(
    seed=st.integers(0, 2**32 - 1),
    before=st.lists(st.sampled_from(sorted(DRAWS)), max_size=6),
    lost=st.lists(st.sampled_from(sorted(DRAWS)), max_size=6),
    after=st.lists(st.sampled_from(sorted(DRAWS)), max_size=6),
)
def test_every_stream_goes_on_to_the_bit(seed: int, before: list[str], lost: list[str], after: list[str]) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    _draw(before)
    saved = MemorySource({"rng": rng_state()})
    expected = _draw(after)
    _draw(lost)
    prepare({"rng": rng_state()}, saved).apply()
    assert _draw(after) == expected


def test_reading_the_state_does_not_change_it() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = _draw(sorted(DRAWS))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    rng_state(generators=_generators()).state_dict()
    assert _draw(sorted(DRAWS)) == expected


def test_a_state_that_was_read_does_not_change_with_the_generator() -> None:
    flat = flatten(rng_state(generators=_generators()))
    copies = {path: tensor.clone() for path, tensor in flat.tensors.items()}
    _draw(sorted(DRAWS) * 300)
    assert all(torch.equal(copies[path], tensor) for path, tensor in flat.tensors.items())


def test_generators_that_were_passed_go_on_too() -> None:
    mine, theirs = _generators(), _generators()
    for generator in mine.values():
        _numbers(generator)
    saved = MemorySource({"rng": rng_state(generators=mine)})
    prepare({"rng": rng_state(generators=theirs)}, saved).apply()
    for name in mine:
        assert _numbers(mine[name]) == _numbers(theirs[name]), name


def _numbers(generator: torch.Generator | np.random.Generator) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.rand(5, generator=generator).tolist()
    return generator.standard_normal(5).tolist()


def test_other_generators_than_were_saved_are_refused_before_any_is_set() -> None:
    saved = rng_state(generators={"sampler": torch.Generator()}).state_dict()
    random.seed(3)
    before = random.getstate()
    with pytest.raises(StateError, match=r"\['sampler'\] were saved, and \['samplers'\] were passed"):
        rng_state(generators={"samplers": torch.Generator()}).load_state_dict(saved)
    assert random.getstate() == before


@pytest.mark.parametrize("state", [{}, {"python": 3}, {**rng_state().state_dict(), "python": {"version": 3}}])
def test_what_is_no_such_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(StateError, match="not the state of random number generators"):
        rng_state().load_state_dict(state)


def test_what_is_no_generator_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'mine' is a random.Random \(expected a torch.Generator or"):
        rng_state(generators={"mine": random.Random()})


def test_devices_that_are_gone_are_passed_over_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    state = rng_state().state_dict()
    rng_state().load_state_dict({**state, "cuda": {97: torch.zeros(16, dtype=torch.uint8)}})
    assert "CUDA device 97 was saved" in caplog.text


def test_nothing_is_pickled_and_cuda_is_not_started() -> None:
    code = (
        "from evergrad.checkpoint.rng import rng_state\n"
        "from evergrad.state import flatten\nimport torch\n"
        "rng = rng_state()\nflat = flatten(rng)\nassert not flat.skeleton.objects()\n"
        "rng.load_state_dict(rng.state_dict())\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_stream_of_a_cuda_device_goes_on_to_the_bit() -> None:
    torch.rand(3, device="cuda")
    saved = MemorySource({"rng": rng_state()})
    expected = torch.rand(5, device="cuda").tolist()
    prepare({"rng": rng_state()}, saved).apply()
    assert torch.rand(5, device="cuda").tolist() == expected
