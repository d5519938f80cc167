"""Orbax's folders (JAX, Flax): arrays are listed; their bytes are compressed, so none is read or altered.

Orbax keeps arrays in zarr chunks, each compressed, and by default all of them in one OCDBT database, which is
compressed again. No element has a place in a file, and only Orbax's own libraries write such files safely.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from evergrad._files import file_errors, open_file
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, LimitExceeded, UnsupportedContent, said
from evergrad.formats.checkpoint import Bits, Checkpoint, Format, OtherTensor, Probe
from evergrad.records import TensorInfo
from evergrad.state import Skeleton, escape
from evergrad.state.selection import tensor_info

METADATA, STEP, ZARR, OCDBT = "_METADATA", "_CHECKPOINT_METADATA", ".zarray", "manifest.ocdbt"
MAX_JSON_BYTES = 1 << 25
MAX_FOLDERS = 1 << 17
_NUMPY = re.compile(r"[<>|=](f[248]|[iu][1248]|c8|c16|b1)")


class Orbax(Format):
    """One step of an Orbax checkpoint: a folder of arrays, or of items that are such folders."""

    name = "orbax"

    def recognises(self, probe: Probe) -> bool:
        """A folder with one of Orbax's marker files, or with zarr arrays, or with steps that have one."""
        if not probe.is_folder:
            return False
        below = (ZARR, STEP)
        return bool({METADATA, STEP, OCDBT} & probe.names) or any(
            (probe.path / name / marker).is_file() for name in probe.names for marker in below
        )

    def open(self, path: Path) -> Checkpoint:
        """Read the metadata, and the headers of zarr arrays."""
        path = _step(path)
        checkpoint = OrbaxCheckpoint(path)
        items = [""] if _is_item(path) else [child.name for child in _folders(path) if _is_item(child)]
        for item in items:
            _list_item(path / item, f"{escape(item)}/" if item else "", checkpoint)
        checkpoint.skeleton = Skeleton.of_names(checkpoint.tensors)
        return checkpoint


def _step(folder: Path) -> Path:
    """The folder itself, or the only step in it."""
    if (folder / STEP).is_file() or _is_item(folder):
        return folder
    steps = [child for child in _folders(folder) if (child / STEP).is_file()]
    if len(steps) > 1:
        names = ", ".join(repr(step.name) for step in steps[:8])
        raise UnsupportedContent(folder, f"holds several steps: {names}", hint="Open one of them.")
    return steps[0]


class OrbaxCheckpoint(Checkpoint):
    """What can be told of an Orbax folder without its libraries: names, shapes and types."""

    def __init__(self, path: Path) -> None:
        self.format = Orbax.name
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.others: dict[str, str] = {}
        self.metadata = {}
        self.skeleton = Skeleton.of_names(())
        self.compressors: dict[str, str] = {}

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        self._refuse(name)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        self._refuse(name)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def listed_only(self) -> Mapping[str, str]:  # type: ignore[override]  # mypy takes a property for read-only
        """All tensors: their chunks are not read."""
        return {name: f"its zarr chunks are {how}" for name, how in self.compressors.items()}

    def _refuse(self, name: str) -> NoReturn:
        what = f"{name}: can be listed, but not read or altered: its zarr chunks are {self.compressors[name]}"
        raise UnsupportedContent(self.path, what, hint="Load it with Orbax and save it in another format.")


def _list_item(folder: Path, prefix: str, into: OrbaxCheckpoint) -> None:
    """Add the arrays of one item."""
    tree = _tree(folder)
    shapes = _shapes(folder)
    if tree is None:  # no metadata: the folders of zarr arrays are all there is
        tree = [([child.name], {}) for child in _folders(folder) if (child / ZARR).is_file()]
        if (folder / OCDBT).is_file():
            into.others[f"{prefix}{OCDBT}"] = OtherTensor("an OCDBT database without Orbax's metadata")
    for keys, value in tree:
        name, stored = prefix + "/".join(escape(key) for key in keys), ".".join(keys)
        header = folder / stored / ZARR
        plain = stored not in ("", ".", "..") and "/" not in stored and "\0" not in stored and len(stored) < 256
        if name in into.tensors or name in into.others:
            raise DamagedFile(folder / METADATA, f"names {name[:80]!r} twice")
        if plain and header.is_file():
            _list_zarr(header, name, into)
            continue
        kind = value.get("value_type")
        shape = _shape(value.get("write_shape"))
        shape = shapes.get(stored) if shape is None else shape
        of_shape = f" of shape {shape}" if shape is not None else ""
        kind = kind[:80] if isinstance(kind, str) else "value"
        what = f"a {kind}{of_shape} in a compressed OCDBT database, which alone tells its type"
        into.others[name] = "a string" if kind == "string" else OtherTensor(what)


