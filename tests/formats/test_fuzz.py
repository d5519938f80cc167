"""Whatever happens to a file's bytes, only `EvergradError` comes out, in bounded time and memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from states import training_state

DATA = Path(__file__).parent.parent / "data"
MUTATIONS, MUTATIONS_OF_EVERYTHING = 60, 40

# Runs in a process of its own, with limits: damage a copy of each source in turn, a mutation at a time.
MUTANTS = """
import json, random, shutil, traceback
from pathlib import Path
import numpy as np
import evergrad as eg

work, count, seed, sources = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
INTERESTING = [b"\\0", b"\\xff", b"\\x7f", b"\\x80", b"\\xff\\xff\\xff\\xff", b"\\xff\\xff\\xff\\x7f",
    b"\\0\\0\\0\\0", b"PK", b"(", b"}", b"R", b"t", b"q", b"9", b"-"]

def mutate(data):
    data = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        if not data:
            return bytes(random.randbytes(8))
        # Half of the damage goes to the two ends, where directories and headers are.
        at = random.randrange(len(data)) if random.random() < 0.5 else random.choice([
            random.randrange(min(len(data), 400)), len(data) - 1 - random.randrange(min(len(data), 400))])
        kind = random.randrange(7)
        if kind == 0:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at] = random.randrange(256)
        elif kind == 2:
            piece = random.choice(INTERESTING)
            data[at:at + len(piece)] = piece
        elif kind == 3:
            del data[at:at + random.choice([1, 2, 8, 64, 1024])]
        elif kind == 4:
            data[at:at] = random.randbytes(random.choice([1, 4, 32]))
        elif kind == 5:
            del data[at:]
        else:
            start = random.randrange(len(data))
            data[at:at] = data[start:start + random.choice([4, 46, 200])]
    return bytes(data)

def mutant(number):
    target = work / f"{number}-{source.name}"
    if source.is_dir():
        shutil.copytree(source, target)
        victim = random.choice(sorted(f for f in target.rglob("*") if f.is_file()))
        chance = random.random()
        if chance < 0.05:
            victim.unlink()
        elif chance < 0.1:
            other = random.choice(sorted(f for f in target.rglob("*") if f.is_file()))
            victim.write_bytes(other.read_bytes())
        else:
            victim.write_bytes(mutate(victim.read_bytes()))
    else:
        target.write_bytes(mutate(source.read_bytes()))
    return target

def run(steps, seconds):
    global source
    for source in map(Path, sources):
        print(json.dumps([str(source), outcomes_of(steps, seconds)]))

def outcomes_of(steps, seconds):
    outcomes = {}
    random.seed(seed)
    for number in range(count):
        target = mutant(number)
        for step in steps:
            signal.alarm(seconds)
            try:
                step(target)
                outcome = "served"
            except eg.EvergradError as error:
                outcome = type(error).__name__
                said = str(error)
                if not said or "\\n" in said or "fit into memory" in said:
                    traceback.print_exc()
                    fail(step, number, target)
            except BaseException:
                traceback.print_exc()
                fail(step, number, target)
            key = step.__name__ if len(steps) > 1 else outcome
            outcomes[key] = outcomes.get(key, 0) + (len(steps) == 1 or outcome == "served")
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    return outcomes

def fail(step, number, target):
    kept = work.parent / f"found-{seed}-{number}"
    shutil.move(target, kept)
    print(step.__name__, "of mutation", number, "of", source, "kept at", kept)
    sys.exit(1)
"""

# Without torch: list, read bits, alter and close.
FUZZ = (
    MUTANTS
    + """
def serve(target):
    with eg.open_checkpoint(target) as ck:
        for name, info in ck.tensors.items():
            ck.read_bits(name)
            if info.numel:
                shape = (1, info.dtype.parts) if info.dtype.parts > 1 else 1
                ck.xor(name, [info.numel - 1], np.zeros(shape, info.dtype.bits))
        ck.skeleton.dumps()

run([serve], 20)
"""
)

# With torch: everything that is done with a checkpoint besides altering it.
FUZZ_EVERYTHING = (
    MUTANTS
    + """
import torch

out = work / "out.safetensors"

def read(target):
    with eg.open_checkpoint(target) as ck:
        for name in ck.tensors:
            ck.read(name)

def state(target):
    with eg.open_checkpoint(target) as ck:
        ck.state()

def compare(target):
    eg.compare(source, target).to_json()

def convert(target):
    eg.convert(target, out, overwrite=True)
    whole(target)

def convert_tensors(target):
    eg.convert(target, out, tensors_only=True, overwrite=True)
    whole(target)

def verify(target):
    eg.verify(target)

def whole(target):
    # What was written without an error is there, and is what was read.
    try:
        assert not eg.compare(target, out).different
    except eg.EvergradError as error:
        raise AssertionError(f"a converted file is refused: {error}") from error

