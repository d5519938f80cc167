"""Every kind of checkpoint that faults are put into, as its own library writes it."""

from __future__ import annotations

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from readers import (
    DATA,
    WEIGHTS,
    Tensors,
    by_dcp,
    by_deepspeed,
    by_file,
    by_h5py,
    by_index,
    by_numpy,
    by_our_hdf5,
    by_place,
    by_safetensors,
    by_torch,
    by_zip_and_h5py,
)

import evergrad as eg
from states import every_dtype, training_state


@dataclass(frozen=True)
class Kind:
    """One kind: `make` writes it into a folder and returns the path by which it is opened."""

    name: str
    make: Callable[[Path], Path]
    load: Callable[[Path], Tensors] | None
    """Every tensor as the format's own library reads it, sharing memory as it does there; None if there is none."""
    rewritten: bool = False
    """Whether the data have no place of their own in the file (compressed, filtered, never written)."""
    sealed: bool = False
    """Whether the container has checksums over its tensors that can be left stale."""
    bad_checksums: bool = False
    """Whether the writer left wrong checksums in it."""

    def __str__(self) -> str:
        return self.name


def saved_zip(state: Callable[[], object], name: str = "state.pt", **options: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(state(), folder / name, **options)
        return folder / name

    return make


def copied(name: str, by: str = "") -> Callable[[Path], Path]:
    """A real file or folder of tests/data; `by` is the name in the folder by which it is opened."""

    def make(folder: Path) -> Path:
        target = folder / Path(name).name
        (shutil.copytree if (DATA / name).is_dir() else shutil.copy)(DATA / name, target)
        return target / by if by else target

    return make


def safetensors_file(folder: Path) -> Path:
    lacking = ("complex128", "complex32", "float8_e8m0fnu")  # the last is written by the library, and not loaded
    state = {name: tensor for name, tensor in every_dtype().items() if not name.startswith(lacking)}
    safetensors.torch.save_file(state, folder / "model.safetensors", {"note": "ours"})
    return folder / "model.safetensors"


def arrays() -> dict[str, np.ndarray]:
    floats = np.random.default_rng(0).standard_normal((6, 7))
    return {
        "f64": floats,
        "model/fc.weight": floats.astype(np.float32),
        "fortran": np.asfortranarray(floats.astype(np.float16)),
        "big": floats.astype(">f4"),
        "c128": floats + 1j,
        "big-complex": (floats + 2j).astype(">c8"),
        "i16": np.arange(9, dtype=np.int16),
        "u64": np.array(2**63, np.uint64),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3)),
    }


def numpy_file(save: Callable[..., None], name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / name, **arrays())
        return folder / name

    return make


def one_array(array: np.ndarray) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        np.save(folder / "one.npy", array)
        return folder / "one.npy"

    return make


def hdf5_file(*, user_block: int = 0, version: str | None = None, **options: Any) -> Callable[[Path], Path]:
    """Data sets of several types, all laid out in the same way."""

    def make(folder: Path) -> Path:
        path = folder / "data.h5"
        with h5py.File(path, "w", userblock_size=user_block, libver=version) as file:
            for kind in ("<f4", ">f8", "<i4", "<c8", "<f2"):
                values = np.random.default_rng(3).standard_normal((23, 7)) * 100
                file.create_dataset(f"layer/{kind}", data=values.astype(kind), **options)
        return path

    return make


def big_endian_hdf5(folder: Path) -> Path:
    with h5py.File(folder / "data.h5", "w") as file:
        for kind in (">f2", ">f4", ">f8", ">i2", ">u4", ">c16"):
            file[kind] = np.random.default_rng(4).standard_normal((6, 5)).astype(kind)
    return folder / "data.h5"


def compact_hdf5(folder: Path) -> Path:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.COMPACT)
    creation.set_obj_track_times(False)  # as h5py does: a time would differ between two injections
    with h5py.File(folder / "data.h5", "w") as file:
        for kind in ("<f4", ">f8"):
            item = h5py.h5t.py_create(np.dtype(kind), logical=True)
            data = h5py.h5d.create(file.id, kind.encode(), item, h5py.h5s.create_simple((5, 7)), creation)
            h5py.Dataset(data)[...] = np.random.default_rng(5).standard_normal((5, 7))
    return folder / "data.h5"


