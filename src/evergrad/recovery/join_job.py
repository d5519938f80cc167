"""`eg.join`: how a process finds out what it is part of.

| started by | what happens when a rank is lost |
|---|---|
| `evergrad run` | the survivors go on, by the strategy that was chosen |
| torchrun, or anything that sets RANK and WORLD_SIZE | all end, and are started again: the restart strategy |
| `python train.py` | there is nobody to lose: world size 1 |

Argument > environment > default: `batch_policy`, EVERGRAD_BATCH_POLICY, "shrink". How ranks talk to each other has no
argument: EVERGRAD_TRANSPORT is "gloo", or "nccl" for gradients on GPUs.
"""

from __future__ import annotations

import atexit
import json
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed import distributed_c10d

from evergrad._wire import Secret
from evergrad.checkpoint import Checkpointer
from evergrad.checkpoint.ranks import Ranks, follow
from evergrad.errors import UsageError
from evergrad.recovery.decide import STRATEGIES
from evergrad.recovery.elastic_sampler import BatchMode
from evergrad.recovery.failures.injector import FailureSites
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.heartbeat import HeartbeatPage
from evergrad.recovery.job import Job
from evergrad.recovery.job_checkpoints import JobCheckpoints
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.nccl_group import Transport
from evergrad.recovery.process_group import Group
from evergrad.recovery.store import StoreClient
from evergrad.recovery.traceback_log import keep_in_log
from evergrad.recovery.usage_checks import described, refusing_wrong_arguments
from evergrad.recovery.worker import ElasticWorker, SingleWorker, StaticWorker, Worker
from evergrad.timeline import Recorder
from evergrad.wording import did_you_mean, short_repr

_MODES: tuple[BatchMode, ...] = get_args(BatchMode)
_joined: Job | None = None


@contextmanager
def _stopping(*_: object) -> Iterator[None]:
    """A mistake in the call ends the whole job: every rank makes it, also after a restart."""
    try:
        yield
    except UsageError as error:
        if "EVERGRAD_STORE" in os.environ:
            _stop(os.environ, error)
        raise


@refusing_wrong_arguments("eg.join", _stopping)
def join(
    checkpointer: Checkpointer | None = None,
    every: int | None = None,
    *,
    batch_policy: BatchMode | None = None,
    seed: int = 0,
) -> Job:
    """Be part of the job that this process was started for.

    - `checkpointer`: model, optimizer, tracked things and the place in the data are saved by it, after `every` so many
      steps, and restored from it when the job begins again.
    - `batch_policy`: the global batch shrinks with the ranks ("shrink"), stays the same ("constant"), or shrinks and
      the learning rate with it ("scale_lr").
    - `seed`: of the order of the data, as `DistributedSampler` has one.
    """
    global _joined  # noqa: PLW0603 (a process is part of one job)
    if _joined is not None:
        with _joined._stopping():
            raise UsageError("eg.join: this process has joined already. Keep what it returned")
    env = os.environ
    make = _launched if "EVERGRAD_STORE" in env else _static if int(env.get("WORLD_SIZE", "1")) > 1 else _solo
    with _stopping():
        _refuse_wrong_types(checkpointer, seed)
        if every is not None and checkpointer is None:
            raise UsageError(f"eg.join(every={every!r}): there is no checkpointer to save with")
        checkpoints = JobCheckpoints(checkpointer, every) if checkpointer is not None else None
        job = make(env, checkpoints, _mode(env, batch_policy), operator.index(seed))
    _joined = job
    atexit.register(job.close)
    return job


def _refuse_wrong_types(checkpointer: object, seed: object) -> None:
    if checkpointer is not None and not isinstance(checkpointer, Checkpointer):
        folder = short_repr(os.fspath(checkpointer)) if isinstance(checkpointer, str | os.PathLike) else '"checkpoints"'
        raise UsageError(
            f"eg.join: expected a Checkpointer, found {described(checkpointer)}. Make one of a folder: "
            f"eg.join(eg.Checkpointer({folder}), every=100)"
        )
    if not hasattr(seed, "__index__"):
        raise UsageError(f"eg.join(seed=…): expected a whole number, found {described(seed)}")


def _stop(env: Mapping[str, str], error: UsageError) -> None:
    """Tell the launcher of a mistake."""
    host, _, port = env["EVERGRAD_STORE"].rpartition(":")
    if "EVERGRAD_SECRET" not in env:  # no launcher has made this environment: there is nobody to tell
        return
    secret = Secret.read(Path(env["EVERGRAD_SECRET"]))
    keep_in_log(error, is_said=True)
    client = StoreClient(host, int(port), secret=secret)
    client.set(StoreKeys.fatal, str(error))
    client.has(StoreKeys.fatal)  # an answer: the launcher finds it there when it learns that this process has ended


def _solo(env: Mapping[str, str], checkpoints: JobCheckpoints | None, mode: BatchMode, seed: int) -> Job:
    Transport.of(env)  # there is nobody to talk to; but what cannot be had is refused at once
    return _job(SingleWorker(), "rollback", mode, 1, checkpoints, seed)


def _static(env: Mapping[str, str], checkpoints: JobCheckpoints | None, mode: BatchMode, seed: int) -> Job:
    if checkpoints is None:
        raise UsageError(
            "eg.join: under torchrun a lost rank ends all of them, and only a restart helps, which needs a checkpoint: "
            "eg.join(checkpointer=ck, every=100). Or start it by 'evergrad run'"
        )
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    is_agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    worker = StaticWorker(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), rank, size, env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        hosts=rank == 0 and not is_agents, transport=Transport.of(env),
    )  # fmt: skip
    follow(lambda: _ranks(worker))
    return _job(worker, "restart", mode, size, checkpoints, seed)


