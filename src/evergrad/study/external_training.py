"""A training that is a user's program: it resumes from a checkpoint file and prints what it measures.

The golden run and the trials of such a study run here: the command line with its placeholders, metrics and losses out
of what the program prints, and its checkpoint, which is checked for numbers that are not finite or extreme.
`external_process.py` runs the program; `reaper.py` stays beside it and ends everything that it started.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash

from evergrad._files import file_errors
from evergrad._forkserver import describe_exit
from evergrad.errors import EvergradError, UsageError
from evergrad.formats import open_checkpoint
from evergrad.formats.bitcast import values
from evergrad.formats.checkpoint import Bits, block_ranges
from evergrad.injection import InjectionLog, inject
from evergrad.injection.faults import fault_of
from evergrad.injection.sampling import population
from evergrad.records import TensorInfo
from evergrad.study.external_process import ProgramExit, run_program
from evergrad.study.target_selection import select_targets
from evergrad.study.trials import Command, Observation, Rules, Series, Trial, TrialEnd
from evergrad.training.settings import PATTERN
from evergrad.wording import did_you_mean, short_repr

__all__ = ["check_command", "check_golden", "make_golden", "run_trial"]

# Numbers out of what a program prints: JSON lines by key, any other lines by a pattern.
#
# A number is a number: `true`, `"0.9"`, `1_000` and `null` are none. NaN and infinities are, as Python's `json`
# writes them, as texts (`"nan"`, `"-Infinity"`), or as a pattern finds them.

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_MOST = 200


class NumberExtractor:
    """Where a number is in a line: under a key, or where a pattern's first group is.

    >>> NumberExtractor("metric", r"pattern:acc (\\S+)").extract("epoch 2: acc 0.91", None)
    0.91
    """

    def __init__(self, name: str, setting: str) -> None:
        """`name` is the setting's own, for errors; an empty one is never found."""
        self._key, self._pattern = setting, None
        if setting.startswith(PATTERN):
            text = setting.removeprefix(PATTERN)
            try:
                self._pattern = re.compile(text)
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(f"{name}: {short_repr(text)} is not a regular expression: {error}") from None
            if not self._pattern.groups:
                raise UsageError(
                    f"{name}: expected a regular expression whose first group is the number, such as "
                    f"'pattern:accuracy (\\S+)', found no group in {short_repr(text)}"
                )

    def __str__(self) -> str:
        return f"pattern {short_repr(self._pattern.pattern)}" if self._pattern else f"key {short_repr(self._key)}"

    def extract(self, line: str, record: dict[str, Any] | None) -> float | None:
        """The number that is in a line, or in the object that the line is; None if there is none."""
        if self._pattern is not None:
            found = self._pattern.search(line)
            return None if found is None else _number(found[1])
        value = None if record is None else record.get(self._key)
        if isinstance(value, str):
            return float(value) if _NO_NUMBER.fullmatch(value.strip()) else None
        if type(value) not in (int, float):
            return None
        assert value is not None
        try:
            return float(value)
        except OverflowError:  # 400 digits, without a point
            return math.inf if value > 0 else -math.inf


class ThinnedNumbers:
    """The numbers of one kind in order: all, or evenly thinned to a few hundred once there are many."""

    def __init__(self) -> None:
        self.count, self._every, self._last = 0, 1, 0.0
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """One more."""
        if self.count % self._every == 0:
            self._values.append(value)
            if len(self._values) > _MOST:
                self._values, self._every = self._values[::2], self._every * 2
        self.count, self._last = self.count + 1, value

    def series(self) -> Series:
        """Every so-manyth."""
        return Series(self._every, tuple(self._values))

    def with_last(self) -> tuple[float, ...]:
        """The same, and always the last one."""
        left_out = self.count and (self.count - 1) % self._every
        return (*self._values, self._last) if left_out else tuple(self._values)


