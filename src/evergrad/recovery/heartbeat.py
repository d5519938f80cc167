"""How a process shows that it lives: a page of memory that it shares with whoever watches it, and a thread that beats.

The page says when the process last beat, what its main thread was doing then, since when it waits for other ranks, and
since when it waits for an answer of the store. Who watches reads it without asking, so that a process that is stopped,
cut off or stuck can be told from one that is busy:

    stopped        no beat, and the kernel says so
    cut off        waits for an answer of the store
    stuck or busy  no beat, and runs: some call holds the interpreter
    late           beats, but others wait for it
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from evergrad.errors import RecoveryError, UsageError

_BYTES = 8192
_BEATS, _BEAT_AT, _BEATS_WHEN_ASKED, _WAITS_SINCE, _WAITED, _WAITS, _ASKS_SINCE, _TURN, _LENGTH = range(9)
_STACK = 128
_FRAMES = 24
_NAME = "evergrad-heartbeat"
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_NOT_THEIRS = (_HERE, _PYTHON, "/site-packages/", '"<frozen')


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """What is known of a process, in durations: so that it can be told to another machine."""

    uid: int
    beats: int
    """How often it has beat; 0: it has not begun to, and nothing can be said of it."""
    silent_s: float
    is_stopped: bool
    asks_s: float
    """How long it has been waiting for an answer of the store; 0: it is not."""
    asks_beats: int
    """Number of beats meanwhile: few if the process gets no processor, or a call holds the interpreter."""
    waits_s: float
    """How long its main thread has been waiting for other ranks; 0: it is not."""
    waited_s: float
    """How long it has done so in all."""
    waits: int
    """How often."""
    stack: str = ""


class HeartbeatPage:
    """Memory of a process and of whoever watches it; one writes, the other reads."""

    def __init__(self, fd: int) -> None:
        """Share what is behind this descriptor, which is closed with the page."""
        self.fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._numbers = memoryview(self._memory)[:_STACK].cast("d")

    @classmethod
    def make(cls) -> HeartbeatPage:
        """A new one; its descriptor is for the process that is to be started."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd)

    @classmethod
    def inherited(cls, number: str) -> HeartbeatPage | None:
        """What whoever started this process has left for it; None if that is not here, or is something else."""
        try:
            is_ours = os.readlink(f"/proc/self/fd/{int(number)}").startswith(f"/memfd:{_NAME}")
        except (OSError, ValueError):
            return None
        return cls(int(number)) if is_ours else None

    def close(self) -> None:
        """Let go of the memory and its descriptor. Twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._numbers.release()
            self._memory.close()
            os.close(fd)

    def beat(self, stack: str) -> None:
        """This process lives, and is there."""
        text = stack.encode()[: _BYTES - _STACK]
        numbers = self._numbers
        numbers[_TURN] += 1  # odd: being written
        self._memory[_STACK : _STACK + len(text)] = text
        numbers[_LENGTH] = len(text)
        numbers[_TURN] += 1
        numbers[_BEAT_AT] = time.monotonic()
        numbers[_BEATS] += 1

    def forget(self) -> None:
        """Nothing can be said of this process from now on: it becomes another program."""
        for number in (_ASKS_SINCE, _WAITS_SINCE, _BEATS):
            self._numbers[number] = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside of this the main thread waits for other ranks."""
        numbers = self._numbers
        since = numbers[_WAITS_SINCE] = time.monotonic()
        try:
            yield
        finally:
            numbers[_WAITED] += time.monotonic() - since
            numbers[_WAITS] += 1
            numbers[_WAITS_SINCE] = 0.0

    def asks(self, begins: bool) -> None:
        """The store was asked something; or has answered."""
        self._numbers[_BEATS_WHEN_ASKED] = self._numbers[_BEATS]
        self._numbers[_ASKS_SINCE] = time.monotonic() if begins else 0.0

    def read(self, uid: int, pid: int) -> ProcessHealth:
        """What can be seen of the process, now."""
        now, numbers = time.monotonic(), self._numbers
        waits, asks = numbers[_WAITS_SINCE], numbers[_ASKS_SINCE]
        return ProcessHealth(
            uid=uid,
            beats=int(numbers[_BEATS]),
            silent_s=now - numbers[_BEAT_AT],
            is_stopped=is_stopped(pid),
            asks_s=now - asks if asks else 0.0,
            asks_beats=int(numbers[_BEATS] - numbers[_BEATS_WHEN_ASKED]) if asks else 0,
            waits_s=now - waits if waits else 0.0,
            waited_s=numbers[_WAITED] + (now - waits if waits else 0.0),
            waits=int(numbers[_WAITS]),
        )

    def stack(self) -> str:
        """What the main thread was doing at the last beat; the innermost call last."""
        for _ in range(100):
            turn, length = self._numbers[_TURN], int(self._numbers[_LENGTH])
            text = bytes(self._memory[_STACK : _STACK + length])
            if turn % 2 == 0 and self._numbers[_TURN] == turn:
                return text.decode(errors="replace")
            time.sleep(0.001)
        return ""


