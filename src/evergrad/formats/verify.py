"""Is a checkpoint sound? Its container's checksums, and values that no training makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError
from evergrad.formats.bitcast import values
from evergrad.formats.checkpoint import Bits, Checkpoint, ProgressCallback, block_ranges, resolve_selection
from evergrad.formats.registry import open_checkpoint
from evergrad.records import Check, Json, Role, TensorInfo
from evergrad.state import Where

# Values that no training makes, told from the exponents of a tensor alone.
#
# A flipped top exponent bit multiplies a small value by 2^(half the exponent range): 0.02 becomes 6.8e36 in float32,
# 1311 in float16. Looking for that costs one maximum over the bits of a tensor. Only where the largest value lies
# above a floor is the histogram of its exponents taken, and a value is an outlier
#
# - if it is *impossible*: NaN or infinite; or a counter that is negative, fractional or absurd;
# - if it *stands apart*: a few values at or above the floor, with a gap of empty exponents between them and all others
#   of the same tensor.
#
# A large value is no outlier where all are large: squared gradients (Adam's `exp_avg_sq`) and statistics of inputs in
# physical units reach any size. Only a value without another to compare it with is held against a fixed bound.
#
# Tails downwards are no sign of anything: moments of units that died, and weights under weight decay, shrink for
# ever. So zeros and small values never raise an alarm, and a flip that makes a value small is not found. The
# thresholds were fixed on the checkpoints of `benchmarks/verify`, which also says what they find and miss.

Reader: TypeAlias = Callable[[int, int], Bits]
"""Gives the bits of the elements from start to stop."""

_BLOCK_BYTES = 1 << 20  # stays in the processor's cache between the passes over it
_SURVEY_BYTES = 1 << 17  # the first of these is mostly all that is counted
_FAR = 64  # float32 cannot square 2^64: values that stand apart there have failed, others are degraded
_FAR_SQUARED = 96  # the same for a lone number of an optimizer, which may be a squared gradient
_FEW = 64  # outliers are at most one in so many, unless they are 2^_FAR above the majority
_ENOUGH = 8  # other values that are not zero, to be apart from; fewer will do for a distance of 2^_FAR
_LONG_MANTISSA = 16  # float32 and float64: one value in 2^23 and more is a power of two by chance
_SMALL = 1  # beside an exact 2.0, all others are below 2^-_SMALL
_COUNTERS = frozenset({"step", "num_batches_tracked", "iter", "iterations"})
_COUNTER_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class Worst:
    """The value that looks worst: where it is, and what."""

    index: tuple[int, ...]
    value: float | int | complex

    def to_json(self) -> dict[str, Json]:
        """Index and value; a complex one as text, which JSON lacks."""
        value = str(self.value) if isinstance(self.value, complex) else self.value
        return {"index": list(self.index), "value": value}


@dataclass(frozen=True, slots=True)
class Findings:
    """What a tensor's values say: `unknown` where they could not be judged."""

    check: Check
    reason: str = ""
    nonfinite: int = 0
    outliers: int = 0
    worst: Worst | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    """How the bits of a float type map to powers of two; thresholds as exponents."""

    mantissa: int
    bias: int
    magnitude: int  # the bits of a value without its sign
    nonfinite: int  # the first magnitude that is no number
    floor: int  # outliers are at least 2^floor
    gap: int  # and that many exponents above all others


@dataclass(slots=True)
class _Survey:
    """The exponents of a whole tensor."""

    counts: npt.NDArray[np.int64]
    zeros: int = 0
    nonfinite: int = 0
    nans: int = 0
    infinities: set[int] = field(default_factory=set)
    first_nonfinite: int = -1
    peak: int = -1
    peak_at: int = -1