class ProgramReadings:
    """What has been read so far from a program's lines.

    A step is a loss that was printed; as long as there is none, a metric.
    """

    def __init__(self, metric: str, loss: str, rules: Rules) -> None:
        self.metrics, self.losses = ThinnedNumbers(), ThinnedNumbers()
        self.nonfinite: tuple[int | None, str] = (None, "")
        self.extreme: tuple[int | None, str] = (None, "")
        self.reason = ""
        """The rule by which enough has been seen."""
        self._metric, self._loss, self._rules = NumberExtractor("metric", metric), NumberExtractor("loss", loss), rules

    @property
    def steps(self) -> int:
        """How many there were."""
        return self.losses.count or self.metrics.count

    def read_line(self, line: str) -> bool:
        """Read one line; whether a rule says that this is enough."""
        record = _record(line)
        for source, kept, where in ((self._loss, self.losses, "loss"), (self._metric, self.metrics, "metric")):
            value = source.extract(line, record)
            if value is not None:
                kept.add(value)
                if not math.isfinite(value):
                    self.note_abnormal("non-finite", where, self.steps)
                elif abs(value) > self._rules.extreme:
                    self.note_abnormal("extreme", where, self.steps)
        return bool(self.reason)

    def note_abnormal(self, kind: str, where: str, step: int) -> None:
        """That something `non-finite` or `extreme` was seen; the first counts."""
        if kind == "non-finite" and self.nonfinite[0] is None:
            self.nonfinite = (step, where)
        elif kind == "extreme" and self.extreme[0] is None:
            self.extreme = (step, where)
        if kind in self._rules.abandon and not self.reason:
            self.reason = f"{kind} {where} after step {step}"


def _record(line: str) -> dict[str, Any] | None:
    """The object that a line is, if it is one."""
    text = line.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(text: str | None) -> float | None:
    stripped = (text or "").strip()
    known = _NUMBER.fullmatch(stripped) or _NO_NUMBER.fullmatch(stripped)
    return float(stripped) if known else None


# A command as a plan says it, checked, and with its places filled in.
#
# No shell reads it: words are split as a shell would, and a place stays one word whatever its path holds. What
# follows a place as a suffix belongs to the file's name: with `{checkpoint}.npz`, the file is called so, once.

SEED = 0
"""`{seed}`: the same in every run, so that the fault is all in which a trial differs from the golden run."""

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}((?:\.\w+)*)")
_PLACEHOLDERS = {"command": ("checkpoint", "output", "seed", "python"), "prepare": ("checkpoint", "seed", "python")}


def check_command(command: Command) -> None:
    """Refuse what cannot work, before anything runs; `UsageError` names the setting and what it may be."""
    for name in ("command", "checkpoint", "prepare", "metric", "loss", "folder"):
        if not isinstance(getattr(command, name), str):
            raise UsageError(f"{name}: expected a text, found {short_repr(getattr(command, name))}")
    if type(command.timeout_s) not in (int, float) or not 0 <= command.timeout_s < math.inf:
        raise UsageError(f"timeout_s: expected seconds, 0 or more, found {short_repr(command.timeout_s)}")
    chance = command.chance
    if chance is not None and (type(chance) not in (int, float) or not math.isfinite(chance)):
        raise UsageError(f"chance: expected the metric of one who guesses, a number, found {short_repr(chance)}")
    if not command.metric:
        raise UsageError("metric: expected a key of JSON lines, or 'pattern:' and a regular expression, found nothing")
    NumberExtractor("metric", command.metric)
    NumberExtractor("loss", command.loss)
    if not Path(command.base, command.folder).is_dir():
        raise UsageError(f"folder: expected a folder that exists, found {short_repr(command.folder)}")
    if bool(command.checkpoint) == bool(command.prepare):
        found = "both" if command.checkpoint else "neither"
        raise UsageError(
            "checkpoint: expected either this, a checkpoint that exists, or prepare, a command that writes one to "
            f"{{checkpoint}}, found {found}"
        )
    for setting in ("command", "prepare") if command.prepare else ("command",):
        _check_program(setting, command_words(command, setting), Path(command.base, command.folder))
    if command.checkpoint:
        try:
            open_checkpoint(clean_checkpoint(command)).close()
        except EvergradError as error:
            raise UsageError(f"checkpoint: {error}") from None