class HeartbeatThreads:
    """Two threads: one beats, the other asks the store whether anything is wanted of this process.

    So that a store that does not answer can be told from an interpreter that is not free: then nobody beats either.
    """

    def __init__(self, page: HeartbeatPage, every_s: float, ask: Callable[[], None]) -> None:
        """`ask` waits for the store's answer; a RuntimeError of it ends the asking: the store is gone."""
        self._page, self._every_s, self._ask = page, every_s, ask
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._beat, "evergrad-heartbeat"), (self._ask_on, "evergrad-asks"))
        ]

    def start(self) -> None:
        """Begin to beat."""
        self._page.beat(self._look())
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Beat no more; the threads are gone before the interpreter is. Twice is fine."""
        self._over.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2)

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            self._page.beat(self._look())

    def _ask_on(self) -> None:
        with suppress(RuntimeError, RecoveryError):
            while not self._over.wait(self._every_s):
                self._page.asks(True)
                self._ask()
                self._page.asks(False)

    def _look(self) -> str:
        frame = sys._current_frames().get(self._main) if self._main is not None else None
        return _stack_of(frame)


def is_stopped(pid: int) -> bool:
    """Whether the kernel says that this process is stopped, or held by a debugger; one that has ended is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def innermost(stack: str) -> str:
    """What of a stack people want to see first: the last calls of their own code, and the very last one."""
    lines = stack.splitlines()
    local_state = [line for line in lines if not any(place in line for place in _NOT_THEIRS)]
    return "\n".join([*local_state[-3:], *(lines[-1:] if lines[-1:] != local_state[-1:] else [])])


def _stack_of(frame: FrameType | None) -> str:
    """As a traceback has it, but without source lines: reading files is too slow for every beat."""
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
        frame = frame.f_back
    return "\n".join(reversed(lines))


# Who is to be taken for dead although it lives, and who is only late: decided from what can be seen of each process.
#
# A process counts as lost when it is stopped or cut off from the store for `heartbeat_timeout_s`, or when nothing has
# been heard of it, or others have been waiting for it, for `hang_timeout_s`. It is reported, with its stack, when
# others have waited `warn_after_s` for it. A rank that keeps up, but takes much longer for its part of each step than
# the others do, is a straggler.

_WINDOW_S = 5.0
_FEWEST_WAITS = 10


