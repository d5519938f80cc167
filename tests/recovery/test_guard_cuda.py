"""The guard on a GPU: digests are those that the same words have elsewhere, and what was flipped is healed there."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import gloo, together

from evergrad.records import Check
from evergrad.recovery.guard.digests import contents_on_device, digest_tensors
from evergrad.recovery.guard.norms import gradient_norm, magnitudes
from evergrad.recovery.guard.replicas import GuardResult, GuardSettings, Replica, ReplicaCheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(8)
    found = {f"model/small{n}.weight": torch.randn(n).bfloat16() for n in range(1, 40)}
    found["model/large.weight"] = torch.randn(3000, 701)
    found["model/last.weight"] = torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)
    return found


def test_a_gpu_works_out_the_same_sums_as_the_cpu() -> None:
    mine = tensors()
    theirs = {path: tensor.cuda() for path, tensor in mine.items()}
    for words in (1000, 1 << 22):
        assert contents_on_device(mine, words) == contents_on_device(theirs, words)


def test_every_flipped_bit_of_some_words_shows_on_a_gpu() -> None:
    tensor = torch.randn(5_000_001, device="cuda")
    before = digest_tensors({"a": tensor})
    words = tensor.view(torch.int32)
    for element in (0, 1, 4_194_304, 5_000_000):
        for bit in range(32):
            mask = -(1 << 31) if bit == 31 else 1 << bit
            words[element] ^= mask
            assert digest_tensors({"a": tensor}) != before
            words[element] ^= mask
    assert digest_tensors({"a": tensor}) == before


def test_a_replica_on_a_gpu_is_healed_there() -> None:
    ranks = [{path: tensor.cuda() for path, tensor in tensors().items()} for _ in range(3)]
    ranks[1]["model/large.weight"].view(torch.int32)[7, 3] ^= 1 << 20
    ranks[2]["model/last.weight"][0, 1, 2, 3] = 5.0
    with gloo(3) as groups:

        def act(rank: int) -> GuardResult:
            return ReplicaCheck(GuardSettings()).check(groups[rank], Replica(ranks[rank]), step=1)

        found: list[GuardResult] = together(*(lambda rank=rank: act(rank) for rank in range(3)))  # type: ignore[misc]
    assert found[0].status is Check.DEGRADED
    assert [(each.rank, each.path) for each in found[0].differences] == [
        (1, "model/large.weight"), (2, "model/last.weight"),
    ]  # fmt: skip
    assert found[1].differences[0].change is not None
    assert found[1].differences[0].change.first == 7 * 701 + 3
    assert all(torch.equal(ranks[0][path], other[path]) for other in ranks[1:] for path in ranks[0])


def test_norms_and_magnitudes_are_those_of_the_cpu() -> None:
    mine = tensors()
    theirs = {path: tensor.cuda() for path, tensor in mine.items()}
    assert gradient_norm(theirs.values()) == pytest.approx(gradient_norm(mine.values()), rel=1e-3)
    assert magnitudes(theirs) == magnitudes(mine)
    theirs["model/small3.weight"][0] = math.nan
    assert math.isnan(magnitudes(theirs)["model/small3.weight"])
    assert math.isnan(gradient_norm(theirs.values()))
