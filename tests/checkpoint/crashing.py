"""Run as a program: trains and saves again and again, killed after every storage call in turn.

    python crashing.py FOLDER PLAN…

FOLDER gets the run folders; every PLAN is JSON:

- `victim`: who is killed after its n-th storage call. `trainer`; `agent`; `both`, at a call of the agent's; `couple`,
  both at a call of the trainer's; `thread`, a trainer without an agent; `copier`, a trainer after its n-th copy;
- `tiers`: `memory`, `local` or `memory+local`;
- `stride`: try every so manieth point, from `first` on; `limit`: and not more than so many;
- `launched`: whether agents are this program's children, as a launcher's; if not, trainers start their own.

This program imports torch once and has one thread; trainers and agents are forked from it. After each kill another
trainer restores, checks every tensor of every version that there is, and saves again. Prints what was seen, a line of
JSON a plan.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

import evergrad as eg
from evergrad.checkpoint.agent.agent import run_agent
from evergrad.checkpoint.agent.client import AgentClient
from evergrad.checkpoint.capture.capture import ArenaWriter
from evergrad.checkpoint.checkpointer import CheckpointWarning
from evergrad.checkpoint.run_folder import AGENT_LOCK, RunFolder
from evergrad.errors import StateError
from evergrad.testing import StorageCalls, kill_after

SECONDS = 30.0
LAST_STEP = 5
LARGER_FROM = 4
KEEP = 1
TIERS = {
    "memory": lambda: [eg.Memory()],
    "local": lambda: [eg.Local(keep=KEEP)],
    "memory+local": lambda: [eg.Memory(), eg.Local(keep=KEEP)],
}


def state(step: int, *, larger: bool) -> dict[str, Any]:
    """Everything in it says which step it is of; no tensor ends at a page."""
    tensors = {
        "weight": torch.full((30_001,), float(step)),
        "moment": torch.full((77, 100), -float(step), dtype=torch.float64),
        "half": torch.full((1_003,), step, dtype=torch.bfloat16),
        "count": torch.full((5,), step, dtype=torch.uint8),
    }
    if larger:
        tensors["head"] = torch.full((20_000,), step * 0.5)
    return {"model": tensors, "step": step, "history": [step] * 3}


def check(found: dict[str, Any], step: int, *, larger: bool) -> None:
    expected = state(step, larger=larger)
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), f"step {step}: {name} has {found['model'][name].unique()}"
    assert found["step"] == step
    assert found["history"] == [step] * 3


def restored(ck: eg.Checkpointer, version: Any = None) -> int | None:
    """Restore into a state of the form that fits, and check all of it."""
    for larger in (True, False):
        live = state(0, larger=larger)
        try:
            step = ck.restore(live, version=version)
        except StateError:
            assert larger, "no form fits"
            check(live, 0, larger=larger)  # nothing was touched
            continue
        if step is not None:
            assert larger == (step >= LARGER_FROM)
            check(live, step, larger=larger)
            assert ck.restored is not None
            assert ck.restored.meta == {"step": step}
        return step
    raise AssertionError


class Channel:
    """What a trainer and this program tell each other."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def tell(self, text: str) -> None:
        self._end.send(text.encode())

    def hear(self) -> str:
        """The next message; an empty one when the other has ended."""
        with suppress(ConnectionResetError):
            return self._end.recv(4096).decode()
        return ""

    def fileno(self) -> int:
        return self._end.fileno()

    def ask_for_an_agent(self) -> None:
        """The launcher starts one."""
        self.tell("agent")
        assert self.hear() == "serves"


def save(ck: eg.Checkpointer, step: int) -> Any:
    return ck.save(step, state(step, larger=step >= LARGER_FROM), meta={"step": step})


def train(channel: Channel, ck: eg.Checkpointer) -> None:
    """Two saves with time between them, two in haste, and one more; whatever was waited for is told."""
    warnings.simplefilter("ignore", CheckpointWarning)  # that the agent is gone
    assert ck.restore(state(0, larger=False)) is None
    for step in range(1, LAST_STEP + 1):
        pending = save(ck, step)
        if step != 3:
            pending.wait(timeout=SECONDS)
            channel.tell(f"safe {step}")


