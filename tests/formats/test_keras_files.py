"""Keras' three formats, written by TensorFlow and by Keras on torch, against h5py's own reading."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import ConversionLoss, EvergradError
from evergrad.records import Check, Role
from evergrad.testing import FormatContract, raw_bytes

DATA = Path(__file__).parent.parent / "data"
WEIGHTS = "model.weights.h5"


def read_all(file: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def take(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = torch.from_numpy(np.array(item[()], item.dtype))

    with h5py.File(file, "r") as opened:
        opened.visititems(take)
    return found


class KerasFile(FormatContract):
    file: ClassVar[str]

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        path = Path(shutil.copy(DATA / self.file, folder))
        return path, self.load(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return read_all(path)


class TestModelOfTensorFlow(KerasFile):
    format, file = "keras-h5", "tf_keras_full.h5"


class TestModelOfTorch(KerasFile):
    format, file = "keras-h5", "keras_torch.h5"


class TestWeightsOfTensorFlow(KerasFile):
    format, file = "keras-weights-h5", "tf_keras.weights.h5"


class TestWeightsOfTorch(KerasFile):
    format, file = "keras-weights-h5", "keras_torch.weights.h5"


class TestArchiveOfTensorFlow(KerasFile):
    format, file = "keras", "tf_keras_full.keras"

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        with zipfile.ZipFile(path) as archive:  # checks every CRC
            assert archive.testzip() is None
            return read_all(io.BytesIO(archive.read(WEIGHTS)))


class TestArchiveOfTorch(TestArchiveOfTensorFlow):
    file = "keras_torch.keras"


class TestDeflatedArchive(TestArchiveOfTensorFlow):
    byte_exact = False

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        path = folder / "deflated.keras"
        repack(path, zipfile.ZIP_DEFLATED)
        return path, self.load(path)


class TestArchiveOfFilteredWeights(TestArchiveOfTensorFlow):
    """Keras writes none; the archive has to be rewritten around what the HDF5 library altered."""

    byte_exact = False
    compression: ClassVar[int] = zipfile.ZIP_STORED

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        with h5py.File(buffer := io.BytesIO(), "w") as file:
            file.create_dataset("plain", data=np.arange(30.0))
            file.create_dataset("gzip", data=np.arange(40.0), chunks=(9,), compression="gzip", fletcher32=True)
            file.create_dataset("never", (20,), "f4")
        repack(path := folder / "filtered.keras", self.compression, buffer.getvalue())
        return path, self.load(path)


class TestDeflatedArchiveOfFilteredWeights(TestArchiveOfFilteredWeights):
    compression = zipfile.ZIP_DEFLATED


def repack(path: Path, compression: int, weights: bytes | None = None) -> None:
    """The archive again, compressed, or with other weights."""
    with zipfile.ZipFile(DATA / "tf_keras_full.keras") as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, weights if weights is not None and name == WEIGHTS else old.read(name))


@pytest.mark.parametrize("file", ["tf_keras_full.keras", "tf_keras.weights.h5", "tf_keras_full.h5"])
def test_roles_tell_the_optimizer_from_the_model(file: str) -> None:
    with eg.open_checkpoint(DATA / file) as ck:
        roles = {name: info.role for name, info in ck.tensors.items()}
    assert {role for name, role in roles.items() if name.startswith("optimizer")} == {Role.OPTIMIZER}
    assert {role for name, role in roles.items() if not name.startswith("optimizer")} <= {
        Role.MODEL,
        Role.BUFFER,
    }


def test_texts_of_fixed_length_are_metadata_and_a_broken_heap_is_never_read(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["w"] = np.zeros(3)
        file.attrs["keras_version"] = np.bytes_("2.1")
        file.attrs["model_config"] = "{}"
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL") + 16
    data[heap : heap + 16] = bytes(16)  # free space of no length: HDF5 2.0 looks for its end for ever
    path.write_bytes(data)
    with eg.open_checkpoint(path) as ck:
        assert ck.format == "keras-h5"
        assert ck.metadata == {"keras_version": "2.1"}
        assert dict(ck.unkept) == {"/@model_config": "an HDF5 attribute"}


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        ("tf_keras_full.h5", {"/@model_config", "model_weights@layer_names", "optimizer_weights@weight_names"}),
        ("keras_torch.weights.h5", {"layers/dense/vars@name"}),
        ("tf_keras_full.keras", {"config.json", "metadata.json", "layers/dense/vars@name"}),
    ],
)
@pytest.mark.parametrize("ending", ["h5", "pt"])
def test_the_configuration_is_not_lost_silently(file: str, lost: set[str], ending: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionLoss) as caught:
        eg.convert(DATA / file, tmp_path / f"out.{ending}")
    for name in lost:
        assert any(name in loss for loss in caught.value.losses), (name, caught.value.losses)
    eg.convert(DATA / file, tmp_path / f"out.{ending}", tensors_only=True)
    with eg.open_checkpoint(DATA / file) as ck, eg.open_checkpoint(tmp_path / f"out.{ending}") as out:
        assert [name.replace("%2F", "/") for name in out.tensors] == list(ck.tensors)


def test_the_crc_of_the_archive_is_checked_and_follows(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "tf_keras_full.keras", tmp_path))
    name = "layers/dense/vars/0"
    with eg.open_checkpoint(path) as ck:
        assert set(ck.container_checks().values()) == {Check.OK}
        ck.xor(name, [7, 3], [1, 1 << 31])
        assert ck.checksum(name) is Check.OK
        changed = raw_bytes(ck.read(name))
    data = path.read_bytes()
    assert len(data) == (DATA / "tf_keras_full.keras").stat().st_size
    place = data.index(changed)
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with eg.open_checkpoint(path) as ck:
        assert ck.checksum(name) is Check.FAILED


def test_plain_changes_survive_when_a_filtered_one_moves_the_file(tmp_path: Path) -> None:
    path, before = TestArchiveOfFilteredWeights().make(tmp_path)
    with eg.open_checkpoint(path) as ck:
        ck.xor("plain", [1], [1])
        ck.xor("gzip", [2], [1])
        ck.xor("plain", [3], [1])
        ck.xor("never", [4], [1])
        ck.xor("plain", [5], [1])
        assert ck.checksum("gzip") is Check.OK
    after = TestArchiveOfFilteredWeights().load(path)
    for name, places in {"plain": [1, 3, 5], "gzip": [2], "never": [4]}.items():
        integers = torch.int32 if name == "never" else torch.int64
        changed = after[name].view(integers) ^ before[name].view(integers)
        assert changed.nonzero().reshape(-1).tolist() == places, name
    assert [child.name for child in tmp_path.iterdir()] == ["filtered.keras"]


def test_an_archive_without_sound_weights_is_one_line(tmp_path: Path) -> None:
    repack(path := tmp_path / "bad.keras", zipfile.ZIP_STORED, b"no HDF5 at all")
    with pytest.raises(EvergradError) as caught:
        eg.open_checkpoint(path)
    assert "\n" not in str(caught.value)
