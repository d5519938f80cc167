"""The processes of one machine: started with all that they are to know, their lines shown, their pulse at hand."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from evergrad.errors import UsageError
from evergrad.recovery.heartbeat import HeartbeatPage, ProcessHealth
from evergrad.recovery.launch.output import OutputRelay
from evergrad.recovery.launch.processes import Child, Children, ProcessExit, ProcessSet, WaitResult
from evergrad.recovery.launch.settings import LaunchSettings, ProcessPlacement, environment_of
from evergrad.timeline import Recorder


class NodeProcesses(ProcessSet):
    """What a launcher starts on its own machine; the launcher of a node that is not the head has nothing else."""

    def __init__(
        self,
        settings: LaunchSettings,
        children: Children,
        relay: OutputRelay,
        recorder: Recorder,
        *,
        run: Path,
        host: str,
        port: int,
        begun_mono: float,
    ) -> None:
        """`host` and `port` are where processes find the store; `begun_mono` is when the job began, by this machine."""
        self._settings, self._children, self._relay, self._recorder = settings, children, relay, recorder
        self._run, self._host, self._port, self._begun_mono = run, host, port, begun_mono
        self._pages: dict[int, tuple[HeartbeatPage, Child]] = {}

    @property
    def living(self) -> list[Child]:
        """By uid."""
        return self._children.living

    def start(
        self, place: ProcessPlacement, generation: int | None, nodes: Sequence[int], *, forked: bool = False
    ) -> None:
        """Start one more, from nothing or as a fork of this process."""
        environment = environment_of(
            place, self._settings, nodes=nodes, host=self._host, port=self._port, run=self._run, inherited=os.environ
        )
        page = HeartbeatPage.make()
        environment |= {
            "EVERGRAD_HEARTBEAT_FD": str(page.fd),
            "EVERGRAD_START_TIME": repr(self._begun_mono),
            "EVERGRAD_TIMELINE": str(self._recorder.path),
        }
        if self._settings.node_rank is not None:
            environment["EVERGRAD_MULTINODE"] = "1"
        if self._settings.node_rank:
            environment["EVERGRAD_LAUNCHER"] = str(os.getpid())
        if generation is not None:
            environment["EVERGRAD_GENERATION"] = str(generation)
        try:
            child = self._children.start(
                place.uid, place.label, self._settings.command, environment, forked=forked, inherited=[page.fd]
            )
        except OSError as error:
            page.close()
            raise UsageError(f"{place.label} cannot be started: {error.strerror}") from None
        self._pages[place.uid] = page, child
        self._relay.add(child)
        node = self._settings.names[place.node]
        self._recorder.record("process_started", uid=place.uid, label=place.label, pid=child.pid, node=node)

    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """Send every living process, or these, a signal; SIGKILL also to what it has started in its group."""
        self._children.send(number, uids)

    def wait(self, timeout_s: float) -> WaitResult:
        """Until somebody exits, a signal comes, somebody pokes, or the time is over."""
        return self._children.wait(timeout_s)

    def record_exit(self, gone: ProcessExit) -> None:
        """Somebody has exited, and whoever must know at once does."""
        child = gone.child
        self._recorder.record("process_exited", uid=child.uid, label=child.label, code=gone.code)
        page, _ = self._pages.pop(child.uid)
        page.close()

    def health(self) -> dict[int, ProcessHealth]:
        """What each shows of itself, now."""
        return {uid: page.read(uid, child.pid) for uid, (page, child) in self._pages.items()}

    def stack(self, uid: int) -> str:
        """What its main thread was doing at its last beat."""
        return self._pages[uid][0].stack() if uid in self._pages else ""

    def close(self) -> None:
        """Let go of the pages. Twice is fine."""
        for page, _ in self._pages.values():
            page.close()
        self._pages.clear()