def _list_zarr(header: Path, name: str, into: OrbaxCheckpoint) -> None:
    """Add one array by its zarr header."""
    data = _json(header)
    shape = _shape(data.get("shape"))
    code = data.get("dtype")
    if shape is None or not isinstance(code, str):
        raise DamagedFile(header, "no shape and dtype", expected="a zarr header")
    dtype = DType.of_numpy(np.dtype(code)) if _NUMPY.fullmatch(code) else DType.named(code)
    if dtype is None:
        into.others[name] = OtherTensor(f"an array of {code[:80]}")
        return
    compressor = data.get("compressor")
    how = compressor.get("id") if isinstance(compressor, dict) else None
    into.compressors[name] = f"compressed ({str(how)[:40]})" if how else "files of their own, which is not served yet"
    into.tensors[name] = tensor_info(name, shape, dtype)


def _tree(folder: Path) -> list[tuple[list[str], Mapping[str, Any]]] | None:
    """Keys and description of every leaf, as `_METADATA` lists them; None without such a file."""
    path = folder / METADATA
    if not path.is_file():
        return None
    tree = _json(path).get("tree_metadata")
    if not isinstance(tree, dict):
        raise DamagedFile(path, "no tree_metadata", expected="a table of keys and values")
    leaves: list[tuple[list[str], Mapping[str, Any]]] = []
    for leaf in tree.values():
        keys = leaf.get("key_metadata") if isinstance(leaf, dict) else None
        value = leaf.get("value_metadata") if isinstance(leaf, dict) else None
        if not isinstance(keys, list) or not all(isinstance(k, dict) and "key" in k for k in keys) or not keys:
            raise DamagedFile(path, "a leaf without keys in tree_metadata")
        if not all(isinstance(k["key"], str | int) for k in keys):
            raise DamagedFile(path, "a key that is no name in tree_metadata")
        leaves.append(([str(k["key"]) for k in keys], value if isinstance(value, dict) else {}))
    return leaves


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by stored name, as older versions keep them: apart, one file a process."""
    shapes: dict[str, tuple[int, ...]] = {}
    apart = folder / "array_metadatas"
    with file_errors(apart):
        files = sorted(child for child in apart.iterdir() if child.is_file()) if apart.is_dir() else []
    for file in files[:1024]:
        rows = _json(file).get("array_metadatas")
        for row in rows if isinstance(rows, list) else []:
            array = row.get("array_metadata") if isinstance(row, dict) else None
            if isinstance(array, dict) and (shape := _shape(array.get("write_shape"))) is not None:
                shapes[str(array.get("param_name"))] = shape
    return shapes


def _shape(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 64:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 62 for n in value) else None


def _json(path: Path) -> dict[str, Any]:
    with file_errors(path), open_file(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise LimitExceeded(path, "metadata", expected=f"at most {MAX_JSON_BYTES} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"is not JSON: {said(error)}") from None
    if not isinstance(data, dict):
        raise DamagedFile(path, "is not a JSON object")
    return data


def _is_item(folder: Path) -> bool:
    with file_errors(folder):
        if (folder / METADATA).is_file() or (folder / OCDBT).is_file():
            return True
        return any((child / ZARR).is_file() for child in _folders(folder))


def _folders(folder: Path) -> list[Path]:
    with file_errors(folder):
        found = sorted(child for child in folder.iterdir() if child.is_dir())
    if len(found) > MAX_FOLDERS:
        raise LimitExceeded(folder, f"{len(found)} folders", expected=f"at most {MAX_FOLDERS}")
    return found