def _launched(env: Mapping[str, str], checkpoints: JobCheckpoints | None, mode: BatchMode, seed: int) -> Job:
    uid, strategy = int(env["EVERGRAD_UID"]), env.get("EVERGRAD_STRATEGY", "rollback")
    if strategy not in STRATEGIES:
        hint = did_you_mean(strategy, STRATEGIES)
        raise UsageError(f"EVERGRAD_STRATEGY={strategy}: expected one of {', '.join(STRATEGIES)}.{hint}")
    timeline = env.get("EVERGRAD_TIMELINE") or os.path.join(env["EVERGRAD_RUN"], "timeline.jsonl")
    tell = Recorder(timeline, f"uid {uid}").record
    worker = _connected(env, uid, strategy, tell, has_saves=checkpoints is not None)
    is_spare = env.get("EVERGRAD_SPARE") == "1" and "EVERGRAD_GENERATION" not in env
    if not is_spare:
        worker.enter_generation(int(env.get("EVERGRAD_GENERATION", "0")))
    follow(lambda: _ranks(worker))
    failures = Failures.from_json(env["EVERGRAD_FAILURES"]) if env.get("EVERGRAD_FAILURES") else Failures()
    return _job(
        worker,
        strategy,
        mode,
        int(env["EVERGRAD_RANKS"]),
        checkpoints,
        seed,
        tell=tell,
        sites=FailureSites(failures, worker, json.loads(env.get("EVERGRAD_NODES", "[]")), tell),
        is_spare=is_spare,
        keeps=strategy != "restart" and env.get("EVERGRAD_KEEP_NEIGHBOUR_STATE", "1") != "0",
        can_grow=int(env.get("EVERGRAD_MAX_RANKS", "1")) > 1,
    )


def _connected(
    env: Mapping[str, str], uid: int, strategy: str, tell: Callable[..., None], *, has_saves: bool
) -> ElasticWorker:
    """This process at the launcher's store, where it says that it has joined."""
    host, _, port = env["EVERGRAD_STORE"].rpartition(":")
    secret = Secret.read(Path(env["EVERGRAD_SECRET"]))
    page, beat_s = (
        HeartbeatPage.inherited(env.get("EVERGRAD_HEARTBEAT_FD", "")),
        float(env.get("EVERGRAD_HEARTBEAT_INTERVAL_S", "0.25")),
    )
    transport = Transport.of(env, confirms=strategy == "forward")
    if strategy == "restart" and not has_saves:
        raise UsageError(
            "eg.join: strategy 'restart' goes back to the newest checkpoint, and there is no checkpointer: "
            "eg.join(checkpointer=ck, every=100), or another strategy"
        )
    worker = ElasticWorker(
        host, int(port), uid, secret=secret, tell=tell, page=page, beat_s=beat_s, transport=transport
    )
    about = {"pid": os.getpid(), "checkpointer": has_saves, "node": env.get("EVERGRAD_NODE", "n0")}
    worker.client.set(StoreKeys.joined(uid), json.dumps(about))
    return worker


def _job(
    worker: Worker,
    strategy: str,
    mode: BatchMode,
    num_ranks: int,
    checkpoints: JobCheckpoints | None,
    seed: int,
    *,
    tell: Callable[..., None] = lambda *_, **__: None,
    sites: FailureSites | None = None,
    is_spare: bool = False,
    keeps: bool = False,
    can_grow: bool = False,
) -> Job:
    return Job(
        worker,
        strategy=strategy,
        batch_policy=mode,
        num_ranks=num_ranks,
        is_spare=is_spare,
        keeps=keeps,
        checkpoints=checkpoints,
        sites=sites or FailureSites(Failures(), worker, (), tell),
        tell=tell,
        seed=seed,
        can_grow=can_grow,
    )


def _mode(env: Mapping[str, str], given: BatchMode | None) -> BatchMode:
    found = given or env.get("EVERGRAD_BATCH_POLICY") or "shrink"
    where = "batch_policy=" if given else "EVERGRAD_BATCH_POLICY="
    for mode in _MODES:
        if found == mode:
            return mode
    raise UsageError(f"{where}{found!r}: expected one of {', '.join(_MODES)}.{did_you_mean(str(found), _MODES)}")


def _ranks(worker: Worker) -> Ranks:
    """The present generation, as checkpoints see it."""
    group = worker.group()
    return Ranks(worker.rank, worker.world_size, weakref.ref(group), lambda mine: _gather(group, mine))


def _gather(group: Group, mine: Any) -> list[Any]:
    """What every rank has; as torch's all_gather_object, over a group that torch does not know."""
    device = torch.device("cpu")
    pack: Any = distributed_c10d._object_to_tensor
    unpack: Any = distributed_c10d._tensor_to_object
    data, size = pack(mine, device, None)
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = int(size)
    group.all_reduce(sizes).wait()
    found = []
    for rank, length in enumerate(sizes.tolist()):
        part = data if rank == group.rank else torch.empty(length, dtype=torch.uint8)
        group.broadcast(part, rank).wait()
        found.append(unpack(part, length, None))
    return found
