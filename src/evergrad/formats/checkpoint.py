"""What a format is, and what every opened checkpoint offers.

To add a format, write a `Format` and a `Checkpoint` (most need no class of their own: `AddressedCheckpoint`
serves everything whose tensors lie at known places), name the format in the entry-point group
`evergrad.formats`, and run `evergrad.testing.FormatContract` over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from evergrad._digest import digest_chunks
from evergrad._files import file_errors, open_file
from evergrad.dtypes import DType
from evergrad.errors import ConversionLoss, LimitExceeded, UnknownTensor, UnsupportedContent, UsageError
from evergrad.formats.byte_source import ByteSource, NeedsRewrite, current_dry_run
from evergrad.records import Check, Role, TensorInfo
from evergrad.state import Skeleton, Where, role_of, select, unflatten

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[np.unsignedinteger]
ProgressCallback = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

MAX_EXPANSION = 64
"""The limit of an expanded tensor's size, as a multiple of its bytes in the file."""
MAX_EXPANDED_BYTES = 1 << 28
"""So many bytes they may have in any case."""

ANOTHER_TARGET = "Or write .safetensors, .h5 or .pt, which hold all types."
"""The hint where a target has no place for a tensor."""

_BLOCK_BYTES = 1 << 24


class TensorAttributes(str):
    """The names, in `Checkpoint.others`, of attributes that were set on a tensor: listed, compared and not kept."""

    __slots__ = ()


class OtherTensor(str):
    """The description, in `Checkpoint.others`, of a tensor or array that is not listed as one: sparse, quantised, …"""

    __slots__ = ()


class AttributesWithTensors(TensorAttributes, OtherTensor):
    """Attributes that were set on a tensor and hold tensors, which nothing lists."""

    __slots__ = ()


@dataclass(frozen=True)
class Probe:
    """What recognising looks at: the first bytes of a file, or the names in a folder."""

    path: Path

    @cached_property
    def is_folder(self) -> bool:
        """Whether the path is a folder."""
        return self.path.is_dir()

    @cached_property
    def head(self) -> bytes:
        """The first 4 KiB of a file; nothing for a folder."""
        if self.is_folder:
            return b""
        with file_errors(self.path), open_file(self.path) as file:
            return file.read(4096)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in a folder; none for a file."""
        if not self.is_folder:
            return frozenset()
        with file_errors(self.path):
            return frozenset(child.name for child in self.path.iterdir())


class Format(ABC):
    """One checkpoint format: how to recognise, open and, where it can be written, write it.

    Stateless: one instance serves every file. Nothing that a file contains is ever executed, and whatever a
    file contains, only `EvergradError` may come out.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    """The endings under which `convert` writes this format; none if it cannot be written."""

    @abstractmethod
    def recognises(self, probe: Probe) -> bool:
        """Whether the content, not the name, is of this format."""

    @abstractmethod
    def open(self, path: Path) -> Checkpoint:
        """Open a recognised file or folder, at a cost that grows with its tensors and not with its bytes."""

    def losses(self, source: Checkpoint) -> list[str]:
        """What writing `source` in this format would lose, one item each; an empty list if nothing."""
        return [f"everything: {self.name} cannot be written"]

    def unwritable(self, source: Checkpoint) -> dict[str, str]:
        """Tensors of `source` that this format cannot hold, also where only tensors are kept: name → why."""
        return {}

    def check_write(self, target: Path) -> None:
        """Raise `UnsupportedContent` if this cannot be written here: no format for writing, or a library is missing."""
        if not self.suffixes:
            raise UnsupportedContent(target, f"{self.name} cannot be written")

    def write(self, source: Checkpoint, path: Path, *, tensors_only: bool = False) -> None:
        """Write `source` to a path that is moved into place by the caller."""
        raise UnsupportedContent(path, f"{self.name} cannot be written")


