"""safetensors: an 8-byte length, a JSON header, raw tensors without gaps.

Types that the format (or its library) lacks (complex128, complex32, float8_e8m0fnu) are stored as U8, with
their true type in the metadata. The skeleton goes there too, so that any state survives the way through it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import ConversionLoss, DamagedFile, LimitExceeded, StateError, said
from evergrad.formats.byte_source import DataFile, closed_on_error
from evergrad.formats.checkpoint import (
    Bits,
    Checkpoint,
    Format,
    OtherTensor,
    Probe,
    aliases_of,
    block_ranges,
    digest,
    losses_of,
    read_blocks,
    refuse_losses,
)
from evergrad.formats.offset_checkpoint import AddressedCheckpoint, describe
from evergrad.formats.region import Region
from evergrad.records import MAX_AXES, Check, TensorInfo
from evergrad.state import Placement, Skeleton, role_of
from evergrad.state.sharing import contiguous_strides

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
SKELETON_KEY = "evergrad.skeleton"
DTYPES_KEY = "evergrad.dtypes"  # name → [true dtype, true shape]
ALIASES_KEY = "evergrad.aliases"  # name → name of the tensor it is tied to
ELSEWHERE_KEY = "evergrad.elsewhere"  # tables "tensors" and "aliases": by name, what another rank's shard holds

DTYPES: dict[str, DType] = {
    "F64": DType.FLOAT64,
    "F32": DType.FLOAT32,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E4M3FNUZ": DType.FLOAT8_E4M3FNUZ,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "F8_E5M2FNUZ": DType.FLOAT8_E5M2FNUZ,
    "F8_E8M0": DType.FLOAT8_E8M0FNU,
    "I64": DType.INT64,
    "I32": DType.INT32,
    "I16": DType.INT16,
    "I8": DType.INT8,
    "U64": DType.UINT64,
    "U32": DType.UINT32,
    "U16": DType.UINT16,
    "U8": DType.UINT8,
    "BOOL": DType.BOOL,
    "C64": DType.COMPLEX64,
}
# The library writes F8_E8M0 and cannot load it again, so it goes as U8 too.
WRITTEN = {dtype: code for code, dtype in DTYPES.items() if code != "F8_E8M0"}


class Safetensors(Format):
    """One `.safetensors` file."""

    name = "safetensors"
    suffixes = (".safetensors",)

    def recognises(self, probe: Probe) -> bool:
        """A plausible header length, then a JSON object."""
        return len(probe.head) > 9 and probe.head[8:].lstrip()[:1] == b"{" and probe.head[5:8] == b"\0\0\0"

    def open(self, path: Path) -> Checkpoint:
        """Read the header; every offset in it is checked before anything is served."""
        with closed_on_error(DataFile(path)) as file:
            return _open(path, file)

    def losses(self, source: Checkpoint) -> list[str]:
        """Objects that cannot be rebuilt; anything else has a place in the header."""
        return losses_of(source, notes_kept=True)

    def write(self, source: Checkpoint, path: Path, *, tensors_only: bool = False) -> None:
        """Write tensor by tensor, with one block in memory at a time; tied tensors are stored once."""
        if not tensors_only:
            refuse_losses(source, self, self.losses(source))
        header, order = _header(source, tensors_only)
        with path.open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for info in order:
                for start, stop in block_ranges(info):
                    out.write(_little_endian(source.read_bits(info.name, start, stop)))


def _open(path: Path, file: DataFile) -> Checkpoint:
    header, start = _read_header(path, file)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFile(path, "__metadata__ is not a table of strings")
    true_types, aliases, skeleton = _own_notes(path, metadata)
    if not (true_types or aliases or skeleton or ELSEWHERE_KEY in metadata):
        plain = _plain(path, file, header, start, metadata)
        if plain is not None:
            return plain
    regions: dict[str, Region] = {}
    others: dict[str, str] = {}
    elsewhere: dict[str, object] = {}
    for name, entry in header.items():
        region = _region(path, file, name, entry, start, true_types.get(name))
        if isinstance(region, Region):
            regions[name] = region
        else:
            others[name] = region
    for alias, name in aliases.items():
        if name not in regions or alias in regions:
            raise DamagedFile(path, f"{alias!r} is said to be {name!r}, and one of them contradicts that")
        regions[alias] = regions[name]
    for name, note in _elsewhere(path, metadata).items():
        if name in regions or name in others:
            raise DamagedFile(path, f"{name!r} is said to be elsewhere, and is here")
        others[name] = OtherTensor("a tensor that another rank's shard holds")
        elsewhere[name] = note
    if skeleton is not None and (wrong := skeleton.tensor_names() ^ (regions.keys() | others.keys())):
        raise DamagedFile(path, f"the skeleton in the metadata and the header disagree on {min(wrong)!r}")
    _check_no_overlap(path, {name: region for name, region in regions.items() if name not in aliases})
    tensors = describe(
        (  # tensors without overlap: each place is a storage of its own, and only aliases share one
            (Placement(name, r.offset, 0, r.shape, contiguous_strides(r.shape), r.dtype.itemsize), r.dtype)
            for name, r in regions.items()
        ),
        skeleton.roles if skeleton else None,
    )
    notes = {key: value for key, value in metadata.items() if not key.startswith("evergrad.")}

    def fingerprint(name: str) -> str:
        if name in elsewhere:
            return digest((others[name], elsewhere[name]), ())
        begin, end = header[name]["data_offsets"]
        what = (header[name]["dtype"], header[name]["shape"])
        return digest(what, read_blocks(file, start + begin, end - begin))

    def check_other(name: str) -> Check:
        return Check.OK if name in elsewhere else Check.UNKNOWN  # no byte of it is here that could be wrong

    def check_container() -> Mapping[str, Check]:
        wrong = _layout_error(header, file.size - start)
        return {f"header: {wrong}, which the safetensors library refuses": Check.FAILED} if wrong else {}

    return AddressedCheckpoint(
        Safetensors.name,
        path,
        tensors,
        regions.__getitem__,
        file,
        skeleton=skeleton,
        others=others,
        metadata=notes,
        check_container=check_container,
        fingerprint=fingerprint,
        check_other=check_other,
    )


def _layout_error(header: dict[str, Any], data_bytes: int) -> str:
    """The first place where tensors do not follow each other without a gap, from the first data byte to the last."""
    reach, before = 0, ""
    for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if begin > reach:
            return f"{_bytes(begin - reach)} before {name!r} belong to no tensor"
        if begin < reach:
            return f"{name!r} begins within {before!r}"
        reach, before = end, name
    rest = data_bytes - reach
    return f"{_bytes(rest)} after the last tensor belong to no tensor" if rest else ""


def _bytes(count: int) -> str:
    return f"{count} byte{'s' if count != 1 else ''}"


def _plain(
    path: Path, file: DataFile, header: dict[str, Any], start: int, metadata: dict[str, str]
) -> Checkpoint | None:
    """A file as the library writes it, checked all at once; None if anything is unusual, and has to be named."""
    try:
        shapes = [tuple(entry["shape"]) for entry in header.values()]
        dtypes = [DTYPES[entry["dtype"]] for entry in header.values()]
        places = [entry["data_offsets"] for entry in header.values()]
        if not {type(n) for n in chain.from_iterable(chain(shapes, places))} <= {int}:
            return None
        sizes = {shape: math.prod(shape) for shape in set(shapes)}
        # The longest empty shape that torch has; others are as long as their data.
        if any(len(s) > MAX_AXES or min(s, default=0) < 0 or math.prod(n or 1 for n in s) >= 1 << 59 for s in sizes):
            return None
        lengths = np.array([sizes[s] * d.itemsize for s, d in zip(shapes, dtypes, strict=True)], np.int64)
        ends = np.array(places, np.int64).reshape(-1, 2)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if np.any(ends < 0) or np.any(ends[:, 1] - ends[:, 0] != lengths) or np.any(ends[:, 1] > file.size - start):
        return None
    order = ends[np.lexsort((ends[:, 1], ends[:, 0]))]
    if np.any(order[:, 0] != np.append(0, order[:-1, 1])) or file.size - start != (order[-1, 1] if len(order) else 0):
        return None
    tensors = {
        name: TensorInfo(name, shape, dtype, role_of(name, is_float=dtype.is_float, rank=len(shape)), length)
        for name, shape, dtype, length in zip(header, shapes, dtypes, lengths.tolist(), strict=True)
    }
    begins = dict(zip(header, (ends[:, 0] + start).tolist(), strict=True))

    def locate(name: str) -> Region:
        return Region(file, begins[name], tensors[name].shape, tensors[name].dtype)

    return AddressedCheckpoint(Safetensors.name, path, tensors, locate, file, metadata=metadata)


def _read_header(path: Path, file: DataFile) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(path, "header length", expected=f"at most {MAX_HEADER_BYTES}", found=length)
    if 8 + length > file.size:
        raise DamagedFile(path, "header is cut short", expected=f"{length} bytes", found=max(0, file.size - 8))
    try:
        text = file.read(8, length)
        header = json.loads(text, parse_constant=_no_constant)
        if not _surely_without_duplicates(text, header):
            header = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"header is not JSON: {said(error)}") from None
    if not isinstance(header, dict):
        raise DamagedFile(path, "header is not a JSON object", found=type(header).__name__)
    return header, 8 + length


def _surely_without_duplicates(text: bytes, header: Any) -> bool:
    """True if a header has as many keys as its text has colons behind quotes; False if that cannot be told so."""
    if not isinstance(header, dict) or not all(type(entry) is dict for entry in header.values()):
        return False
    # Within a string a quote follows a backslash, so text that looks like a key only makes the count larger.
    keys = len(header) + sum(map(len, header.values()))
    codes = np.frombuffer(text, np.uint8)
    behind = codes[1:][codes[:-1] == ord('"')]
    return not np.any(behind <= ord(" ")) and np.count_nonzero(behind == ord(":")) == keys


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):  # the library takes the last one; which bytes are meant cannot be known
        raise ValueError("a name comes twice")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _region(path: Path, file: DataFile, name: str, entry: Any, start: int, true_type: Any) -> Region | str:
    """A tensor's place, or, if its elements cannot be served, what it is."""
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise DamagedFile(path, f"{name!r}: header entry without dtype, shape and data_offsets") from None
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)) or begin > end:
        raise DamagedFile(path, f"{name!r}: impossible shape {shape!s:.80} or offsets {begin!s:.40}, {end!s:.40}")
    if len(shape) > MAX_AXES:
        raise LimitExceeded(path, f"{name!r}: number of axes", expected=f"at most {MAX_AXES}", found=len(shape))
    if start + end > file.size:
        raise DamagedFile(path, f"{name!r}: data lies beyond the end", expected=f"{start + end} bytes", found=file.size)
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        return OtherTensor(f"a tensor of {code!s:.40}, which is not served")
    if true_type is not None:
        dtype, shape = DType(true_type[0]), tuple(int(n) for n in true_type[1])
    if math.prod(shape) * dtype.itemsize != end - begin:
        expected = f"{math.prod(shape) * dtype.itemsize} bytes for {dtype} {shape}"
        raise DamagedFile(path, f"{name!r}: wrong length", expected=expected, found=end - begin)
    return Region(file, start + begin, shape, dtype)


