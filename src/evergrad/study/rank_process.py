"""A rank of a group: joins it, then does what it is told, one call after the other.

It is a fork of its worker's forkserver, which has torch loaded: loading it eight times on two cores takes longer than
most trials. It reads JSON lines from its socket and answers with one each:

    →  {"rank": 1, "ranks": 4, "store": path, "device": "cpu", "cores": […], "environment": {…}}     once
    ←  {"ready": true}  or  {"broken": reason}
    →  {"call": "module:function", "folder": …, "work": {…}}
    ←  {"result": {…}}  or  {"broken": reason}

The function is called with the folder and the work, as an executor's worker calls one; torch.distributed's default
group is the group of ranks. A rank ends with its forkserver, and when its socket closes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from evergrad.records import Json
from evergrad.study.executors.worker import resolve, run_task

_JOIN = timedelta(seconds=120)
_NEVER = timedelta(days=7)
"""A collective waits as long as it takes: who dies or hangs is the worker's matter."""


def serve_rank(_work: dict[str, Json], descriptor: int) -> int:
    """The process itself: until nobody calls any more."""
    faulthandler.enable()
    with socket.socket(fileno=descriptor) as link, link.makefile("rb") as lines:
        hello = json.loads(lines.readline())
        try:
            _join(hello)
        except Exception as error:
            _answer(link, {"broken": f"rank {hello['rank']} cannot join its group: {type(error).__name__}: {error}"})
            return 0
        _answer(link, {"ready": True})
        for line in lines:
            told = json.loads(line)
            _answer(link, run_task(resolve(told["call"]), Path(told["folder"]), told["work"]))
    return 0


def _join(hello: dict[str, Any]) -> None:
    os.environ.update(hello["environment"])
    if hello["cores"]:
        os.sched_setaffinity(0, hello["cores"])
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    rank, ranks, device = int(hello["rank"]), int(hello["ranks"]), str(hello["device"])
    backend = "gloo"
    if device.startswith("cuda"):
        there = torch.cuda.device_count()
        if there >= ranks:  # two ranks of NCCL cannot share a device
            backend = "nccl"
            torch.cuda.set_device(rank)
    store = distributed.FileStore(hello["store"], ranks)  # type: ignore[attr-defined]
    store.set_timeout(_JOIN)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_NEVER)
    distributed.barrier()


def _answer(link: socket.socket, answer: dict[str, Any]) -> None:
    link.sendall(json.dumps(answer).encode() + b"\n")