def examine(info: TensorInfo, read: Reader) -> Findings:
    """Judge a tensor by its values alone; reads it once, and again only if a value is conspicuous."""
    if info.numel == 0:
        return Findings(Check.OK)
    if _is_counter(info):
        return _counter(info, read)
    if not info.dtype.is_float:
        return Findings(Check.UNKNOWN, "integers are not judged")
    scale = _scale(info.dtype)
    few = Findings(Check.UNKNOWN, "too few values to stand apart from") if info.numel <= _ENOUGH else Findings(Check.OK)
    peak = max(_peak(read(start, stop), scale) for start, stop in block_ranges(info, _BLOCK_BYTES))
    two = scale.bias + 1 << scale.mantissa
    if peak < scale.floor + scale.bias << scale.mantissa and peak != two:
        return few
    survey = _survey(info, read, scale, peak)
    if survey is None:
        return few
    if survey.nonfinite:
        return _not_numbers(info, read, survey, scale)
    return _apart(info, read, survey, scale) or few


def _is_counter(info: TensorInfo) -> bool:
    """Elsewhere than in optimizers and buffers, a `step` may be anything: a quantizer's, or −1 for none yet."""
    last = info.name.rpartition("/")[2].rpartition(".")[2]
    return info.numel * info.dtype.parts == 1 and last in _COUNTERS and info.role in (Role.OPTIMIZER, Role.BUFFER)


def _counter(info: TensorInfo, read: Reader) -> Findings:
    value = values(read(0, 1), info.dtype)[0].item()
    if isinstance(value, int | float) and 0 <= value < _COUNTER_LIMIT and value == int(value):
        return Findings(Check.OK)
    worst = Worst(tuple(0 for _ in info.shape), value)
    nonfinite = int(isinstance(value, float) and not np.isfinite(value))
    reason = f"{_show(worst)}: a counter has to be a whole number from 0 to 2^40"
    return Findings(Check.FAILED, reason, nonfinite, 1 - nonfinite, worst)


def _not_numbers(info: TensorInfo, read: Reader, survey: _Survey, scale: _Scale) -> Findings:
    """NaN or infinities, unless they are there on purpose."""
    if not survey.nans and len(survey.infinities) == 1:
        if survey.nonfinite > 1 and survey.nonfinite + survey.zeros == info.numel * info.dtype.parts:
            return Findings(Check.OK, "a mask of zeros and infinities", survey.nonfinite)
        if _is_fresh_range(info, survey, scale):
            return Findings(Check.OK, "a range of a quantisation observer that has seen no value", survey.nonfinite)
        # Early stopping begins with an infinite best score.
        if info.role is Role.OTHER and info.numel == 1:
            return Findings(Check.OK, "an infinity outside of model and optimizer", survey.nonfinite)
    worst = _worst(info, read, survey.first_nonfinite)
    more = f", and {survey.nonfinite - 1:,} more" if survey.nonfinite > 1 else ""
    reason = f"{_show(worst)}: not a number that training can use{more}"
    return Findings(Check.FAILED, reason, survey.nonfinite, 0, worst)


def _is_fresh_range(info: TensorInfo, survey: _Survey, scale: _Scale) -> bool:
    """True for an observer of `torch.ao.quantization` before its first value: from +infinity down to -infinity."""
    last = info.name.rpartition("/")[2].rpartition(".")[2]
    if last not in ("min_val", "max_val") or info.role not in (Role.MODEL, Role.BUFFER):
        return False
    (code,) = survey.infinities
    negative = code > scale.magnitude
    return survey.nonfinite == info.numel * info.dtype.parts and negative == (last == "max_val")


def _apart(info: TensorInfo, read: Reader, survey: _Survey, scale: _Scale) -> Findings | None:
    """Impossible values, or a few that stand apart; None if there are none."""
    counts = survey.counts.copy()
    counts[0] -= survey.zeros
    occupied = np.flatnonzero(counts)
    if len(occupied) == 1 and 1 < counts[occupied[0]] < counts[occupied[0]] + survey.zeros:
        return None  # zeros and one repeated size, however large: a mask
    top = int(occupied[-1])
    cut = _cut(counts, occupied, scale)
    lone = int(counts.sum()) == 1 and top - scale.bias >= (_FAR_SQUARED if info.role is Role.OPTIMIZER else _FAR)
    if not cut and not lone and not _lone_bit(info, survey, scale, int(counts.sum())):
        return None
    worst = _worst(info, read, survey.peak_at)
    outliers = int(counts[cut:].sum())
    if cut:
        below = int(occupied[occupied < cut][-1])
        rest = f"2^{top - below} beyond all others (up to 2^{below - scale.bias + 1})"
    elif len(occupied) > 1:
        outliers = 1
        rest = (
            f"exactly what a flipped bit makes of a 0, and all others are below 2^{int(occupied[-2]) - scale.bias + 1}"
        )
    elif survey.zeros:
        rest = "all others are 0"
    else:
        rest = f"beyond 2^{_FAR}, and there is no other value to compare it with"
    more = f", and {outliers - 1:,} more" if outliers > 1 else ""
    check = Check.FAILED if top - scale.bias >= _FAR else Check.DEGRADED
    return Findings(check, f"{_show(worst)}: {rest}{more}", 0, outliers, worst)


