"""Checkpoints whose tensors lie at known places in a file: nearly all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.formats.byte_source import Closeable
from evergrad.formats.checkpoint import Bits, Checkpoint
from evergrad.formats.region import Region, check_stored_checksum
from evergrad.records import Check, Neighbour, Role, TensorInfo
from evergrad.state import Placement, Skeleton, role_of
from evergrad.state.sharing import byte_extent

if TYPE_CHECKING:
    import torch


class AddressedCheckpoint(Checkpoint):
    """A checkpoint given by where its tensors are; `locate` finds a place when it is first needed."""

    supports_dry_run = True

    def __init__(
        self,
        format: str,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        locate: Callable[[str], Region],
        holder: Closeable,
        *,
        skeleton: Skeleton | None = None,
        others: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        check_container: Callable[[], Mapping[str, Check]] | None = None,
        fingerprint: Callable[[str], str | None] | None = None,
        check_other: Callable[[str], Check] | None = None,
    ) -> None:
        self.format = format
        self.path = path
        self.tensors = tensors
        self.others = others or {}
        self.metadata = metadata or {}
        if skeleton is not None:
            self.skeleton = skeleton
        self._locate = locate
        self._holder = holder
        self._check_container, self._check_other = check_container, check_other
        self._fingerprint = fingerprint
        self._regions: dict[str, Region] = {}

    @cached_property
    def skeleton(self) -> Skeleton:  # type: ignore[override]  # mypy takes a cached property for read-only
        """Nested dicts, unless the format knows better; made when it is first asked for."""
        return Skeleton.of_names(self.tensors)

    @property
    def arrays(self) -> Mapping[str, str]:
        """None where there are names alone, which need not be nested for that."""
        return self.skeleton.arrays() if "skeleton" in vars(self) else {}

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        return self.region(name).read(start, stop)

    def _bits_at(self, name: str, indices: npt.NDArray[np.int64]) -> Bits:
        return self.region(name).at(indices)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        return self.region(name).xor(indices, patterns)

    def borrow(self, name: str) -> torch.Tensor:
        """The tensor in the pages of its file, if it is alone in its bytes there."""
        info = self._info(name)
        region = self.region(name)
        pages = region.pages() if info.numel and not info.neighbours else None
        if pages is None:
            return self.read(name)
        import torch

        flat = torch.from_numpy(pages).view(info.dtype.torch)
        return flat.reshape(info.shape) if region.stride is None else flat.as_strided(info.shape, region.stride)

    def addresses(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64] | None:
        """The byte at which each element begins."""
        return self.region(name).addresses(np.arange(start, self._info(name).numel if stop is None else stop))

    def checksum(self, name: str) -> Check:
        """Whether the checksum of the container over this tensor's bytes holds, if it has one."""
        self._info(name)
        return check_stored_checksum(self.region(name).stored_checksum)

    def fingerprint(self, name: str) -> str | None:
        """A digest of something in `others`, where the format can find its bytes."""
        return self._fingerprint(name) if self._fingerprint is not None and name in self.others else None

    def check_other(self, name: str) -> Check:
        """Check the checksum of something in `others`, where the format has one."""
        return self._check_other(name) if self._check_other is not None and name in self.others else Check.UNKNOWN

    def container_checks(self) -> Mapping[str, Check]:
        """Checksums over everything that is no tensor, as the format found them."""
        return self._check_container() if self._check_container is not None else {}

    def close(self) -> None:
        """Make changes durable and let go of the file; twice is fine."""
        self._regions.clear()
        self._holder.close()

    def region(self, name: str) -> Region:
        """Where a tensor is, checked."""
        region = self._regions.get(name)
        if region is None:
            region = self._locate(name)
            region.check(name)
            self._regions[name] = region
        return region


def describe(
    placements: Iterable[tuple[Placement, DType]],
    roles: Mapping[str, Role] | None = None,
    read_only: Mapping[str, str] | None = None,
) -> dict[str, TensorInfo]:
    """The tensors at these places, each with those that lie in the same bytes; `read_only` names fixed ones."""
    placements = list(placements)
    neighbours = _neighbours([placement for placement, _ in placements])
    infos: dict[str, TensorInfo] = {}
    for placement, dtype in placements:
        name = placement.path
        role = (roles or {}).get(name) or role_of(name, is_float=dtype.is_float, rank=len(placement.shape))
        size, span = dtype.itemsize, dtype.itemsize
        for length in placement.shape:
            size *= length
            span *= length or 1
        if span >= 1 << 63:  # torch has no such tensor, not even an empty one
            raise ValueError(f"{name}: impossible shape {placement.shape!s:.80}")
        chain, place = neighbours.get(name, ((), None))
        fixed = read_only.get(name, "") if read_only else ""
        infos[name] = TensorInfo(name, placement.shape, dtype, role, size, chain, place, fixed)
    return infos


def _neighbours(placements: list[Placement]) -> dict[str, tuple[tuple[Neighbour, ...], Neighbour]]:
    """For each tensor whose bytes overlap another's: the whole chain of overlapping ones, one tuple for all."""
    stores: dict[Hashable, list[Neighbour]] = {}
    for place in placements:
        extent = byte_extent(place.shape, place.stride, place.itemsize)
        if extent:
            stores.setdefault(place.storage, []).append(Neighbour(place.path, place.offset, place.offset + extent))
    found: dict[str, tuple[tuple[Neighbour, ...], Neighbour]] = {}
    for members in stores.values():
        if len(members) == 1:
            continue
        members.sort(key=lambda member: member.start)
        chain, reach = [members[0]], members[0].stop
        for member in [*members[1:], Neighbour("", 1 << 62, 1 << 62)]:
            if member.start < reach:
                chain.append(member)
                reach = max(reach, member.stop)
                continue
            if len(chain) > 1:
                links = tuple(chain)
                found.update((link.name, (links, link)) for link in links)
            chain, reach = [member], member.stop
    return found