def clean_checkpoint(command: Command) -> Path:
    """The checkpoint that exists; a relative path begins where the command is started."""
    return Path(command.base, command.folder) / Path(command.checkpoint).expanduser()


def command_words(command: Command, setting: str) -> list[str]:
    """The words of `command` or `prepare`, with places still open."""
    text: str = getattr(command, setting)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{setting}: {str(error).lower()} in {short_repr(text)}") from None
    allowed = _PLACEHOLDERS[setting]
    for name, _ in (place for word in words for place in _PLACEHOLDER.findall(word)):
        if name not in allowed:
            known = ", ".join(f"{{{one}}}" for one in allowed)
            raise UsageError(
                f"{setting}: expected places out of {known}, found {{{name}}}.{did_you_mean(name, allowed)}"
            )
    if not has_placeholder(words, "checkpoint"):
        what = "goes on from" if setting == "command" else "writes the clean checkpoint to"
        raise UsageError(f"{setting}: expected the place {{checkpoint}}, which it {what}, found {short_repr(text)}")
    return words


def has_placeholder(words: Sequence[str], name: str) -> bool:
    """Whether there is such a place."""
    return any(f"{{{name}}}" in word for word in words)


def placeholder_suffix(words: Sequence[str], name: str) -> str:
    """The suffix that follows a place."""
    return next((tail for word in words for found, tail in _PLACEHOLDER.findall(word) if found == name and tail), "")


def fill_placeholders(words: Sequence[str], places: Mapping[str, Path]) -> list[str]:
    """The words to run: paths in their places, and the Python that runs this one for `python`."""
    values = {name: str(path) for name, path in places.items()} | {"seed": str(SEED), "python": sys.executable}

    def fill(place: re.Match[str]) -> str:
        value, tail = values[place[1]], place[2]
        return value if value.endswith(tail) else value + tail

    first = sys.executable if words[0] == "python" else words[0]
    return [_PLACEHOLDER.sub(fill, word) for word in (first, *words[1:])]


def _check_program(setting: str, words: Sequence[str], folder: Path) -> None:
    program = words[0]
    if program in ("python", "{python}"):
        script = folder / words[1]  # there is one: a place for the checkpoint at least
        if script.suffix == ".py" and not _PLACEHOLDER.search(words[1]) and not script.is_file():
            raise UsageError(f"{setting}: there is no {short_repr(words[1])} in folder {short_repr(str(folder))}")
        return
    found = (
        os.path.isfile(folder / program) and os.access(folder / program, os.X_OK)
        if os.sep in program
        else shutil.which(program) is not None
    )
    if not found:
        where = f"in folder {short_repr(str(folder))}" if os.sep in program else "on PATH"
        raise UsageError(f"{setting}: expected a program that can be run, found no {short_repr(program)} {where}")


# A training's state as files: copied, and looked through for numbers that no training should end with.

_SUFFIX = re.compile(r"(?:\.[A-Za-z]\w*)+$")


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file's tensors hold: a digest of all, and where numbers are odd."""

    digest: str
    nonfinite: Mapping[str, int]
    """Tensor → how many NaN and infinities, where there are some."""
    extreme: Mapping[str, int]

    def new_abnormal_values(self, before: FileState) -> tuple[bool, bool]:
        """Whether a tensor has more numbers that are none, and more extreme ones, than in another state.

        Masks hold infinities, and a best loss begins as one: only what came with the fault counts.
        """
        nonfinite = any(count > before.nonfinite.get(name, 0) for name, count in self.nonfinite.items())
        return nonfinite, any(count > before.extreme.get(name, 0) for name, count in self.extreme.items())