def unwritten_hdf5(**options: Any) -> Callable[[Path], Path]:
    """A data set without a byte of its own, which reads as its fill value, beside one that was written."""

    def make(folder: Path) -> Path:
        with h5py.File(folder / "data.h5", "w") as file:
            file.create_dataset("never", (40, 5), "f4", fillvalue=1.5, **options)
            file.create_dataset("written", data=np.arange(30.0), **({"chunks": (9,)} if options else {}))
        return folder / "data.h5"

    return make


def keras_archive(compression: int, *, filtered: bool = False) -> Callable[[Path], Path]:
    """A real `.keras` again: compressed, or with data sets in it that are."""

    def make(folder: Path) -> Path:
        weights = None
        if filtered:
            with h5py.File(buffer := io.BytesIO(), "w") as file:
                file.create_dataset("layers/gzip/vars/0", data=np.arange(40.0), chunks=(9,), compression="gzip")
                file.create_dataset("layers/plain/vars/0", data=np.arange(30, dtype=np.float32))
            weights = buffer.getvalue()
        path = folder / "model.keras"
        with zipfile.ZipFile(DATA / "tf_keras_full.keras") as old, zipfile.ZipFile(path, "w", compression) as new:
            for name in old.namelist():
                new.writestr(name, weights if weights is not None and name == WEIGHTS else old.read(name))
        return path

    return make


def our_hdf5(folder: Path) -> Path:
    eg.save_hdf5({"fc": {"weight": torch.randn(9, 8), "bias": torch.randn(8)}, "epoch": 3}, folder / "state.h5")
    return folder / "state.h5"


def dcp_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    state = {
        "model": {"fc.weight": torch.randn(40, 5), "bn.running_mean": torch.randn(5, dtype=torch.bfloat16)},
        "optim": {"state": {0: {"exp_avg": torch.randn(8, 3).T, "step": torch.tensor(3.0)}}},
        "complex": torch.randn(3, 3, dtype=torch.complex64),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder / "step-1", no_dist=True)
    return folder / "step-1"


