"""What a job is launched with, and what each of its processes is told of it.

A process learns its place from its environment. The names of torchrun (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` …) let a
plain `torch.distributed` script run as it is: with `TORCHELASTIC_USE_AGENT_STORE` its `init_process_group` becomes a
client of the launcher's store. The names of ours are read by `eg.join`.

Nodes are simulated, unless one launcher runs on each (`node_rank`): all processes share this machine and its devices.
So `LOCAL_RANK` counts them on the machine, not on the node: two ranks must not choose the same GPU because their nodes
are called differently.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evergrad.errors import UsageError, nearest
from evergrad.records import Json
from evergrad.recovery.decide import STRATEGIES, Strategy
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.heartbeat import LivenessTimeouts
from evergrad.recovery.launch.rendezvous import numbered
from evergrad.recovery.sockets import LOOPBACK

BATCH_POLICIES = ("shrink", "constant", "scale_lr")
OPTION_OF = {
    "script": "the script",
    "arguments": "the script's arguments",
    "is_module": "-m",
    "num_ranks": "-n",
    "num_nodes": "--nnodes",
    "is_spread": "--multinode",
    "num_spares": "--spares",
    "silent_s": "--heartbeat-timeout",
    "late_s": "--warn-after",
    "hung_s": "--hang-timeout",
    "straggler": "--straggler-factor",
    "replaces_stragglers": "--replace-stragglers",
    "after_loss": "--batch-policy",
    "fork": "--preload",
    "failures": "--fail",
    "grace_s": "--grace-period",
}
"""The option of each setting in `run.json` that has another name; `max_ranks` is `--max-ranks`."""

# Set by another launcher around this one, they would mislead.
_NOT_INHERITED = (
    "RANK",
    "ROLE_RANK",
    "EVERGRAD_GENERATION",
    "EVERGRAD_SPARE",
    "EVERGRAD_FAILURES",
    "EVERGRAD_BATCH_POLICY",
    "EVERGRAD_MULTINODE",
    "EVERGRAD_LAUNCHER",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """A job to launch; checked when it is built."""

    script: str
    """A Python file; with `is_module` the name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    num_ranks: int = 1
    num_nodes: int = 1
    num_spares: int = 0
    strategy: Strategy = "rollback"
    min_ranks: int = 1
    max_restarts: int = 3
    max_ranks: int | None = None
    """How many ranks there may be, if spares wait; None: as many as the job begins with."""
    patience: LivenessTimeouts = field(default_factory=LivenessTimeouts)
    """When a process that lives is taken for dead."""
    keep_stopped: bool = False
    """Whether a process that was taken for dead is left alone, rather than killed: to look at it with a debugger."""
    transport: str | None = None
    """How ranks exchange tensors: gloo, or nccl, which is experimental; None leaves it to the environment."""
    respawn: bool = False
    """Whether a new spare is started for each process that died."""
    failures: Failures = field(default_factory=Failures)
    batch_policy: str | None = None
    """What happens to batch and learning rate when ranks are lost; None leaves it to the script."""
    seed: int | None = None
    """The seed of random failures that name none."""
    out: Path | None = None
    """The folder of the run; None makes one below `runs`."""
    grace_period_s: float = 10.0
    """How long processes have to leave when they are asked to."""
    preload: bool = False
    """Whether ranks and spares begin as forks of the launcher, which has imported torch."""
    node_rank: int | None = None
    """Which of several nodes this launcher is on; None: there is one launcher, and nodes are simulated."""
    node_names: tuple[str, ...] = ()
    """What the nodes are called, if not n0, n1 …"""
    master_addr: str | None = None
    """The address by which other nodes reach this one, if it is the head; None: found out."""
    rendezvous_timeout_s: float = 60.0
    """How long to wait for the head, and the head for the other nodes."""

    def __post_init__(self) -> None:
        _check_count("-n", self.num_ranks, 1, "the number of ranks")
        _check_count("--nnodes", self.num_nodes, 1, "the number of nodes")
        _check_count("--spares", self.num_spares, 0, "the number of spares")
        _check_count("--min-ranks", self.min_ranks, 1, "the number of ranks to go on with")
        _check_count("--max-restarts", self.max_restarts, 0, "the number of restarts")
        if self.num_nodes > self.num_ranks:
            raise UsageError(f"--nnodes: expected at most as many as ranks ({self.num_ranks}), found {self.num_nodes}")
        if self.min_ranks > self.num_ranks:
            raise UsageError(f"--min-ranks: expected at most all ranks ({self.num_ranks}), found {self.min_ranks}")
        if self.max_ranks is not None and self.max_ranks < self.num_ranks:
            raise UsageError(f"--max-ranks: expected at least all ranks ({self.num_ranks}), found {self.max_ranks}")
        checked_strategy(self.strategy)
        if self.transport is not None:
            _check_choice("--transport", self.transport, ("gloo", "nccl"))
        if self.batch_policy is not None:
            _check_choice("--batch-policy", self.batch_policy, BATCH_POLICIES)
        if not (math.isfinite(self.grace_period_s) and self.grace_period_s >= 0):
            raise UsageError(f"--grace-period: expected a number of seconds, 0 or more, found {self.grace_period_s!r}")
        if self.seed is not None:
            _check_count("--seed", self.seed, 0, "the seed of random failures")
        if self.node_rank is not None:
            self._check_node(self.node_rank)
        if not self.node_rank:  # what the nodes are called only the head knows, and all have its failures
            self.failures.check(ranks=self.num_ranks, nodes=self.names)
        _check_script(self.script, self.is_module)  # last: a mistake in an option is found without the script

    def _check_node(self, rank: int) -> None:
        if not 0 <= rank < self.num_nodes:
            raise UsageError(f"--node-rank: expected 0 to {self.num_nodes - 1}, the nodes there are, found {rank}")
        if self.out is None:
            raise UsageError("--multinode: expected --out DIR, a folder that all nodes share, found none")
        if not (math.isfinite(self.rendezvous_timeout_s) and self.rendezvous_timeout_s > 0):
            raise UsageError(
                f"--rendezvous-timeout: expected a number of seconds above 0, found {self.rendezvous_timeout_s!r}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What each node is called."""
        return self.node_names or numbered(self.num_nodes)

    @property
    def command(self) -> list[str]:
        """What each process runs; unbuffered, so that its last words are not lost with it."""
        program = ["-m", self.script] if self.is_module else [self.script]
        return [sys.executable, "-u", *program, *self.arguments]

    @property
    def schedule(self) -> Failures:
        """The failures, with their seeds."""
        seed = self.seed
        if seed is None:
            return self.failures
        return Failures(
            replace(failure, seed=seed) if failure.random is not None and failure.seed == 0 else failure
            for failure in self.failures
        )

    def places(self) -> list[ProcessPlacement]:
        """Where each process starts, by uid: ranks on nodes in blocks, then spares, one node after the other."""
        ranks = [(uid * self.num_nodes // self.num_ranks, uid) for uid in range(self.num_ranks)]
        spares = [(index % self.num_nodes, None) for index in range(self.num_spares)]
        places: list[ProcessPlacement] = []
        on_node: Counter[int] = Counter()
        for uid, (node, rank) in enumerate([*ranks, *spares]):
            places.append(ProcessPlacement(uid, node, uid if self.node_rank is None else on_node[node], rank))
            on_node[node] += 1
        return places

    def to_json(self) -> dict[str, Json]:
        """As `run.json` keeps them."""
        return {
            "script": self.script,
            "arguments": list(self.arguments),
            "is_module": self.is_module,
            "num_ranks": self.num_ranks,
            "num_nodes": self.num_nodes,
            "node_names": list(self.names),
            "is_spread": self.node_rank is not None,
            "num_spares": self.num_spares,
            "strategy": self.strategy,
            "min_ranks": self.min_ranks,
            "max_restarts": self.max_restarts,
            "max_ranks": self.max_ranks,
            "silent_s": self.patience.heartbeat_timeout_s,
            "late_s": self.patience.warn_after_s,
            "hung_s": self.patience.hang_timeout_s,
            "straggler": self.patience.straggler_factor,
            "replaces_stragglers": self.patience.replaces_stragglers,
            "keep_stopped": self.keep_stopped,
            "transport": self.transport,
            "respawn": self.respawn,
            "failures": [*self.schedule.texts],
            "after_loss": self.batch_policy,
            "seed": self.seed,
            "grace_s": self.grace_period_s,
            "fork": self.preload,
        }


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Where a process starts."""

    uid: int
    node: int
    device: int
    """Its `LOCAL_RANK`: whoever takes a dead one's place has the same."""
    rank: int | None = None
    """None for a spare."""

    @property
    def label(self) -> str:
        """What people call it."""
        return f"spare {self.uid}" if self.rank is None else f"rank {self.rank}"


def environment_of(
    place: ProcessPlacement,
    settings: LaunchSettings,
    *,
    nodes: Sequence[int],
    host: str = LOOPBACK,
    port: int,
    run: Path,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of one process; `nodes` is the node of every process so far, by uid."""
    num_ranks, is_spread = str(settings.num_ranks), settings.node_rank is not None
    here = [one for one in settings.places() if one.rank is not None and one.node == place.node]
    told = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": str(place.device),
        "LOCAL_WORLD_SIZE": str(len(here)) if is_spread else num_ranks,
        "GROUP_RANK": str(place.node) if is_spread else "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "EVERGRAD_STORE": f"{host}:{port}",
        "EVERGRAD_UID": str(place.uid),
        "EVERGRAD_RANKS": num_ranks,
        "EVERGRAD_STRATEGY": settings.strategy,
        "EVERGRAD_MIN_RANKS": str(settings.min_ranks),
        "EVERGRAD_RUN": str(run),
        "EVERGRAD_MAX_RANKS": str(settings.max_ranks or settings.num_ranks),
        "EVERGRAD_SECRET": str(run / "secret"),
        "EVERGRAD_HEARTBEAT_INTERVAL_S": str(settings.patience.beat_s),
        # Who has no spares to come need not hold what only its neighbour has.
        "EVERGRAD_KEEP_NEIGHBOUR_STATE": "1" if settings.num_spares or settings.respawn or settings.max_ranks else "0",
        "EVERGRAD_NODES": json.dumps([settings.names[node] for node in nodes]),
    }
    # A spare's is beyond all ranks: scripts that look for RANK find one, and none takes the spare for rank 0.
    told["RANK"] = str(place.uid if place.rank is None else place.rank)
    if place.rank is None:
        told["EVERGRAD_SPARE"] = "1"
    if settings.num_nodes > 1:
        told["EVERGRAD_NODE"] = settings.names[place.node]
    if settings.transport is not None:
        told["EVERGRAD_TRANSPORT"] = settings.transport
    if settings.batch_policy is not None:
        told["EVERGRAD_BATCH_POLICY"] = settings.batch_policy
    if settings.failures:
        told["EVERGRAD_FAILURES"] = settings.schedule.to_json()
    kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    # Torch warns, in dozens of lines, of every connection that we cut ourselves.
    return {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | kept | told


def checked_strategy(name: str) -> Strategy:
    """A strategy by its name."""
    for known in STRATEGIES:
        if name == known:
            return known
    _check_choice("--strategy", name, STRATEGIES)
    raise AssertionError("unreachable")


def _check_script(script: str, is_module: bool) -> None:
    if is_module:
        if not all(part.isidentifier() for part in script.split(".")):
            raise UsageError(f"-m: expected the name of a module, as pkg.train, found {script!r}")
    elif not Path(script).is_file():
        what = "is a folder: expected a Python file" if Path(script).is_dir() else "no such script"
        raise UsageError(f"{script}: {what}")


def _check_count(option: str, value: int, least: int, what: str) -> None:
    if value < least:
        raise UsageError(f"{option}: expected {what}, {least} or more, found {value}")


def _check_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        close = nearest(value, known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{option}: expected one of {', '.join(known)}, found {value!r}.{hint}")


# Where every process of a job was started, from the first to those that took others' places.


class ProcessPlacements:
    """By uid; it only grows. Uids are given here, to whichever thread asks."""

    def __init__(self, first: Iterable[ProcessPlacement]) -> None:
        self._places = list(first)
        self._lock = threading.Lock()

    def __getitem__(self, uid: int) -> ProcessPlacement:
        return self._places[uid]

    def __iter__(self) -> Iterator[ProcessPlacement]:
        return iter(list(self._places))

    @property
    def nodes(self) -> list[int]:
        """The node of each."""
        return [place.node for place in self]

    def add(self, node: int, device: int, rank: int | None = None) -> ProcessPlacement:
        """One more."""
        with self._lock:
            place = ProcessPlacement(len(self._places), node, device, rank)
            self._places.append(place)
        return place

    def label_of(self, uid: int) -> str:
        """What people call it."""
        return self._places[uid].label

    def instead_of(
        self, before: ProcessPlacement, is_here: Callable[[int], bool], living: Iterable[int]
    ) -> tuple[int, int]:
        """Node and device for one that takes another's place: the same, unless that node is gone.

        Then the node on which the fewest of the `living` are, and there the device after theirs.
        """
        if is_here(before.node):
            return before.node, before.device
        here = [node for node in sorted({*self.nodes}) if is_here(node)]
        on_node = Counter(self._places[uid].node for uid in living)
        node = min(here, key=lambda one: on_node[one])
        return node, on_node[node]
