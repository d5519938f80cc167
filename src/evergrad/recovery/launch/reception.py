"""The head's answer to what other nodes do: who comes is told what to start, who is gone is out of the job."""

from __future__ import annotations

import time

from evergrad.recovery.coordinator import Coordinator
from evergrad.recovery.launch.announcing import Announcer
from evergrad.recovery.launch.crowd import Crowd
from evergrad.recovery.launch.nodes import Arrival, Departure, Nodes
from evergrad.recovery.launch.placing import Places
from evergrad.recovery.launch.processes import Exit
from evergrad.recovery.launch.settings import LaunchSettings
from evergrad.recovery.launch.status import Relay
from evergrad.recovery.membership import Keys
from evergrad.recovery.store import Sealed
from evergrad.timeline import Recorder
from evergrad.wording import counted


class Reception:
    """For the main thread of the head's launcher, once the store is open."""

    def __init__(
        self,
        settings: LaunchSettings,
        nodes: Nodes,
        places: Places,
        store: Sealed,
        coordinator: Coordinator,
        *,
        crowd: Crowd,
        relay: Relay,
        recorder: Recorder,
        announcer: Announcer,
        begun_mono: float,
    ) -> None:
        self._settings, self._nodes, self._places, self._store = settings, nodes, places, store
        self._coordinator, self._crowd, self._relay, self._recorder = coordinator, crowd, relay, recorder
        self._announcer, self._begun_mono = announcer, begun_mono
        self._until_s: float | None = time.monotonic() + settings.wait_s
        """How long those that have not come yet are waited for; None: all have, or the job is given up."""

    def hear(self, *, is_open: bool) -> list[Exit]:
        """See to all that has happened since, but for exits, which are returned. Is it not open, nobody may come."""
        exits = []
        for news in self._nodes.take():
            if isinstance(news, Exit):
                exits.append(news)
            elif isinstance(news, Departure):
                self._part_with(news)
            elif not isinstance(news, Arrival):
                self._crowd.send(news.number, news.uids)
            elif is_open:
                self._welcome(news)
            else:
                self._nodes.refuse(news, "the job is over")
        self._look_who_is_missing()
        return exits

    def _look_who_is_missing(self) -> None:
        if self._until_s is None:
            return
        missing, is_late = self._nodes.missing(), time.monotonic() >= self._until_s
        if missing and is_late:
            waited = f"{self._settings.wait_s:g} s"
            self._store.set(
                Keys.fatal, f"{', '.join(missing)} did not come within {waited}: see there, or --wait longer"
            )
        if is_late or not missing:
            self._until_s = None

    def _welcome(self, arrival: Arrival) -> None:
        """What a node starts with; one that comes again brings spares, which the job grows by where it has shrunk."""
        own = [place for place in self._settings.places() if place.node == arrival.node]
        name = self._settings.names[arrival.node]
        if not arrival.is_first:
            own = [self._places.add(place.node, place.device) for place in own]
            for place in own:
                self._coordinator.started(place.uid)
            self._relay.say(f"node {name} is back, on {arrival.machine}: {counted(len(own), 'spare')}")
        self._recorder.record("node here", node=name, machine=arrival.machine, uids=[place.uid for place in own])
        self._nodes.welcome(arrival, own, self._places.nodes, time.monotonic() - self._begun_mono)

    def _part_with(self, gone: Departure) -> None:
        name, count = self._settings.names[gone.node], counted(len(gone.uids), "process", "processes")
        self._recorder.record("node gone", node=name, why=gone.why, uids=list(gone.uids))
        why = gone.why or f"is on node {name}, which has left"
        for uid in gone.uids:
            self._announcer.foretell(uid, self._coordinator.rank_of(uid), why)
        for uid in gone.uids:
            self._coordinator.lost(uid, why)
        self._relay.say(f"node {name} {'is lost' if gone.why else 'has left'}, with {count}")
