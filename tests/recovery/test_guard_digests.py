"""Digests of tensors: every changed bit shows, on the CPU and in the way a GPU works them out."""

from __future__ import annotations

import random

import pytest
import torch
from guarded import flip, gloo, together
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.recovery.guard.digests import contents_on_device, digest_tensors
from evergrad.recovery.guard.replicas import DigestTree, gather_json, module_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]


def on_device(tensors: dict[str, torch.Tensor], chunk_words: int = 8) -> dict[str, bytes]:
    return contents_on_device(tensors, chunk_words)


@pytest.mark.parametrize("digest", [digest_tensors, on_device])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_shows(digest: object, dtype: torch.dtype) -> None:
    assert callable(digest)
    for numel in (1, 3, 21):  # with a tail that fills no word
        tensor = torch.arange(numel).to(dtype)
        before = digest({"a": tensor})["a"]
        for bit in range(8 * tensor.nbytes):
            flip(tensor, bit // (8 * tensor.element_size()), bit % (8 * tensor.element_size()))
            assert digest({"a": tensor})["a"] != before, f"bit {bit} of {numel} × {dtype}"
            flip(tensor, bit // (8 * tensor.element_size()), bit % (8 * tensor.element_size()))
        assert digest({"a": tensor})["a"] == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=9), st.integers(0, 1 << 30))
def test_on_a_device_a_digest_does_not_depend_on_what_else_is_digested(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 256, (sum(sizes) + 1,), dtype=torch.uint8, generator=generator)
    tensors = {str(n): part for n, part in enumerate(torch.split(whole[1:], sizes))}  # at odd addresses
    together_ = on_device(tensors)
    for path, tensor in tensors.items():
        assert on_device({path: tensor.clone()})[path] == together_[path]


def test_two_flipped_top_bits_do_not_cancel_out_on_a_device() -> None:
    # In a sum of words times odd numbers alone they would, always.
    tensor = torch.randn(64, dtype=torch.float64)
    before = on_device({"a": tensor}, 1024)["a"]
    draw = random.Random(4)
    for _ in range(200):
        one, two = draw.sample(range(64), 2)
        for element in (one, two):
            flip(tensor, element, 63)
        after = on_device({"a": tensor}, 1024)["a"]
        assert after[:8] == before[:8], "which is why there is a second sum"
        assert after != before
        for element in (one, two):
            flip(tensor, element, 63)


def test_elements_that_change_places_show() -> None:
    tensor = torch.randn(100)
    for digest in (digest_tensors, on_device):
        assert digest({"a": tensor})["a"] != digest({"a": tensor.flip(0)})["a"]
        assert digest({"a": tensor})["a"] != digest({"a": torch.cat([tensor[64:], tensor[:64]])})["a"]


def test_a_digest_goes_by_values_type_and_shape_and_not_by_strides() -> None:
    tensor = torch.randn(4, 3, 2, 2)
    digests = digest_tensors(
        {
            "plain": tensor,
            "channels last": tensor.to(memory_format=torch.channels_last),
            "other shape": tensor.view(4, 12),
            "other type": tensor.view(torch.int32),
        }
    )
    assert digests["plain"] == digests["channels last"]
    assert len(set(digests.values())) == 3


def test_many_tensors_on_several_threads_have_the_digests_that_they_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad._digest._ENOUGH_FOR_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    tensors = {f"t{n}": torch.randn(n * 7) for n in range(20)}
    assert digest_tensors(tensors) == {path: digest_tensors({path: one})[path] for path, one in tensors.items()}


def test_the_root_tells_names_and_contents_apart() -> None:
    leaves = {"model/a.weight": b"1" * 16, "model/a.bias": b"2" * 16, "optimizer/state/0/step": b"3" * 16}
    root = DigestTree(dict(leaves)).root
    assert DigestTree(dict(reversed(leaves.items()))).root == root, "the order does not matter"
    for path in leaves:
        assert DigestTree(leaves | {path: b"4" * 16}).root != root
        assert DigestTree({name: digest for name, digest in leaves.items() if name != path}).root != root
    assert (
        DigestTree({"model/b.weight" if path == "model/a.weight" else path: d for path, d in leaves.items()}).root
        != root
    )
    assert module_of("model/layer4.0.conv1.weight") == "model/layer4.0.conv1"


def test_descending_finds_the_paths_and_every_rank_finds_the_same() -> None:
    usual = {f"model/layer{n}.{name}": bytes([n]) * 16 for n in range(5) for name in ("weight", "bias")}
    usual |= {f"optimizer/state/{n}/exp_avg": bytes([n]) * 16 for n in range(5)}
    wrong = usual | {"model/layer3.bias": b"x" * 16, "optimizer/state/4/exp_avg": b"y" * 16}
    with gloo(3) as groups:
        trees = [DigestTree(usual), DigestTree(wrong), DigestTree(usual)]
        found = together(*(lambda n=n: trees[n].find(groups[n]) for n in range(3)))  # type: ignore[misc]
        assert found[0] == found[1] == found[2]
        assert sorted(found[0]) == ["model/layer3.bias", "optimizer/state/4/exp_avg"]
        assert found[0]["model/layer3.bias"] == [bytes([3]) * 16, b"x" * 16, bytes([3]) * 16]
        said = together(*(lambda n=n: gather_json(groups[n], ["é" * n, n]) for n in range(3)))  # type: ignore[misc]
        assert said[0] == said[2] == [["", 0], ["é", 1], ["éé", 2]]