def _check_no_overlap(path: Path, regions: dict[str, Region]) -> None:
    reach, before = 0, ""
    for begin, end, name in sorted((r.offset, r.offset + r.nbytes, name) for name, r in regions.items()):
        if begin < reach and end > begin:
            raise DamagedFile(path, f"{name!r} overlaps {before!r}", expected=f"a start at {reach}", found=begin)
        reach, before = max(reach, end), name


def _own_notes(path: Path, metadata: dict[str, str]) -> tuple[dict[str, Any], dict[str, str], Skeleton | None]:
    """What our own writer left in the metadata."""
    try:
        true_types = json.loads(metadata.get(DTYPES_KEY, "{}"))
        aliases = json.loads(metadata.get(ALIASES_KEY, "{}"))
        if not isinstance(true_types, dict) or not isinstance(aliases, dict):
            raise ValueError("not a table")
        for name, (dtype, shape) in true_types.items():
            if (
                DType.named(dtype) is None
                or not isinstance(shape, list)
                or not all(type(n) is int and n >= 0 for n in shape)
            ):
                raise ValueError(f"{name}: {dtype} {shape}")
        for original in aliases.values():
            if not isinstance(original, str) or original in aliases:
                raise ValueError(f"alias of {original}")
        skeleton = Skeleton.loads(metadata[SKELETON_KEY]) if SKELETON_KEY in metadata else None
        if skeleton is not None:
            skeleton.check()
    except (ValueError, TypeError, RecursionError, StateError) as error:
        raise DamagedFile(path, f"notes in the metadata are damaged: {error}") from None
    return true_types, aliases, skeleton