class Checkpoint(ABC):
    """A checkpoint as named, addressable tensors.

    Opening reads no tensor. `read` gives values, `xor` alters bits in place; changes are durable after
    `close`, which leaving the `with` block calls. Not thread-safe. Bits are unsigned integers of the
    element's width; complex elements are rows of two, real part first.
    """

    format: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    others: Mapping[str, str]
    """Content that is neither a tensor nor a plain value: name → what it is. It is listed and left alone.

    Tensors among them that `--tensors-only` must not drop unasked are described by an `OtherTensor`.
    """
    listed_only: Mapping[str, str] = {}
    """Tensors of which nothing but name, shape and type is read: name → why. Reading one raises an error."""
    unkept: Mapping[str, str] = {}
    """What stands in the way of nothing but is lost when the file is converted (HDF5's attributes): name → what."""
    unindexed: Sequence[str] = ()
    """Tensors of shards that the index of these does not name; in all else they are tensors like others."""
    metadata: Mapping[str, str]
    """The container's own notes, where it has some."""
    skeleton: Skeleton
    """How the tensors are nested, and the values between them."""
    supports_dry_run: ClassVar[bool] = False
    """Whether every alteration goes through `ByteSource`, so that it can be rehearsed; else it is made in a copy."""

    @property
    def arrays(self) -> Mapping[str, str]:
        """The arrays that are kept as values and not as tensors: name → what they are."""
        return self.skeleton.arrays()

    @property
    def unread(self) -> Mapping[str, str]:
        """The part of `others` whose content is not read: it can be compared by its bytes at most.

        The rest are objects of which a pickle says everything in parts that are listed and compared.
        """
        walked = {name for name, _ in self.skeleton.objects()}
        walked -= {name for name, _ in self.skeleton.objects(unread=True)}
        # The object that is all of a file is called `file/.` in its folder, and `file` in the skeleton.
        others = self.others.items()
        return {name: what for name, what in others if name not in walked and name.removesuffix("/.") not in walked}

    @property
    def doubts(self) -> Mapping[str, str]:
        """Parts whose checksums do not tell that all is as it was saved, and why: `unknown` where they hold."""
        return {}

    @abstractmethod
    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        """The bits of the elements `start` to `stop`, in C order. The name and the range are valid."""

    @abstractmethod
    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        """Alter elements in place and return their old bits. The arguments are valid."""

    @abstractmethod
    def close(self) -> None:
        """Make changes durable and let go of the files; twice is fine."""

    def _bits_at(self, name: str, indices: npt.NDArray[np.int64]) -> Bits:
        """The bits of single elements. The arguments are valid. Better where the format need not read all."""
        dtype = self.tensors[name].dtype
        out: Bits = np.empty((len(indices),) if dtype.parts == 1 else (len(indices), dtype.parts), dtype.bits)
        for start, stop in block_ranges(self.tensors[name]):
            mine = (indices >= start) & (indices < stop)
            if mine.any():
                out[mine] = self._read_bits(name, start, stop)[indices[mine] - start]
        return out

    def addresses(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64] | None:
        """The byte at which each element begins, where elements may lie in the same bytes as others; else None.

        `start` and `stop` limit it to a range of elements.
        """
        self._info(name)
        return None

    def checksum(self, name: str) -> Check:
        """Whether the container's checksum over this tensor's bytes holds; `unknown` where it has none.

        Reads every byte that the checksum covers.
        """
        self._info(name)
        return Check.UNKNOWN

    def doubt(self, name: str) -> str:
        """Return what of a tensor its checksums, where they hold, do not vouch for; empty if nothing is known."""
        self._info(name)
        return ""

    def fingerprint(self, name: str) -> str | None:
        """A digest of something in `others`, over its description and stored bytes; None if these cannot be had."""
        return None

    def check_other(self, name: str) -> Check:
        """Check the checksum of something in `others`; `unknown` where there is none."""
        return Check.UNKNOWN

    def container_checks(self) -> Mapping[str, Check]:
        """Whether the checksums over everything that is no tensor (headers, pickles) hold: part → result."""
        return {}

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, as a new contiguous tensor on the CPU."""
        import torch

        info = self._info(name)
        if info.numel == 0:
            return torch.empty(info.shape, dtype=info.dtype.torch)
        raw = self.read_bits(name).reshape(-1).view(np.uint8)
        return torch.from_numpy(raw).view(info.dtype.torch).reshape(info.shape)

    def borrow(self, name: str) -> torch.Tensor:
        """The tensor of that name without a copy where it lies in a file as torch wants it; else as `read` gives it.

        For writing it elsewhere: its values are those that the file has when they are looked at.
        """
        return self.read(name)

    def read_bits(self, name: str, start: int = 0, stop: int | None = None) -> Bits:
        """The bits of a range of elements, in C order; all of them by default."""
        info = self._info(name)
        stop = info.numel if stop is None else stop
        if not 0 <= start <= stop <= info.numel:
            raise UsageError(f"{name}: no elements {start} to {stop} (it has {info.numel})")
        return self._read_bits(name, start, stop)

    def xor(self, name: str, indices: npt.ArrayLike, patterns: npt.ArrayLike) -> Bits:
        """XOR bit patterns onto elements, in place, and return their old bits.

        `indices` count elements in C order, `patterns` has one unsigned integer each (a row of two for complex
        elements). An index may come twice: every pattern counts, and the old bits are those before the call.
        Checksums of the container are kept valid. Tensors that share the bytes change with it.

        >>> old = ck.xor("model/fc.weight", [3], [0x80000000])          # doctest: +SKIP
        """
        info = self._info(name)
        where = _indices(info, indices)
        checked = _patterns(info, len(where), patterns)
        if not len(where):
            return checked
        if info.read_only:
            hint = "Save it as a tensor (torch.from_numpy) to alter it."
            raise UnsupportedContent(
                self.path, f"{name}: {info.read_only}, which cannot be altered in place", hint=hint
            )
        if not self.supports_dry_run and current_dry_run() is not None:
            raise NeedsRewrite
        return self._xor_bits(name, where, checked)

    def bits_at(self, name: str, indices: npt.ArrayLike) -> Bits:
        """The bits of single elements, counted in C order; costs what the indices cost where data has a place."""
        info = self._info(name)
        where = _indices(info, indices)
        if not len(where):
            return np.empty((0,) if info.dtype.parts == 1 else (0, info.dtype.parts), info.dtype.bits)
        return self._bits_at(name, where)

    def files(self) -> list[Path]:
        """Every file that the checkpoint consists of."""
        return [self.path]

    def state(self) -> Any:
        """The nested state: dicts, lists and values as they were saved, tensors sharing as they did.

        Raises `UnsupportedContent` where the file holds objects of a class that would have to be run.
        """
        return self._state(self.read)

    def borrowed_state(self) -> Any:
        """As `state`, with the tensors as `borrow` gives them."""
        return self._state(self.borrow)

    def _state(self, read: Callable[[str], torch.Tensor]) -> Any:
        for name, what in self.others.items():
            if isinstance(what, TensorAttributes):  # the tensor is there without them
                continue
            raise UnsupportedContent(self.path, f"{name} is {what}", hint="Read single tensors instead.")
        check_views(self)
        return unflatten({name: read(name) for name in self.tensors}, self.skeleton)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint {str(self.path)!r}: {len(self.tensors)} tensors>"

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            raise UnknownTensor(name, self.tensors, where=str(self.path)) from None


def resolve_selection(ck: Checkpoint, where: Where) -> tuple[list[str], dict[str, str]]:
    """The tensors of a selection, and what of it is there but cannot be read; `UnknownTensor` if it is neither."""
    unread = ck.unread
    chosen = select({**ck.tensors, **describe_others(unread, ck.tensors)}, where)
    rest = {name: unread[name] for name in chosen if name not in ck.tensors}
    return [name for name in chosen if name in ck.tensors], rest


def describe_others(others: Mapping[str, str], tensors: Container[str]) -> dict[str, TensorInfo]:
    """Return content other than `tensors` as selections see it: tensors of other kinds have the role of their path."""
    return {
        name: TensorInfo(
            name, (), DType.UINT8, role_of(name) if isinstance(what, OtherTensor) else _role_of_value(name), 0
        )
        for name, what in others.items()
        if name not in tensors
    }


def _role_of_value(name: str) -> Role:
    return role_of(name, is_float=False, rank=0)


def digest(what: object, chunks: Iterable[bytes]) -> str:
    """A digest over a description and bytes, for `Checkpoint.fingerprint`."""
    return digest_chunks(chain([repr(what).encode("utf-8", "backslashreplace")], chunks))


def read_blocks(source: ByteSource, offset: int, length: int) -> Iterator[bytes]:
    """The bytes of a range, a block at a time."""
    for start in range(offset, offset + length, _BLOCK_BYTES):
        yield source.read(start, min(_BLOCK_BYTES, offset + length - start))


def check_views(ck: Checkpoint, *, without: Container[str] = ()) -> None:
    """Raise `LimitExceeded` if the views of a state, other than `without`, are too large when each has its own bytes.

    Views may be larger than what they are views of; a few bytes must not become a petabyte in memory or in a file.
    """
    views, held = ck.skeleton.sharing.views, sum(ck.skeleton.sharing.sizes)
    claimed = sum(ck.tensors[name].nbytes for name in views if name in ck.tensors and name not in without)
    limit = max(MAX_EXPANSION * held, MAX_EXPANDED_BYTES)
    if claimed > limit:
        raise LimitExceeded(
            ck.path,
            f"views of {claimed:,} bytes over {held:,} bytes",
            expected=f"at most {limit:,} bytes",
            hint="Save the tensors that they are views of instead.",
        )


def aliases_of(skeleton: Skeleton, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Tensors that are another one under a second name, with the first."""
    return skeleton.sharing.aliases({name: (info.shape, info.dtype) for name, info in tensors.items()})