def _cut(counts: npt.NDArray[np.int64], occupied: npt.NDArray[np.int64], scale: _Scale) -> int:
    """The lowest exponent field from which on values stand apart from those below; 0 if none do."""
    cut = 0
    for place in range(len(occupied) - 1, 0, -1):
        high, low = int(occupied[place]), int(occupied[place - 1])
        if high - scale.bias < scale.floor:
            break
        apart, others = int(counts[high:].sum()), int(counts[: low + 1].sum())
        if apart > others:
            break
        if high - low > _distance(counts[: low + 1], apart, others, high - scale.bias >= _FAR, scale):
            cut = high
    return cut


def _distance(below: npt.NDArray[np.int64], apart: int, others: int, far: bool, scale: _Scale) -> int:
    """The number of exponents by which outliers lie above all other values."""
    if others < _ENOUGH or apart > max(1, others // _FEW):
        # Too few others, or too many that lie apart: only the distance of a flipped top bit will do.
        return _FAR if far else len(below) + scale.magnitude
    if far:
        return scale.gap
    # How far the others reach above their own middle: values with long tails need a wider gap.
    middle = int(np.searchsorted(np.cumsum(below), (others + 1) // 2))
    return max(scale.gap, len(below) - 1 - middle + scale.gap // 2)


def _lone_bit(info: TensorInfo, survey: _Survey, scale: _Scale, count: int) -> bool:
    """True if one value is exactly 2.0, which the top exponent bit makes of a zero, and all others are 0 or small.

    Training does not end on exactly 2.0; people write it. So small tensors, those without another zero and types
    with a short mantissa are left alone unless all else is zero.
    """
    if survey.peak != scale.bias + 1 << scale.mantissa or info.numel < _FEW or info.role is Role.OTHER:
        return False
    fields = survey.counts[scale.bias - _SMALL :]
    trained = scale.mantissa >= _LONG_MANTISSA and survey.zeros > 0 and count > _ENOUGH
    return count == 1 or (trained and int(fields.sum()) == 1)


def _peak(bits: Bits, scale: _Scale) -> int:
    """The largest magnitude of a block, as bits; two maxima and no copy."""
    if scale.nonfinite > scale.magnitude and (bits == 0x80).any():  # the fnuz types' NaN is the negative zero
        return scale.nonfinite
    unsigned = int(bits.max())
    signed = int(bits.view(f"i{bits.itemsize}").max()) if unsigned > scale.magnitude else 0
    return max(unsigned & scale.magnitude, signed)


def _survey(info: TensorInfo, read: Reader, scale: _Scale, peak: int) -> _Survey | None:
    """Count the exponents; None as soon as it is clear that nothing stands apart, which is nearly always at once."""
    possible = peak < scale.nonfinite
    survey = _Survey(np.zeros((scale.magnitude >> scale.mantissa) + 2, np.int64))
    parts = info.dtype.parts
    for start, stop in block_ranges(info, _SURVEY_BYTES):
        bits = read(start, stop).reshape(-1)
        magnitudes = bits & bits.dtype.type(scale.magnitude)
        if scale.nonfinite > scale.magnitude:
            magnitudes[bits == 0x80] = 0x80
        wrong = magnitudes >= scale.nonfinite
        if wrong.any():
            places = np.flatnonzero(wrong)
            odd = bits[places]
            survey.nonfinite += len(places)
            if survey.first_nonfinite < 0:
                survey.first_nonfinite = start + int(places[0]) // parts
            infinite = (odd & scale.magnitude == scale.nonfinite) & _has_infinities(info.dtype)
            survey.nans += int(np.count_nonzero(~infinite))
            survey.infinities |= {int(code) for code in np.unique(odd[infinite])}
            magnitudes[places] = 0
        survey.zeros += int(len(magnitudes) - np.count_nonzero(magnitudes)) - int(np.count_nonzero(wrong))
        fields = (magnitudes >> bits.dtype.type(scale.mantissa)).astype(np.int64)
        survey.counts += np.bincount(fields, minlength=len(survey.counts))
        highest = int(magnitudes.argmax())
        if int(magnitudes[highest]) > survey.peak:
            survey.peak, survey.peak_at = int(magnitudes[highest]), start + highest // parts
        if possible and _joined(survey, peak >> scale.mantissa, scale):
            return None
    survey.counts[0] -= survey.nonfinite  # counted as zeros above
    return survey


def _joined(survey: _Survey, peak: int, scale: _Scale) -> bool:
    """Whether the values seen so far lead from below the floor up to the peak without a gap; more cannot open one."""
    occupied = np.flatnonzero(survey.counts)
    if occupied[0] == 0 and survey.counts[0] == survey.zeros:
        occupied = occupied[1:]
    floor = scale.floor + scale.bias
    if peak < floor:  # an exact 2.0: no outlier as soon as there is another value of about its size
        return int(survey.counts[scale.bias - _SMALL :].sum()) > 1
    if int(survey.counts.sum()) - survey.zeros < 2 or occupied[0] >= floor:
        return False
    steps = np.diff(occupied, append=peak)
    return not np.any(steps[np.append(occupied[1:], peak) >= floor] > scale.gap)


def _worst(info: TensorInfo, read: Reader, place: int) -> Worst:
    found = values(read(place, place + 1), info.dtype)[0]
    value = complex(found[0], found[1]) if info.dtype.parts == 2 else found.item()
    return Worst(tuple(int(i) for i in np.unravel_index(place, info.shape)), value)


def _show(worst: Worst) -> str:
    """`[0,0] = -2.6e+38`: an element and its value, as the reasons begin."""
    index = f"[{','.join(map(str, worst.index))}] " if worst.index else ""
    return f"{index}= {worst.value:.3g}" if not isinstance(worst.value, int) else f"{index}= {worst.value}"


def _has_infinities(dtype: DType) -> bool:
    return not dtype.value.startswith("float8") or dtype is DType.FLOAT8_E5M2


@lru_cache
def _scale(dtype: DType) -> _Scale:
    layout = dtype.layout
    width, mantissa = layout.exponent_bits, layout.mantissa_bits
    magnitude = (1 << width + mantissa) - 1
    bias = (1 << width - 1) - 1
    nonfinite = (1 << width) - 1 << mantissa
    if dtype.value.endswith("fnuz"):
        bias, nonfinite = bias + 1, magnitude + 1
    elif dtype is DType.FLOAT8_E4M3FN:
        nonfinite = magnitude
    # Where exponents have eight bits or more, a flip leaves everything else far behind: 2^16 and 2^24 are generous to
    # buffers of any scale. With four or five bits nothing is far; what stands out is all that can be asked.
    floor, gap = (16, 24) if width >= 8 else (1, 5)
    return _Scale(mantissa, bias, magnitude, nonfinite, floor, gap)


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
    checkpoint: str | PathLike[str] | Checkpoint, *, where: Where = None, progress: ProgressCallback | None = None
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
        names, unread = resolve_selection(opened, where)
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


def _told(progress: ProgressCallback | None, done: int, total: int) -> Callable[[int], None]:
    return (lambda within: None) if progress is None else (lambda within: progress(done + within, total))


def _worst_of(*checks: Check) -> Check:
    return next((check for check in (Check.FAILED, Check.DEGRADED, Check.UNKNOWN) if check in checks), Check.OK)
