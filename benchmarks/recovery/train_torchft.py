"""The script of torchft: as its example, one rank a replica group; and its lighthouse.

It runs under the interpreter that has torchft, which may be another one than ours.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks.recovery.workload import Log, Samples, Workload, make_model, parser, workload_of
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

HOST = "127.0.0.1"


def lighthouse(options: argparse.ArgumentParser) -> None:
    """Decides who is in a quorum; says its port in a file, and stays until it is ended."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--join-ms", type=int)
    options.add_argument("--heartbeat-ms", type=int)
    work = workload_of(options)
    server = LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=2,
        join_timeout_ms=work.join_ms,
        heartbeat_timeout_ms=work.heartbeat_ms,
    )
    port = server.address().rpartition(":")[2]
    part = work.out / "lighthouse.part"
    part.write_text(port, encoding="utf-8")
    part.replace(work.out / "lighthouse")
    while True:
        time.sleep(60)


def train(options: argparse.ArgumentParser) -> None:
    """One replica group of one rank."""
    from torchft import (  # type: ignore[import-not-found]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    options.add_argument("--rank", type=int, required=True)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--lighthouse", required=True)
    options.add_argument("--timeout-s", type=float, default=60.0)
    options.add_argument("--kill", type=int, default=-1, help="the step in which this rank kills itself")
    options.add_argument("--mended", action="store_true", help="with a hook that outlives a lost rank")
    work = workload_of(options)
    _meet(work)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    net = make_model(work)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    timeout = timedelta(seconds=work.timeout_s)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
        init_sync=False,  # all begin with the same weights
        timeout=timeout,
        # The first quorum waits for all to have started, which has nothing to do with failures.
        quorum_timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=f"http://{HOST}:{work.lighthouse}",
        replica_id=f"replica_{work.rank}",
        hostname=HOST,
    )
    if work.mended:
        _mended_hook.__annotations__.clear()  # torch would compare them, and here they are texts
        setattr(DistributedDataParallel, "_comm_hook", staticmethod(_mended_hook))
    model = DistributedDataParallel(manager, net, bucket_cap_mb=work.bucket_mb)
    _loop(work, manager, model, Optimizer(manager, optimizer))
    manager.shutdown(wait=False)
    os._exit(0)  # its threads may be waiting for those that are gone


def _meet(work: Workload) -> None:
    """Until all ranks have started: late ones would have to be healed, which is another question."""
    (work.out / f"ready-{work.rank}").touch()
    while len(list(work.out.glob("ready-*"))) < work.ranks:
        time.sleep(0.01)


def _mended_hook(manager: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """As torchft's own, but for a reduction that fails: its own asserts that there is a future, and there is none."""
    work = manager.allreduce(bucket.buffer())
    work.wait()
    future = work.get_future()
    inner: torch.futures.Future[torch.Tensor] | None = getattr(future, "_fut", None)
    if manager.errored() is None and inner is not None:
        return inner
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _loop(work: Workload, manager: Any, model: Any, optimizer: Any) -> None:
    log = Log(work.out, work.rank)
    samples = Samples(work.batch * 100 * work.steps, work.width)
    for x, y in DataLoader(samples, batch_size=work.batch, shuffle=True):
        before = manager.current_step()
        if before >= work.steps:
            return
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if before == work.kill:
            log.write("killing", step=before, generation=0)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if manager.current_step() > before:
            log.write("applied", step=manager.current_step(), generation=0)


if __name__ == "__main__":
    role = sys.argv.pop(1)
    {"lighthouse": lighthouse, "train": train}[role](parser())
