"""Every format, with files written by its own library, keeps the contract."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from evergrad.state import flatten
from evergrad.testing import FormatContract
from states import every_dtype, training_state

DATA = Path(__file__).parent.parent / "data"


def by_path(loaded: object) -> Mapping[str, torch.Tensor]:
    return flatten(loaded).tensors


class TestTorchZip(FormatContract):
    format = "torch-zip"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        torch.save(state := training_state(), path := folder / "state.pt")
        return path, by_path(state)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return by_path(torch.load(path, weights_only=True))


class TestTorchZipOfEveryDtype(TestTorchZip):
    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        torch.save(state := every_dtype(), path := folder / "state.pth")
        return path, state


class TestTorchZipWithoutChecksums(TestTorchZip):
    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        torch.serialization.set_crc32_options(False)
        try:
            return super().make(folder)
        finally:
            torch.serialization.set_crc32_options(True)


class TestTorchLegacy(FormatContract):
    format = "torch-legacy"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        torch.save(state := training_state(), path := folder / "old.pt", _use_new_zipfile_serialization=False)
        return path, by_path(state)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return by_path(torch.load(path, weights_only=True))


class TestTorchLegacyOfEveryDtype(TestTorchLegacy):
    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        torch.save(state := every_dtype(), path := folder / "old.pt", _use_new_zipfile_serialization=False)
        return path, state

    def load(self, path: Path) -> None:  # torch itself does not load the types that have no typed storage
        return None


class TestSafetensors(FormatContract):
    format = "safetensors"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        lacking = ("complex128", "complex32")
        state = {name: tensor for name, tensor in every_dtype().items() if not name.startswith(lacking)}
        safetensors.torch.save_file(state, path := folder / "model.safetensors", {"note": "ours"})
        return path, state

    def load(self, path: Path) -> Mapping[str, torch.Tensor] | None:
        with safetensors.safe_open(path, "pt") as file:  # the library writes F8_E8M0 and cannot load it
            return {name: file.get_tensor(name) for name in file.keys() if "e8m0" not in name}  # noqa: SIM118


class TestShardedSafetensors(FormatContract):
    format = "safetensors-sharded"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        shutil.copytree(DATA / "sharded", path := folder / "gpt")
        return path, self.load(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        shards = {file: safetensors.torch.load_file(path / file) for file in set(index["weight_map"].values())}
        return {name: shards[file][name] for name, file in index["weight_map"].items()}


class TestShardedTorch(FormatContract):
    format = "torch-zip-sharded"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        shards = {
            "pytorch_model-1.bin": {"a.weight": torch.randn(3, 4)},
            "pytorch_model-2.bin": {"b/c": torch.randn(5)},
        }
        for file, tensors in shards.items():
            torch.save(tensors, folder / file)
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        path = folder / "pytorch_model.bin.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": 68}, "weight_map": weight_map}))
        return path, {
            "a.weight": shards["pytorch_model-1.bin"]["a.weight"],
            "b%2Fc": shards["pytorch_model-2.bin"]["b/c"],
        }

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        weight_map = json.loads(path.read_text())["weight_map"]
        return by_path({name: torch.load(path.parent / file)[name] for name, file in weight_map.items()})


class TestTrainerFolder(FormatContract):
    format = "transformers-trainer"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        shutil.copytree(DATA / "trainer" / "checkpoint-4", path := folder / "checkpoint-4")
        return path, self.load(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        state: dict[str, object] = {"model.safetensors": safetensors.torch.load_file(path / "model.safetensors")}
        for file in ("optimizer.pt", "scheduler.pt"):
            state[file] = torch.load(path / file, weights_only=True)
        # Its NumPy state needs the unsafe loader; the file is ours.
        state["rng_state.pth"] = torch.load(path / "rng_state.pth", weights_only=False)
        return by_path(state)


class TestNpz(FormatContract):
    format = "npz"

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        floats = random.standard_normal((3, 4))
        return {
            "f64": floats,
            "model/fc.weight": floats.astype(np.float32),
            "fortran": np.asfortranarray(floats.astype(np.float16)),
            "big": floats.astype(">f4"),
            "c128": floats + 1j,
            "big-complex": (floats + 2j).astype(">c8"),
            "i16": np.arange(5, dtype=np.int16),
            "u64": np.array(2**63, np.uint64),
            "flags": np.array([True, False]),
            "empty": np.zeros((0, 3)),
            **{f"many/{i}": np.full(2, i) for i in range(20)},
        }

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        np.savez(path := folder / "arrays.npz", **self.arrays())
        return path, self.load(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        with np.load(path) as arrays:  # checks every CRC
            return {name: _tensor(arrays[name]) for name in arrays}


class TestDeflatedNpz(TestNpz):
    byte_exact = False

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        np.savez_compressed(path := folder / "arrays.npz", **self.arrays())
        return path, self.load(path)


@pytest.mark.parametrize(
    "array",
    [
        np.random.default_rng(1).standard_normal((4, 5)),
        np.asfortranarray(np.random.default_rng(1).standard_normal((4, 5, 2)).astype(">f4")),
        np.arange(9, dtype=np.uint32),
        np.full((2, 6), 1 + 2j, np.complex64),
    ],
    ids=["c-order", "fortran, big-endian", "uint32", "complex"],
)
class TestNpy:
    """One array without a name; the suite once for each kind of array."""

    @pytest.mark.parametrize("promise", [name for name in dir(FormatContract) if name.startswith("test_")])
    def test_contract(self, promise: str, array: np.ndarray, tmp_path: Path) -> None:
        class One(FormatContract):
            format = "npy"

            def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
                np.save(path := folder / "one.npy", array)
                return path, self.load(path)

            def load(self, path: Path) -> Mapping[str, torch.Tensor]:
                return {".": _tensor(np.load(path))}

        getattr(One(), promise)(tmp_path)
        assert promise.startswith("test_")


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