def suffix_of(path: Path) -> str:
    """What a file's name ends with: libraries go by it.

    >>> suffix_of(Path("run-0.5.weights.h5"))
    '.weights.h5'
    """
    found = _SUFFIX.search(path.name)
    return found[0] if found else ""


def copy_state(path: Path, folder: Path, stem: str) -> Path:
    """Copy a checkpoint into a folder under another name; one of several files keeps theirs, which name each other."""
    with open_checkpoint(path) as ck:
        files = list(dict.fromkeys(file for file in ck.files() if file.is_file()))
    with file_errors(folder, "cannot be written"):
        if path.is_dir():
            return Path(shutil.copytree(path, folder / f"{stem}{suffix_of(path)}"))
        if path.is_file() and len(files) == 1:
            return Path(shutil.copyfile(path, folder / f"{stem}{suffix_of(path)}"))
        for file in files:
            name = os.path.relpath(file, path.parent)
            if name.startswith(os.pardir):
                raise UsageError(f"{path}: {name} lies outside of its folder. Name the folder that holds both.")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
        return folder / path.name


def read_state(path: Path, extreme: float) -> FileState:
    """Look through every number of a file, a block at a time."""
    digest = xxhash.xxh3_128()
    nonfinite: dict[str, int] = {}
    beyond: dict[str, int] = {}
    with open_checkpoint(path) as ck:
        for name, info in ck.tensors.items():
            digest.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode("utf-8", "surrogateescape"))
            for start, stop in block_ranges(info):
                bits = ck.read_bits(name, start, stop)
                digest.update(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
                none, far = _odd(bits, info, extreme)
                nonfinite[name] = nonfinite.get(name, 0) + none
                beyond[name] = beyond.get(name, 0) + far
    return FileState(digest.hexdigest(), _some(nonfinite), _some(beyond))


def read_state_once(path: Path, extreme: float) -> FileState:
    """The same of a file that stays as it is: read once."""
    with file_errors(path):
        there = os.stat(path if path.exists() else path.parent)
    return _known(path, extreme, (there.st_ino, there.st_mtime_ns))


def new_abnormal_values(log: InjectionLog, extreme: float) -> tuple[bool, bool]:
    """Whether faults made numbers that are none, and extreme ones, out of sound ones."""
    nonfinite = far = False
    for column in log.columns:
        if column.dtype.is_float:
            ends = column.net_changes()
            with np.errstate(invalid="ignore"):  # a flip may well make a signalling NaN
                old, new = (np.abs(values(bits, ends.dtype).astype(np.float64)) for bits in (ends.old, ends.new))
                nonfinite |= bool(np.any(np.isfinite(old) & ~np.isfinite(new)))
                far |= bool(np.any((old <= extreme) & (new > extreme) & np.isfinite(new)))
    return nonfinite, far


@lru_cache(maxsize=8)
def _known(path: Path, extreme: float, version: tuple[int, int]) -> FileState:
    return read_state(path, extreme)


def _odd(bits: Bits, info: TensorInfo, extreme: float) -> tuple[int, int]:
    """How many numbers are none, and how many are finite and too large."""
    if not info.dtype.is_float:
        return 0, 0
    numbers = values(bits, info.dtype).reshape(-1)
    finite = np.isfinite(numbers)
    none = numbers.size - int(np.count_nonzero(finite))
    sizes = np.abs(numbers[finite] if none else numbers)
    if float(sizes.max(initial=0)) <= extreme:
        return none, 0
    return none, int(np.count_nonzero(sizes.astype(np.float64) > extreme))


def _some(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


# Any training at all: a program that goes on from a checkpoint file, with a fault in that file.
#
#     command = "python train.py --resume {checkpoint} --epochs 2 --save {output}"
#     prepare = "python train.py --epochs 1 --save {checkpoint}"
#
# The program prints what it measures, as JSON lines or in any way that a pattern finds. Nothing is evaluated at the
# restart unless the program does so: its first metric counts as the first. The plan states the metric's `direction`,
# or its name does: a loss is better lower. The program has to be deterministic: the golden run is made twice, and a
# program that does not repeat it is refused. It should write to `{output}` alone: trials run side by side, in the
# same folder, and would meet in any other file. `{seed}` is the same in every run; EVERGRAD_TRIAL_SEED, which
# differs, only says which trial this is.

_CHECKPOINT = "checkpoint"
_FINAL = "final"
_MORE_TIME = 10
_MORE_SECONDS = 60.0
# Beside what the golden run itself does, nothing is extreme.
_GOLDEN_RULES = Rules(extreme=math.inf, abandon=("non-finite",))


def make_golden(command: Command, folder: Path) -> tuple[Observation, Path]:
    """The clean checkpoint, in this empty folder, and what the program does with it; `UsageError` if it will not do.

    The final state of the run, if the program writes one, stays in the folder too, to judge the trials' by.
    """
    check_command(command)
    folder = folder.resolve()
    checkpoint = _prepared(command, folder) if command.prepare else _copied(command, folder)
    with open_checkpoint(checkpoint) as ck:
        if not ck.tensors:
            setting = "prepare" if command.prepare else "checkpoint"
            raise UsageError(f"{setting}: expected a checkpoint with tensors, found none in this one ({ck.format})")
    (folder / _FINAL).mkdir()
    seen = _golden_run(command, checkpoint, folder, folder / _FINAL, seed=0)
    with TemporaryDirectory(prefix="again-", dir=folder) as place:
        # Another number, so that a program that takes its seed from there is found out.
        again = _golden_run(command, checkpoint, folder, Path(place), seed=1, limit_s=_limit(command, seen))
    _check_repeated(command, seen, again)
    return seen, checkpoint


def check_golden(command: Command, checkpoint: Path, golden: Observation) -> None:
    """Run the program without a fault once more; `UsageError` if it is not the one that the golden run is of."""
    check_command(command)
    with TemporaryDirectory(prefix="again-", dir=checkpoint.parent) as place:
        again = _golden_run(
            command, checkpoint, checkpoint.parent, Path(place), seed=1, limit_s=_limit(command, golden)
        )
    try:
        _check_repeated(command, golden, again)
    except UsageError as error:
        raise UsageError(f"{error} If the program has changed since, choose another folder.") from None


def run_trial(command: Command, checkpoint: Path, golden: Observation, trial: Trial, scratch: Path) -> Observation:
    """Put the trial's faults into a copy of the checkpoint, let the program go on from it, and say what was seen.

    `checkpoint` is where `make_golden` put it. What is written goes below `scratch`, and is gone afterwards.
    """
    largest = max(map(abs, (*golden.metrics, *golden.losses.values)), default=0.0)
    if largest > trial.rules.extreme:
        raise UsageError(
            f"extreme: expected more than the golden run's own numbers, which reach {largest:g}, "
            f"found {trial.rules.extreme:g}"
        )
    fault = fault_of(trial.fault)
    with TemporaryDirectory(prefix="trial-", dir=scratch, ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        with open_checkpoint(checkpoint) as ck:
            names = select_targets(ck.tensors, trial.where, trial.layer)
            places = population(ck, fault, names).bits
        out = place / f"{_CHECKPOINT}{suffix_of(checkpoint)}"
        log = inject(checkpoint, fault, count=trial.flips, where=names, seed=trial.seed, out=out)
        if out.is_dir() and not checkpoint.is_dir():  # several files, named by one of them
            out /= checkpoint.name
        readings = ProgramReadings(command.metric, command.loss, trial.rules)
        _judge_state(readings, new_abnormal_values(log, trial.rules.extreme), step=0)
        if readings.reason:
            run = _Run(ProgramExit(0.0, stopped_early=True), readings)
        else:
            run = _run(command, out, place, readings, trial.seed, _limit(command, golden))
        digest, reason = "", run.reason
        if run.end is TrialEnd.FINISHED and run.output is not None:
            before = _golden_final(command, checkpoint, trial.rules.extreme)
            try:
                state = read_state(run.output, trial.rules.extreme)
                _judge_state(readings, state.new_abnormal_values(before), step=readings.steps)
                digest = state.digest
            except EvergradError as error:  # the program's doing: whether it finished is told by its metric
                reason = f"its final state cannot be read: {error}"[:300]
    return _observation(run, reason, digest, log.injected, log.changed, places)


@dataclass(frozen=True, slots=True)
class _Run:
    """A program's run, and what was read of it."""

    ending: ProgramExit
    readings: ProgramReadings
    output: Path | None = None

    @property
    def end(self) -> TrialEnd:
        if self.ending.stopped_early:
            return TrialEnd.ABANDONED
        if self.ending.timed_out:
            return TrialEnd.OVERTIME
        if self.ending.start_error:
            return TrialEnd.LOST  # the golden run could be started: this is not the fault's doing
        return TrialEnd.CRASHED if self.ending.code else TrialEnd.FINISHED

    @property
    def reason(self) -> str:
        """One line."""
        if self.end is TrialEnd.ABANDONED:
            return self.readings.reason
        if self.end is TrialEnd.OVERTIME:
            return f"ended after {self.ending.seconds:.0f} s"
        if self.end is TrialEnd.CRASHED:
            return f"{describe_exit(self.ending.code or 0)}: {_last_lines(self.ending, 1)}"[:300]
        return self.ending.start_error or ("" if self.readings.metrics.count else "it printed no metric")


def _run(
    command: Command, checkpoint: Path, place: Path, readings: ProgramReadings, seed: int, limit_s: float | None
) -> _Run:
    """Let the program go on from this file; what it writes goes to a file in `place`."""
    words = command_words(command, "command")
    places, output = {"checkpoint": checkpoint}, None
    if has_placeholder(words, "output"):
        output = places["output"] = place / _output_name(command, checkpoint)
    ending = run_program(
        fill_placeholders(words, places),
        readings.read_line,
        folder=Path(command.base, command.folder).resolve(),
        environment=_environment(seed),
        limit_s=limit_s,
    )
    return _Run(ending, readings, output)


def _golden_run(
    command: Command, checkpoint: Path, folder: Path, place: Path, seed: int, limit_s: float | None = None
) -> Observation:
    with TemporaryDirectory(prefix="golden-", dir=folder, ignore_cleanup_errors=True) as copies:
        # A program that saves where it has read from must not alter what all trials begin with.
        copy = copy_state(checkpoint, Path(copies), _CHECKPOINT)
        readings = ProgramReadings(command.metric, command.loss, _GOLDEN_RULES)
        run = _run(command, copy, place, readings, seed, limit_s or command.timeout_s or None)
    if run.end is not TrialEnd.FINISHED:
        raise UsageError(f"command: the golden run, without any fault, did not finish: {_failure(run)}")
    if not readings.metrics.count:
        said = f" Its last error line: {_last_lines(run.ending, 1)}" if run.ending.stderr_lines else ""
        raise UsageError(
            f"metric: expected a number on stdout by the {NumberExtractor('metric', command.metric)}, found none in "
            "the golden "
            f"run.{said}"
        )
    digest = ""
    if run.output is not None:
        try:
            digest = read_state(run.output, math.inf).digest
        except EvergradError as error:
            raise UsageError(f"command: the golden run left no state in {{output}}: {error}") from None
    return _observation(run, "", digest)


def _check_repeated(command: Command, first: Observation, second: Observation) -> None:
    """Refuse a program whose results change by themselves: what a fault changes could not be told from that."""
    metric, loss = NumberExtractor("metric", command.metric), NumberExtractor("loss", command.loss)
    differing = ""
    for name, one, other in (
        (metric, first.metrics, second.metrics),
        (loss, first.losses.values, second.losses.values),
    ):
        if len(one) != len(other):
            differing = f"numbers by the {name}: {len(one)} and {len(other)}"
        elif one != other:
            at = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            differing = f"number {at + 1} by the {name}: {one[at]!r} and {other[at]!r}"
        if differing:
            break
    if not differing and first.digest != second.digest:
        differing = f"tensors in {{output}}: {first.digest[:8]} and {second.digest[:8]}"
    if differing:
        raise UsageError(
            f"command: the golden run, made twice, differs ({differing}). Make the program deterministic: seed it, "
            "or what a fault changes cannot be told from noise."
        )


def _prepared(command: Command, folder: Path) -> Path:
    """Have the program write the clean checkpoint."""
    words = command_words(command, "prepare")
    path = folder / f"{_CHECKPOINT}{placeholder_suffix(words, 'checkpoint')}"
    ending = run_program(
        fill_placeholders(words, {"checkpoint": path}),
        lambda _: False,
        folder=Path(command.base, command.folder).resolve(),
        environment=_environment(0),
    )
    if ending.code != 0:
        raise UsageError(f"prepare: did not finish: {_failure(_Run(ending, ProgramReadings('', '', _GOLDEN_RULES)))}")
    try:
        open_checkpoint(path).close()
    except EvergradError as error:
        raise UsageError(f"prepare: expected a checkpoint in {{checkpoint}}: {error}") from None
    return path


def _copied(command: Command, folder: Path) -> Path:
    try:
        return copy_state(clean_checkpoint(command), folder, _CHECKPOINT)
    except EvergradError as error:
        raise UsageError(f"checkpoint: {error}") from None


def _output_name(command: Command, checkpoint: Path) -> str:
    """With the suffix that the command asks for, or the checkpoint's."""
    return f"{_FINAL}{placeholder_suffix(command_words(command, 'command'), 'output') or suffix_of(checkpoint)}"


def _golden_final(command: Command, checkpoint: Path, extreme: float) -> FileState:
    return read_state_once(checkpoint.parent.resolve() / _FINAL / _output_name(command, checkpoint), extreme)


def _limit(command: Command, golden: Observation) -> float:
    return command.timeout_s or _MORE_TIME * golden.seconds + _MORE_SECONDS


def _environment(seed: int) -> dict[str, str]:
    # Unbuffered: a loss that is NaN should be seen when it is printed, not when the program ends.
    return {"PYTHONUNBUFFERED": "1", **os.environ, "EVERGRAD_TRIAL_SEED": str(seed)}


def _judge_state(readings: ProgramReadings, found: tuple[bool, bool], step: int) -> None:
    nonfinite, extreme = found
    if nonfinite:
        readings.note_abnormal("non-finite", "state", step)
    if extreme:
        readings.note_abnormal("extreme", "state", step)


def _observation(
    run: _Run, reason: str, digest: str, injected: int = 0, changed: int = 0, places: int = 0
) -> Observation:
    readings = run.readings
    return Observation(
        end=run.end,
        reason=reason,
        steps=readings.steps,
        metrics=readings.metrics.with_last(),
        losses=readings.losses.series(),
        nonfinite_at=readings.nonfinite[0],
        nonfinite_in=readings.nonfinite[1],
        extreme_at=readings.extreme[0],
        extreme_in=readings.extreme[1],
        digest=digest,
        injected=injected,
        changed=changed,
        places=places,
        seconds=run.ending.seconds,
    )


def _failure(run: _Run) -> str:
    """Why a run without a fault did not do, with the last that the program said."""
    if run.end is not TrialEnd.CRASHED:
        return run.reason
    return f"{describe_exit(run.ending.code or 0)}: {_last_lines(run.ending, 3)}"


def _last_lines(ending: ProgramExit, count: int) -> str:
    text = " / ".join(ending.stderr_lines[-count:]) or "no error was printed"
    return text if len(text) <= 300 else f"…{text[-299:]}"