@dataclass(frozen=True, slots=True)
class LivenessTimeouts:
    """How long to wait for whom."""

    heartbeat_timeout_s: float = 1.0
    """A process that is stopped, or cut off, is lost after so long."""
    warn_after_s: float = 30.0
    """A rank that others wait for is reported after so long."""
    hang_timeout_s: float = 600.0
    """It is lost after so long; 0: never."""
    straggler_factor: float = 3.0
    """A rank that takes so many times as long for its part of a step as the others is a straggler; 0: none is."""
    replaces_stragglers: bool = False
    """Whether a straggler is lost, rather than only reported."""

    def __post_init__(self) -> None:
        for option, value in (("--heartbeat-timeout", self.heartbeat_timeout_s), ("--warn-after", self.warn_after_s)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{option}: expected a number of seconds above 0, found {value!r}")
        if not (math.isfinite(self.hang_timeout_s) and self.hang_timeout_s >= 0):
            raise UsageError(
                f"--hang-timeout: expected a number of seconds, 0 for never, found {self.hang_timeout_s!r}"
            )
        if not (math.isfinite(self.straggler_factor) and (self.straggler_factor == 0 or self.straggler_factor > 1)):
            raise UsageError(
                f"--straggler-factor: expected a factor above 1, 0 for none, found {self.straggler_factor!r}"
            )

    @property
    def beat_s(self) -> float:
        """How often a process beats."""
        return min(0.25, self.heartbeat_timeout_s / 4)


@dataclass(frozen=True, slots=True)
class LivenessFinding:
    """Something is wrong with a process."""

    uid: int
    kind: Literal["stopped", "cut off", "hung", "late", "straggler", "deadlock"]
    why: str
    """As in "rank 2 …"."""
    is_lost: bool


class LivenessRules:
    """Judges the processes of a job again and again; each thing is found once."""

    def __init__(self, timeouts: LivenessTimeouts) -> None:
        self._patience = timeouts
        self._said: set[tuple[int, str, int]] = set()
        self._windows: dict[int, tuple[float, float, int]] = {}
        """Of each member at the beginning of the window: when that was, how long it had waited, how often."""
        self._generation = -1

    def judge(
        self, health: Mapping[int, ProcessHealth], members: Collection[int], generation: int, now_s: float
    ) -> list[LivenessFinding]:
        """What is wrong now, and was not before; `vitals` are those of processes that are not out."""
        found = []
        for process_health in health.values():
            if process_health.beats and (finding := self._alone(process_health)) is not None:
                found.append(finding)
        gone = {finding.uid for finding in found}
        present = {uid: health[uid] for uid in members if uid in health and uid not in gone and health[uid].beats}
        if generation != self._generation:
            self._generation = generation
            self._windows = {}
        if not gone:
            found += self._late(present, len(members))
            found += self._straggling(present, now_s)
        return [finding for finding in found if finding.is_lost or self._is_new(finding, generation)]

    def _is_new(self, finding: LivenessFinding, generation: int) -> bool:
        key = finding.uid, finding.kind, generation
        is_new = key not in self._said
        self._said.add(key)
        return is_new

    def _alone(self, process_health: ProcessHealth) -> LivenessFinding | None:
        """What can be said of a process without knowing the others."""
        timeouts = self._patience
        if process_health.silent_s >= timeouts.heartbeat_timeout_s and process_health.is_stopped:
            return LivenessFinding(
                process_health.uid, "stopped", f"has been stopped for {process_health.silent_s:.1f} s", True
            )
        # Counted in its own beats too: on a machine with too much to do, both the answer and the beats are late.
        asked_s = min(process_health.asks_s, process_health.asks_beats * timeouts.beat_s)
        if asked_s >= timeouts.heartbeat_timeout_s and not process_health.is_stopped:
            return LivenessFinding(
                process_health.uid, "cut off", f"cannot reach the store for {process_health.asks_s:.1f} s", True
            )
        if timeouts.hang_timeout_s and process_health.silent_s >= timeouts.hang_timeout_s:
            return LivenessFinding(
                process_health.uid, "hung", f"has shown no sign of life for {process_health.silent_s:.0f} s", True
            )
        return None

    def _late(self, present: Mapping[int, ProcessHealth], num_members: int) -> list[LivenessFinding]:
        longest = max((process_health.waits_s for process_health in present.values()), default=0.0)
        timeouts = self._patience
        is_lost = 0 < timeouts.hang_timeout_s <= longest
        if longest < timeouts.warn_after_s and not is_lost:
            return []
        late = [process_health.uid for process_health in present.values() if not process_health.waits_s]
        kind: Literal["hung", "late"] = "hung" if is_lost else "late"
        if late:
            why = f"has kept the others waiting for {longest:.1f} s"
            return [LivenessFinding(uid, kind, why, is_lost) for uid in late]
        shortest = min(process_health.waits_s for process_health in present.values())
        if timeouts.hang_timeout_s and shortest >= timeouts.hang_timeout_s and len(present) == num_members:
            return [
                LivenessFinding(
                    -1, "deadlock", f"all ranks have been waiting for each other for {shortest:.0f} s", False
                )
            ]
        return []

    def _straggling(self, present: Mapping[int, ProcessHealth], now_s: float) -> list[LivenessFinding]:
        """Of the time since the window's beginning, a straggler waits little, and the others wait for it."""
        factor = self._patience.straggler_factor
        if not factor or len(present) < 2:
            return []
        if self._windows.keys() != present.keys():
            self._begin_window(present, now_s)
            return []
        begun_s = next(iter(self._windows.values()))[0]
        waits = min(process_health.waits - self._windows[uid][2] for uid, process_health in present.items())
        if now_s - begun_s < _WINDOW_S or waits < _FEWEST_WAITS:
            return []
        length = now_s - begun_s
        busy = {
            uid: max(1e-6, length - (process_health.waited_s - self._windows[uid][1]))
            for uid, process_health in present.items()
        }
        self._begin_window(present, now_s)
        found = []
        for uid, local_state in busy.items():
            others = statistics.median(value for other, value in busy.items() if other != uid)
            if local_state >= factor * others:
                why = f"takes {local_state / others:.1f} times as long for its part of a step as the others"
                found.append(LivenessFinding(uid, "straggler", why, self._patience.replaces_stragglers))
        return found if len(found) == 1 else []

    def _begin_window(self, present: Mapping[int, ProcessHealth], now_s: float) -> None:
        self._windows = {
            uid: (now_s, process_health.waited_s, process_health.waits) for uid, process_health in present.items()
        }
