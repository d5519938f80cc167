"""Soft errors in live state: the same as the injector puts into a file of the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import UsageError
from evergrad.injection.faults import fault_of
from evergrad.injection.live_faults import flip
from evergrad.recovery.failures.injector import ProcessFailureEffects
from evergrad.recovery.failures.schedule import Failure
from evergrad.state import flatten
from evergrad.timeline import Recorder, read_events

State = dict[str, Any]


def state_of() -> State:
    """Every kind of number, tied weights, a view with gaps, a scalar, and a real optimizer's state."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    wide = torch.randn(6, 8)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "more": {
            "tied": wide,
            "again": wide,
            "columns": torch.randn(6, 8)[:, ::2],
            "turned": torch.randn(3, 4).T,
            "bf16": torch.randn(9).bfloat16(),
            "fp8": torch.randn(9).to(torch.float8_e4m3fn),
            "complex": torch.randn(4, dtype=torch.complex64),
            "bytes": torch.arange(9, dtype=torch.int8),
            "long": torch.arange(5),
            "flags": torch.tensor([True, False]),
            "empty": torch.empty(0),
            "scalar": torch.tensor(2.5),
        },
    }


def bits_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {path: bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy()) for path, one in tensors.items()}


@pytest.mark.parametrize(
    ("words", "count", "where"),
    [
        ((None, None), 60, None),
        ((None, "exponent"), 20, "model/**"),
        ((None, "1-3"), 8, "optimizer"),
        ((None, "mantissa"), 12, "more/turned"),
        ((None, "sign"), 2, "more/complex"),
        ((None, 0), 1, "more/scalar"),
        ((None, None), 40, "re:tied|again|columns"),
        (("scale:factor=4500", None), 30, None),
        (("stuckat:value=1,bits=exponent", None), 30, None),
        (("setvalue:value=nan,elements=3", None), 2, "role:model"),
        (("bitmask:mask=1011", None), 9, "more/*"),
    ],
)
def test_a_live_state_is_hit_as_a_file_of_it_is(tmp_path: Path, words: Any, count: int, where: str | None) -> None:
    state, fault = state_of(), fault_of(*words)
    torch.save(state, tmp_path / "state.pt")
    log = eg.inject(tmp_path / "state.pt", fault, count=count, where=where, seed=11, out=tmp_path / "bad.pt")
    live = flatten(state).tensors
    before = bits_of(live)
    hits = flip(live, fault, count=count, where=where, seed=11)
    assert [hit.to_json() for hit in hits] == [hit.to_json() for hit in log.faults()]
    assert len(hits) == count * fault.elements
    bad = flatten(torch.load(tmp_path / "bad.pt")).tensors
    assert bits_of(live) == bits_of(bad)
    assert bits_of(live) != before, "the tensors of the job themselves are hit"


def test_other_seeds_hit_elsewhere_and_twice_the_same_is_undone() -> None:
    live = flatten(state_of()).tensors
    before = bits_of(live)
    first, other = (flip(live, fault_of(None), count=3, seed=seed) for seed in (1, 2))
    assert [str(hit) for hit in first] != [str(hit) for hit in other]
    for seed in (2, 1):
        flip(live, fault_of(None), count=3, seed=seed)
    assert bits_of(live) == before


def test_autograd_does_not_notice_a_soft_error() -> None:
    model = nn.Linear(3, 1, bias=False)
    loss = model(torch.ones(1, 3)).square().sum()
    version = model.weight._version
    flip({"model/weight": model.weight}, fault_of("setvalue:value=7,elements=3"), seed=0)
    assert model.weight._version == version
    loss.backward()  # an operation in place would be an error here
    assert model.weight.tolist() == [[7.0, 7.0, 7.0]]
    assert model.weight.requires_grad


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("model/fc.wieght", r"unknown tensor 'model/fc.wieght'. Did you mean 'model/fc.weight'"),
        ("model/steps", r"BitFlip fits no tensor of the selection \('exponent' means floats, not int64"),
    ],
)
def test_what_can_not_be_hit_is_said_in_one_line(where: str, says: str) -> None:
    live = {"model/fc.weight": torch.ones(2), "model/steps": torch.ones(2).long()}
    with pytest.raises(UsageError, match=says):
        flip(live, fault_of(None, "exponent"), where=where)


def test_what_was_hit_is_in_the_timeline(tmp_path: Path) -> None:
    weight = torch.ones(2, 3)
    recorder = Recorder(tmp_path / "timeline.jsonl", "uid 1")
    acts = ProcessFailureEffects(recorder.record, live=lambda: {"model/fc.weight": weight})
    failure = Failure.parse("flip rank=1 step=7 where=model/** bits=exponent-msb count=2")
    acts.flip(1, failure, 5)
    acts.flip(1, Failure.parse("flip rank=1 step=7 fault=setvalue:value=nan"), 6)
    *flips, last = [
        event.fields for event in read_events(tmp_path / "timeline.jsonl") if event.event == "bit_flip_injected"
    ]
    assert len(flips) == 2
    for told in flips:
        assert told["rank"] == 1
        assert told["path"] == "model/fc.weight"
        assert told["bit"] == 1
        assert (told["before"], told["after"], told["seed"]) == (1.0, "inf", 5)
    assert last["bit"] == list(range(32))
    assert last["after"] == "nan"
    hit = last["index"]
    assert isinstance(hit, int)
    assert weight.reshape(-1)[hit].isnan()
    json.dumps(last, allow_nan=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_s_tensors_are_hit_as_the_host_s_are() -> None:
    here = flatten(state_of()).tensors
    there = {path: tensor.detach().cuda() for path, tensor in here.items()}
    chosen = "model/**"
    hits = [flip(tensors, fault_of(None), count=20, where=chosen, seed=4) for tensors in (here, there)]
    assert [str(hit) for hit in hits[0]] == [str(hit) for hit in hits[1]]
    assert bits_of({path: tensor.cpu() for path, tensor in there.items()}) == bits_of(here)