run([read, state, compare, convert, convert_tensors, verify], 60)
"""
)


def make(kind: str, folder: Path) -> Path:
    """A real file or folder of each kind."""
    path = folder / Path(kind).name
    if kind.startswith("torch"):
        torch.save(training_state(), path, _use_new_zipfile_serialization=kind == "torch-zip")
    elif kind == "safetensors":
        torch.save(training_state(), folder / "state.pt")
        eg.convert(folder / "state.pt", path, to="safetensors")
    elif kind.startswith("npz"):
        arrays = {
            f"layer{i}/w": np.random.default_rng(i).standard_normal((3, i + 1)).astype(np.float32) for i in range(6)
        }
        with path.open("wb") as file:
            (np.savez_compressed if kind == "npz-deflated" else np.savez)(file, **arrays)
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.arange(12.0).reshape(3, 4))
    elif kind == "hdf5-state":
        eg.save_hdf5(training_state(), path)
    elif (DATA / kind).is_dir():
        shutil.copytree(DATA / kind, path, dirs_exist_ok=True)
    else:
        shutil.copy(DATA / kind, path)
    return path


MADE = ["torch-zip", "torch-legacy", "safetensors", "npz-stored", "npz-deflated", "npy"]
KEPT = [
    "lightning.ckpt",
    "whole_module.pt",
    "trainer/checkpoint-4",
    "sharded",
    "chainer_convnet_gzip.h5",
    "chainer_adam_plain.h5",
    "tf_keras_full.h5",
    "keras_torch.weights.h5",
    "tf_keras_full.keras",
    "tf_ckpt",
    "tf_types",
    "dcp",
    "dcp_sharded",
    "deepspeed",
    "orbax",
    "orbax_zarr",
]
EVERYTHING = [
    "torch-zip",
    "torch-legacy",
    "safetensors",
    "npz-deflated",
    "hdf5-state",
    "tf_keras_full.h5",
    "tf_types",
    "dcp_sharded",
    "deepspeed",
]


GROUPS = 4
"""Processes that share the kinds: starting one takes as long as dozens of mutations."""


def fuzzed(
    code: str, kinds: list[str], folder: Path, limited: Callable[..., str], count: int, seed: int, **limits: int
) -> dict[str, dict[str, int]]:
    """What came of so many mutations of each kind."""
    sources = {}
    for number, kind in enumerate(kinds):
        (place := folder / str(number)).mkdir()
        sources[str(make(kind, place))] = kind
    (folder / "work").mkdir()
    said = limited(code, folder / "work", count, seed, *sources, **limits)
    outcomes = {sources[source]: found for source, found in map(json.loads, said.splitlines())}
    assert list(outcomes) == kinds
    return outcomes


def damaged(outcomes: dict[str, int], count: int) -> None:
    assert sum(outcomes.values()) == count
    assert count - outcomes.get("served", 0) > count // 20, f"the mutations did no damage: {outcomes}"


def damaged_in_part(served: dict[str, int], count: int) -> None:
    assert set(served) == {"read", "state", "compare", "convert", "convert_tensors", "verify"}
    for step in ("read", "compare", "convert_tensors", "verify"):
        assert 0 < served[step] < count, f"the mutations did no damage, or nothing but damage: {served}"


@pytest.mark.parametrize("group", range(GROUPS))
def test_mutated_files_give_only_our_errors(group: int, tmp_path: Path, limited: Callable[..., str]) -> None:
    kinds = [*MADE, *KEPT][group::GROUPS]
    for outcomes in fuzzed(FUZZ, kinds, tmp_path, limited, MUTATIONS, 20261, seconds=110).values():
        damaged(outcomes, MUTATIONS)


@pytest.mark.parametrize("group", range(GROUPS))
def test_whatever_is_done_with_mutated_files_gives_only_our_errors(
    group: int, tmp_path: Path, limited: Callable[..., str]
) -> None:
    kinds = EVERYTHING[group::GROUPS]
    found = fuzzed(
        FUZZ_EVERYTHING, kinds, tmp_path, limited, MUTATIONS_OF_EVERYTHING, 20262, memory=6 << 30, seconds=110
    )
    for served in found.values():
        damaged_in_part(served, MUTATIONS_OF_EVERYTHING)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", EVERYTHING)
def test_whatever_is_done_with_many_more_mutations(kind: str, tmp_path: Path, limited: Callable[..., str]) -> None:
    found = fuzzed(FUZZ_EVERYTHING, [kind], tmp_path, limited, 2000, 8, memory=6 << 30, seconds=3000)
    assert 0 < found[kind]["read"] < 2000, f"the mutations did no damage, or nothing but damage: {found}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [*MADE, *KEPT])
def test_many_more_mutations(kind: str, tmp_path: Path, limited: Callable[..., str]) -> None:
    outcomes = fuzzed(FUZZ, [kind], tmp_path, limited, 5000, 7, seconds=3000)[kind]
    assert sum(outcomes.values()) == 5000