def go_on(channel: Channel, ck: eg.Checkpointer) -> None:
    """Restore, check everything that there is, and save again."""
    warnings.simplefilter("error")
    step = restored(ck)
    versions = [record.version for record in ck.versions()]
    for version in versions:
        assert restored(ck, version) == version.step
    assert restored(ck) == step == (versions[0].step if versions else None)
    for more in (1, 2):
        save(ck, (step or 0) + more).wait(timeout=SECONDS)
    assert restored(ck) == (step or 0) + 2
    channel.tell(f"found {step}")


class Copying:
    """In place of `ArenaWriter.copy`: SIGKILL when the n-th copy is in the arena, and nobody knows yet."""

    def __init__(self, number: int) -> None:
        self.left, self.original = number, ArenaWriter.copy

    def __enter__(self) -> Copying:
        def copy(target: ArenaWriter, gathered: Any) -> None:
            self.original(target, gathered)
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(ArenaWriter, "copy", copy)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(ArenaWriter, "copy", self.original)


class Launcher:
    """Starts trainers and agents, one run folder each point, and sees that all of them end."""

    def __init__(self, folder: Path, shm: Path, plan: dict[str, Any]) -> None:
        self.folder, self.shm, self.plan = folder, shm, plan
        self.processes: dict[int, str] = {}

    def fork(self, name: str, act: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            self.processes[pid] = name
            return pid
        code = 9
        try:
            faulthandler.dump_traceback_later(SECONDS + 10, exit=True)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def ended(self, pid: int) -> int:
        """Wait for a process; its exit code, negative for a signal."""
        watch = os.pidfd_open(pid)
        try:
            assert select.select([watch], [], [], SECONDS + 20)[0], f"{self.processes[pid]} does not end"
        finally:
            os.close(watch)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del self.processes[pid]
        return code

    def agent(self, calls: StorageCalls | None = None) -> int:
        """A child that serves; returns when trainers can connect, or it is dead."""
        reader, writer = os.pipe()

        def serve() -> None:
            os.close(reader)
            with calls or nullcontext():
                run_agent(RunFolder.open(self.folder), linger_s=SECONDS, ready=lambda: os.close(writer))

        pid = self.fork("agent", serve)
        os.close(writer)
        assert select.select([reader], [], [], SECONDS)[0], "the agent does not serve"
        os.close(reader)
        return pid

    def trainer(self, act: Callable[[Channel, eg.Checkpointer], None], calls: Any) -> tuple[int, Channel]:
        """A child that waits until it is told to begin."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def run() -> None:
            ours.close()
            channel = Channel(theirs)
            assert channel.hear() == "go"
            if self.plan["launched"]:
                setattr(AgentClient, "_start", lambda _: channel.ask_for_an_agent())
            agent = self.plan["victim"] != "thread"
            with (
                calls or nullcontext(),
                eg.Checkpointer(self.folder, tiers=TIERS[self.plan["tiers"]](), agent=agent) as ck,
            ):
                act(channel, ck)

        pid = self.fork(act.__name__, run)
        theirs.close()
        return pid, Channel(ours)

    def conduct(self, pid: int, channel: Channel) -> tuple[int, list[str]]:
        """Let a trainer run to its end, with an agent whenever it asks for one; its exit code, and what it told."""
        told = []
        with suppress(BrokenPipeError):
            channel.tell("go")
        while True:
            assert select.select([channel], [], [], SECONDS + 20)[0], "a trainer stands still"
            text = channel.hear()
            if not text:
                break
            if text == "agent":
                self.agent()
                with suppress(BrokenPipeError):
                    channel.tell("serves")
            else:
                told.append(text)
        os.close(channel._end.detach())
        return self.ended(pid), told

    def end_all(self) -> None:
        """What is left are agents: ours leave when they are asked to, those of trainers by themselves."""
        for pid in list(self.processes):
            os.kill(pid, signal.SIGTERM)
            code = self.ended(pid)
            assert code == 0, f"an agent ended with {code}"
        for path in self.shm.rglob(AGENT_LOCK):
            with path.open("rb+") as lock:
                signal.alarm(int(SECONDS))  # ends this program
                fcntl.flock(lock, fcntl.LOCK_EX)
                signal.alarm(0)

    def kill_all(self) -> None:
        for pid in list(self.processes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.processes.clear()


def crash(launcher: Launcher, victim: str, point: int) -> tuple[bool, int]:
    """Train until something is killed at a point; whether that was so, and the last step that was safe before."""
    agent = None
    if victim in ("trainer", "thread"):
        calls: Any = kill_after(point)
    elif victim == "copier":
        calls = Copying(point)
    else:
        calls = None
    if victim == "couple":
        agent = launcher.agent()
        calls = kill_after(point, agent)
    trainer, channel = launcher.trainer(train, calls)
    if victim in ("agent", "both"):
        agent = launcher.agent(kill_after(point, *([trainer] if victim == "both" else [])))
    elif victim in ("trainer", "copier") and launcher.plan["launched"]:
        launcher.agent()
    code, told = launcher.conduct(trainer, channel)
    safe = [int(text.split()[1]) for text in told if text.startswith("safe")]
    killed = code == -signal.SIGKILL
    if victim == "agent":
        assert code == 0, f"the trainer did not survive its agent: {code}"
        assert agent is not None
        assert safe[-1] == LAST_STEP
    assert code in (0, -signal.SIGKILL), f"the trainer ended with {code}"
    if agent is not None:
        os.kill(agent, signal.SIGTERM)  # if it lives: what it does when it leaves may be the point as well
        ended = launcher.ended(agent)
        assert ended in (0, -signal.SIGKILL), f"the agent ended with {ended}"
        killed = ended == -signal.SIGKILL
    return killed, max(safe, default=0)


def left(launcher: Launcher) -> list[str]:
    """What crashes have left in the local tier, after further saves: besides kept versions and the spare."""
    found = [path for path in (launcher.folder / "local").glob("*/*/*") if path.name != ".spare-rank-00000"]
    versions = sorted(found, key=lambda path: path.name.split("-")[::-1])
    extra = [f"{path.name}: {', '.join(sorted(os.listdir(path)))}" for path in versions[:-KEEP]]
    return extra + [str(path) for path in versions[-1:] for path in path.glob(".*")]


def sweep(folder: Path, shm: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Point after point, until everything ends by itself."""
    seen: Counter[str] = Counter()
    points, point, killed = 0, plan["first"], True
    while killed and points < plan["limit"]:
        launcher = Launcher(folder / f"run{point}", shm / str(point), plan)
        os.environ["EVERGRAD_SHM"] = str(launcher.shm)
        launcher.shm.mkdir()
        try:
            killed, safe = crash(launcher, plan["victim"], point)
            trainer, channel = launcher.trainer(go_on, None)
            code, told = launcher.conduct(trainer, channel)
            assert code == 0, f"the next trainer ended with {code}"
            text = told[-1].split()[1]
            found = 0 if text == "None" else int(text)
            assert safe <= found <= LAST_STEP, f"step {safe} was safe, {text} was restored"
            launcher.end_all()
            assert not left(launcher), left(launcher)
        except Exception as error:
            raise AssertionError(f"point {point} of {plan}: {type(error).__name__}: {error}") from error
        finally:
            launcher.kill_all()
        seen["nothing" if not found else "old" if found == safe else "new"] += killed
        shutil.rmtree(launcher.folder)
        shutil.rmtree(launcher.shm)
        points, point = points + killed, point + plan["stride"]
    return {"points": points, "seen": seen}


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(process)d %(name)s %(message)s")
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a killed process takes nothing with it that it has written
    shared = Path(os.environ["EVERGRAD_SHM"])
    for text in sys.argv[2:]:
        print(json.dumps(sweep(Path(sys.argv[1]), shared, json.loads(text))), flush=True)