def deepspeed_run(folder: Path) -> Path:
    """DeepSpeed's names, with contents that torch loads without it."""
    (step := folder / "run" / "global_step10").mkdir(parents=True)
    (folder / "run" / "latest").write_text("global_step10")
    torch.save({"module": {"fc.weight": torch.randn(4, 5)}}, step / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({"fp32": [torch.randn(19)]}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder / "run"


def torch_shards(folder: Path) -> Path:
    shards = {
        "pytorch_model-1.bin": {"a.weight": torch.randn(6, 8)},
        "pytorch_model-2.bin": {"b.weight": torch.randn(25)},
    }
    for file, tensors in shards.items():
        torch.save(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def mixed_folder(*, deflated: bool) -> Callable[[Path], Path]:
    """Tensor files of three formats in one folder, and a file that is none."""

    def make(folder: Path) -> Path:
        (path := folder / "mixed").mkdir()
        torch.save({"w": torch.randn(20)}, path / "a.pt")
        safetensors.torch.save_file({"w": torch.randn(7, 3)}, path / "b.safetensors")
        (np.savez_compressed if deflated else np.savez)(path / "c.npz", w=np.arange(50.0), v=np.arange(9))
        (path / "notes.txt").write_text("left alone")
        return path

    return make


def zip_without_checksums(folder: Path) -> Path:
    torch.serialization.set_crc32_options(False)
    try:
        return saved_zip(training_state)(folder)
    finally:
        torch.serialization.set_crc32_options(True)


GZIP = {"chunks": (6, 4), "compression": "gzip"}
FORTRAN = np.asfortranarray(np.random.default_rng(1).standard_normal((4, 5, 3)).astype(">f4"))

KINDS = (
    Kind("torch zip", saved_zip(training_state), by_torch, sealed=True),
    Kind("torch zip of every dtype", saved_zip(every_dtype), by_torch, sealed=True),
    Kind("torch zip without checksums", zip_without_checksums, by_torch, bad_checksums=True),
    Kind("torch legacy", saved_zip(training_state, _use_new_zipfile_serialization=False), by_torch),
    Kind("Lightning's", copied("lightning.ckpt"), None, sealed=True),
    Kind("a whole module", copied("whole_module.pt"), None, sealed=True),
    Kind("a user's class", copied("user_class.pt"), None, sealed=True),
    Kind("safetensors", safetensors_file, by_safetensors),
    Kind("npz stored", numpy_file(np.savez, "arrays.npz"), by_numpy, sealed=True),
    Kind("npz deflated", numpy_file(np.savez_compressed, "arrays.npz"), by_numpy, rewritten=True),
    Kind("npy", one_array(np.random.default_rng(1).standard_normal((9, 5))), by_numpy),
    Kind("npy in Fortran's order, big-endian", one_array(FORTRAN), by_numpy),
    Kind("HDF5 contiguous", hdf5_file(), by_h5py),
    Kind("HDF5 behind a user block", hdf5_file(user_block=1024, version="latest"), by_h5py),
    Kind("HDF5 big-endian", big_endian_hdf5, by_h5py),
    Kind("HDF5 chunked", hdf5_file(chunks=(6, 4)), by_h5py),
    Kind("HDF5 gzip", hdf5_file(**GZIP), by_h5py, rewritten=True),
    Kind("HDF5 shuffle and gzip", hdf5_file(shuffle=True, **GZIP), by_h5py, rewritten=True),
    Kind("HDF5 lzf", hdf5_file(chunks=(6, 4), compression="lzf"), by_h5py, rewritten=True),
    Kind("HDF5 fletcher32", hdf5_file(chunks=(6, 4), fletcher32=True), by_h5py, rewritten=True, sealed=True),
    Kind("HDF5 gzip and fletcher32", hdf5_file(fletcher32=True, **GZIP), by_h5py, rewritten=True),
    Kind("HDF5 compact", compact_hdf5, by_h5py, rewritten=True),
    Kind("HDF5 never written", unwritten_hdf5(), by_h5py, rewritten=True),
    Kind("HDF5 chunks never written", unwritten_hdf5(chunks=(7, 2)), by_h5py, rewritten=True),
    Kind("our own HDF5", our_hdf5, by_our_hdf5),
    Kind("Chainer's gzip", copied("chainer_convnet_gzip.h5"), by_h5py, rewritten=True),
    Kind("Chainer's plain", copied("chainer_adam_plain.h5"), by_h5py),
    Kind("Keras' h5", copied("keras_torch.h5"), by_h5py),
    Kind("Keras' weights", copied("tf_keras.weights.h5"), by_h5py),
    Kind("keras of torch", copied("keras_torch.keras"), by_zip_and_h5py, sealed=True),
    Kind("keras of TensorFlow", copied("tf_keras_full.keras"), by_zip_and_h5py, sealed=True),
    Kind("keras deflated", keras_archive(zipfile.ZIP_DEFLATED), by_zip_and_h5py, rewritten=True),
    Kind("keras with gzip in it", keras_archive(zipfile.ZIP_STORED, filtered=True), by_zip_and_h5py, rewritten=True),
    Kind("TensorFlow by folder", copied("tf_ckpt"), by_place, sealed=True),
    Kind("TensorFlow by prefix", copied("tf_ckpt", "ckpt"), by_place, sealed=True),
    Kind("TensorFlow's types and slices", copied("tf_types"), None, sealed=True),
    Kind("DCP", dcp_folder, by_dcp, sealed=True),
    Kind("DCP of four ranks by its metadata", copied("dcp_sharded", ".metadata"), by_dcp, sealed=True),
    Kind("DeepSpeed", copied("deepspeed"), None, sealed=True),
    Kind("DeepSpeed's names", deepspeed_run, by_deepspeed, sealed=True),
    Kind("sharded by folder", copied("sharded"), by_index),
    Kind("sharded by index", copied("sharded", "model.safetensors.index.json"), by_index),
    Kind("torch shards by index", torch_shards, by_index, sealed=True),
    Kind("Trainer's folder", copied("trainer/checkpoint-4"), by_file, sealed=True),
    Kind("folder of three formats", mixed_folder(deflated=False), by_file, sealed=True),
    Kind("folder with a deflated npz", mixed_folder(deflated=True), by_file, rewritten=True),
)


def contents(path: Path) -> bytes | dict[str, tuple[int, bytes]]:
    """A file's bytes, or every file of a folder."""
    return snapshot(path) if path.is_dir() else path.read_bytes()


def snapshot(folder: Path, *, logs: bool = False) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder: its permissions and its bytes; logs only if asked for."""
    return {
        str(file.relative_to(folder)): (file.stat().st_mode, file.read_bytes())
        for file in sorted(folder.rglob("*"))
        if file.is_file() and (logs or ".faults." not in file.name)
    }