def losses_of(source: Checkpoint, *, notes_kept: bool = False) -> list[str]:
    """What no target keeps: objects, attributes, and the container's notes unless the target has a place for them."""
    losses = [f"{name} ({what})" for name, what in (*source.others.items(), *source.unkept.items())]
    return losses if notes_kept else losses + [f"metadata {key!r}" for key in source.metadata if key != "format"]


def refuse_losses(source: Checkpoint, target: Format, losses: list[str]) -> None:
    """Raise `ConversionLoss` if there are any, with the options that help."""
    if losses:
        shown = "; ".join(losses[:3]) + (f"; and {len(losses) - 3} more" if len(losses) > 3 else "")
        hint = "Keep only the tensors: tensors_only=True, or --tensors-only."
        unwritable = target.unwritable(source)
        if unwritable or any(isinstance(what, OtherTensor) for what in source.others.values()):
            hint = (
                "Keep only the tensors that can be converted: tensors_only=True and skip_unread=True, "
                "or --tensors-only --skip-unread."
            )
        if unwritable:
            hint += f" {ANOTHER_TARGET}"
        raise ConversionLoss(f"{source.path}: as {target.name} this would lose {shown}. {hint}", losses)


def block_ranges(info: TensorInfo, block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """The ranges of elements that cover a tensor in pieces of bounded size."""
    step = max(1, block_bytes // info.dtype.itemsize)
    for start in range(0, info.numel, step):
        yield start, min(start + step, info.numel)


def _array(info: TensorInfo, what: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{info.name}: {what} are no array of integers: {error}") from None


def _indices(info: TensorInfo, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    where = _array(info, "indices", indices)
    if where.size == 0:
        where = where.astype(np.int64)
    if where.ndim != 1 or where.dtype.kind not in "iu":
        raise UsageError(f"{info.name}: indices must be a list of integers (found {where.dtype}, {where.ndim} axes)")
    if where.size and not (int(where.min()) >= 0 and int(where.max()) < info.numel):
        wrong = int(where.max()) if int(where.max()) >= info.numel else int(where.min())
        raise UsageError(f"{info.name}: no element {wrong} (expected 0 to {info.numel - 1})")
    return where.astype(np.int64, copy=False)


def _patterns(info: TensorInfo, count: int, patterns: npt.ArrayLike) -> Bits:
    given = _array(info, "patterns", patterns)
    shape = (count,) if info.dtype.parts == 1 else (count, info.dtype.parts)
    if given.size == 0 and count == 0:
        given = given.reshape(shape).astype(info.dtype.bits)
    if given.shape != shape or given.dtype.kind not in "iu":
        raise UsageError(
            f"{info.name}: patterns must be unsigned integers of shape {shape} "
            f"(found {given.dtype} of shape {given.shape})"
        )
    width = 8 * info.dtype.layout.part_bytes
    if given.size and (int(given.min()) < 0 or int(given.max()) >> width):
        wrong = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise UsageError(f"{info.name}: pattern {wrong:#x} does not fit into the {width} bits of {info.dtype}")
    return given.astype(info.dtype.bits)
