"""Is a checkpoint sound? Its container's checksums, and values that no training makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike

from evergrad.errors import DamagedFile, FileAccessError
from evergrad.formats.contract import Bits, Checkpoint, Progress, choose
from evergrad.formats.outliers import Findings, Worst, examine
from evergrad.formats.registry import open_checkpoint
from evergrad.records import Check, Json
from evergrad.state import Where


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """What the checks say of one tensor.

    `checksum` is the container's, `unknown` where the format has none; `values` is what the values themselves say,
    `unknown` where they cannot be judged (integers, or too few). `reason` says in a line what is wrong, or why
    something was not judged.
    """

    name: str
    checksum: Check
    values: Check
    reason: str = ""
    nonfinite: int = 0
    outliers: int = 0
    worst: Worst | None = None
    doubt: str = ""
    """What the checksum, where there is one, does not vouch for; `checksum` is `unknown` then."""

    @property
    def verdict(self) -> Check:
        """The worse of the two; without a checksum no better than `unknown`."""
        return _worst_of(self.checksum, Check.OK if self.values is Check.UNKNOWN else self.values)

    @property
    def wrong(self) -> bool:
        """Whether a check found something."""
        return self.verdict in (Check.FAILED, Check.DEGRADED)

    def to_json(self) -> dict[str, Json]:
        """The row that `evergrad verify --json` prints."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "checksum": self.checksum.value,
            "values": self.values.value,
            "nonfinite": self.nonfinite,
            "outliers": self.outliers,
            "worst": self.worst.to_json() if self.worst is not None else None,
            "reason": self.reason,
            **({"doubt": self.doubt} if self.doubt else {}),
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """A checkpoint, tensor by tensor, and the parts of its container that are no tensors."""

    path: str
    format: str
    tensors: tuple[TensorVerdict, ...]
    container: Mapping[str, Check]
    others: Mapping[str, Check] = field(default_factory=dict)
    """Content that is listed and not read, by name: what its checksum says, `unknown` where it has none."""
    unverified: Mapping[str, str] = field(default_factory=dict)
    """The part of `others` of which nothing could be checked, by name, with what it is."""
    doubts: Mapping[str, str] = field(default_factory=dict)
    """Parts whose checksums do not tell that all is as it was saved, with the reason: `unknown` where they hold."""

    @property
    def nothing_checked(self) -> bool:
        """True if there was no tensor and nothing else to check, and the rest of the container is sound."""
        bad = any(check in (Check.FAILED, Check.DEGRADED) for check in self.container.values())
        return not self.tensors and not self.others and not bad

    @property
    def verdict(self) -> Check:
        """The worst of all: `failed`, `degraded`, `unknown` (nothing wrong, not all had a checksum), `ok`."""
        if self.nothing_checked:
            return Check.UNKNOWN
        checks = (*self.container.values(), *self.others.values(), *([Check.UNKNOWN] if self.doubts else []))
        return _worst_of(*(tensor.verdict for tensor in self.tensors), *checks)

    @property
    def wrong(self) -> tuple[TensorVerdict, ...]:
        """The tensors in which a check found something."""
        return tuple(tensor for tensor in self.tensors if tensor.wrong)

    def __getitem__(self, name: str) -> TensorVerdict:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def to_json(self) -> dict[str, Json]:
        """What `evergrad verify --json` prints."""
        return {
            "path": self.path,
            "format": self.format,
            "verdict": self.verdict.value,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "container": {part: check.value for part, check in self.container.items()},
            **({"others": {name: check.value for name, check in self.others.items()}} if self.others else {}),
            **({"unverified": dict(self.unverified)} if self.unverified else {}),
            **({"doubts": dict(self.doubts)} if self.doubts else {}),
        }


def verify(
    checkpoint: str | PathLike[str] | Checkpoint, *, where: Where = None, progress: Progress | None = None
) -> Verification:
    """Check a checkpoint: checksums where the container has them, NaN, infinities and outliers everywhere.

    Tensor after tensor the container's checksum is computed, then the values are looked at: where there is a
    checksum, the bytes are read twice, the second time from the page cache. Memory stays bounded whatever the
    tensors' size. `where` limits it to a selection. What is listed and not read (`ck.unread`, `ck.listed_only`) is
    checked by its checksum; where it has none, it is named in `unverified`. What the values cannot show, a flip of a
    low bit in a format without checksums, is not found: such tensors are `unknown`, never `ok`.

    >>> verify("model.safetensors").wrong                               # doctest: +SKIP
    """
    with ExitStack() as stack:
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else stack.enter_context(open_checkpoint(checkpoint))
        names, unread = choose(opened, where)
        unread |= {name: opened.listed_only[name] for name in names if name in opened.listed_only}
        names = [name for name in names if name not in unread]
        total = sum(opened.tensors[name].nbytes for name in names)
        done = 0
        rows: list[TensorVerdict] = []
        for name in names:
            told = _told(progress, done, total)
            rows.append(_verify(opened, name, told))
            done += opened.tensors[name].nbytes
            told(opened.tensors[name].nbytes)
        others = {name: _check_other(opened, name) for name in unread}
        return Verification(
            str(opened.path),
            opened.format,
            tuple(rows),
            dict(opened.container_checks()),
            others,
            {name: unread[name] for name, check in others.items() if check is Check.UNKNOWN},
            dict(opened.doubts),
        )


def _check_other(opened: Checkpoint, name: str) -> Check:
    try:
        return opened.check_other(name)
    except (DamagedFile, FileAccessError):
        return Check.FAILED


def _verify(opened: Checkpoint, name: str, told: Callable[[int], None]) -> TensorVerdict:
    info = opened.tensors[name]

    def read(start: int, stop: int) -> Bits:
        told(start * info.dtype.itemsize)
        return opened.read_bits(name, start, stop)

    try:
        # An empty tensor has no bytes that could be wrong.
        checksum = opened.checksum(name) if info.numel else Check.OK
        doubt = opened.doubt(name) if checksum is Check.UNKNOWN else ""
        found = examine(info, read)
    except (DamagedFile, FileAccessError) as error:
        # One that cannot be read must not hide the state of the others.
        return TensorVerdict(name, Check.FAILED, Check.UNKNOWN, f"cannot be read: {error}")
    return TensorVerdict(
        name, checksum, found.check, _reason(checksum, found), found.nonfinite, found.outliers, found.worst, doubt
    )


def _reason(checksum: Check, found: Findings) -> str:
    if checksum is not Check.FAILED:
        return found.reason
    wrong = found.reason if found.check in (Check.FAILED, Check.DEGRADED) else ""
    return "; ".join(filter(None, ["the checksum does not hold", wrong]))


def _told(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return (lambda within: None) if progress is None else (lambda within: progress(done + within, total))


def _worst_of(*checks: Check) -> Check:
    return next((check for check in (Check.FAILED, Check.DEGRADED, Check.UNKNOWN) if check in checks), Check.OK)