def _elsewhere(path: Path, metadata: dict[str, str]) -> dict[str, object]:
    """Tensors of the state that were left to another shard of the same version, with what is noted of each."""
    try:
        noted = json.loads(metadata.get(ELSEWHERE_KEY, "{}"))
        return {**noted.get("tensors", {}), **noted.get("aliases", {})}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(path, f"notes in the metadata are damaged: {error}") from None


def _header(source: Checkpoint, tensors_only: bool) -> tuple[bytes, list[TensorInfo]]:
    """The header, and the tensors in the order of their bytes: wide elements first, so that all are aligned."""
    if "__metadata__" in source.tensors:
        raise StateError("a tensor cannot be called '__metadata__' in a safetensors file")
    aliases = {} if tensors_only else aliases_of(source.skeleton, source.tensors)
    stored = [info for name, info in source.tensors.items() if name not in aliases]
    order = sorted(stored, key=lambda info: -info.dtype.itemsize)
    offsets: dict[str, int] = {}
    end = 0
    for info in order:
        offsets[info.name] = end
        end += info.nbytes
    metadata = {"format": "pt", **source.metadata}
    foreign = {info.name: [info.dtype.value, list(info.shape)] for info in stored if info.dtype not in WRITTEN}
    if foreign:
        metadata[DTYPES_KEY] = json.dumps(foreign, separators=(",", ":"))
    if aliases:
        metadata[ALIASES_KEY] = json.dumps(aliases, separators=(",", ":"))
    # A skeleton that only repeats the names is left out: the file then is what the library would write.
    if not tensors_only and source.skeleton != Skeleton.of_names(source.tensors):
        metadata[SKELETON_KEY] = source.skeleton.dumps()
    header: dict[str, Any] = {"__metadata__": metadata}
    for info in stored:
        begin = offsets[info.name]
        header[info.name] = {
            "dtype": WRITTEN.get(info.dtype, "U8"),
            "shape": list(info.shape) if info.dtype in WRITTEN else [info.nbytes],
            "data_offsets": [begin, begin + info.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES - 8:
        what = (
            f"a header of {len(text)} bytes: names and values besides tensors do not fit ({MAX_HEADER_BYTES} at most)"
        )
        raise ConversionLoss(f"{source.path}: as safetensors this needs {what}", [what])
    return text + b" " * (-len(text) % 8), order


def _little_endian(bits: Bits) -> memoryview:
    return np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).data.cast("B")
