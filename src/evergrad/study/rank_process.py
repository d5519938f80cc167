"""The process that ranks are forked from: it has torch loaded, and has never run anything with it.

A group of ranks so starts in a blink, again and again: loading torch eight times on two cores takes longer than most
trials. It holds one socket to the worker; a message on it brings the descriptors of new ranks' sockets, and each rank
that ends is told of:

    →  {"fork": [7, 8, …]}  with a descriptor each: fork ranks with these numbers
    ←  {"born": 7, "pid": 4711}
    →  {"kill": [7, 8, …]}
    ←  {"ended": 8, "status": -9}

Ranks end with the nursery, and the nursery with its worker.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from evergrad.recovery.launch.forking import end_with_parent
from evergrad.study.executors.worker import done, resolve

_MOST_RANKS = 256


def tend(descriptor: int) -> None:
    """The process itself: until its worker is gone."""
    # What ranks need is loaded once, here: DDP and optimizers bring the second one in when they are first used.
    import torch._dynamo
    import torch.nn.parallel  # noqa: F401

    import evergrad.study.checkpoint_cost
    import evergrad.study.tasks  # noqa: F401

    link = socket.socket(fileno=descriptor)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[int, int] = {}
    link.sendall(b'{"ready": true}\n')
    while True:
        readable = wait([link.fileno(), wake])
        if wake in readable:
            os.read(wake, 4096)
            _reap(link, ranks)
        if link.fileno() in readable and not _obey(link, ranks):
            return


def _obey(link: socket.socket, ranks: dict[int, int]) -> bool:
    """Do what a message asks for; False after the last one. The worker waits for each: no two come at once."""
    text, descriptors, _, _ = socket.recv_fds(link, 1 << 16, _MOST_RANKS)
    if not text:
        return False
    told = json.loads(text)
    for child, number in list(ranks.items()):
        if number in told.get("kill", ()):
            os.kill(child, signal.SIGKILL)  # it is not reaped yet: the number is its own
    for place, number in enumerate(told.get("fork", ())):
        descriptor, nursery = descriptors[place], os.getpid()
        child = os.fork()
        if child == 0:
            others = descriptors[place + 1 :]  # those before it are closed here already
            _become_rank(link, descriptor, others, nursery)
        os.close(descriptor)
        ranks[child] = number
        link.sendall(json.dumps({"born": number, "pid": child}).encode() + b"\n")
    return True


def _become_rank(link: socket.socket, descriptor: int, others: list[int], nursery: int) -> None:
    code = 1
    try:
        end_with_parent(nursery)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        link.close()
        for other in others:
            os.close(other)

        serve_rank(socket.socket(fileno=descriptor))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # groups of torch.distributed may hang or abort at an orderly end


def _reap(link: socket.socket, ranks: dict[int, int]) -> None:
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            return
        if child in ranks:
            ended = {"ended": ranks.pop(child), "status": os.waitstatus_to_exitcode(status)}
            link.sendall(json.dumps(ended).encode() + b"\n")


# A rank: joins its group, then does what it is told, one call after the other.
#
# It reads JSON lines from its socket and answers each with one:
#
#     →  {"rank": 1, "ranks": 4, "store": path, "device": "cpu", "cores": […], "environment": {…}}     once
#     ←  {"ready": true}  or  {"broken": reason}
#     →  {"call": "module:function", "folder": …, "work": {…}}
#     ←  {"result": {…}}  or  {"broken": reason}
#
# The function is called with the folder and the work, as an executor's worker calls one; torch.distributed's default
# group is the group of ranks. A rank ends with its nursery, and when its socket closes.

_JOIN = timedelta(seconds=120)
_NEVER = timedelta(days=7)
"""A collective waits as long as it takes: who dies or hangs is the worker's matter."""


def serve_rank(link: socket.socket) -> None:
    """The process itself: until nobody calls any more."""
    faulthandler.enable()
    with link, link.makefile("rb") as lines:
        hello = json.loads(lines.readline())
        try:
            _join(hello)
        except Exception as error:
            _answer(link, {"broken": f"rank {hello['rank']} cannot join its group: {type(error).__name__}: {error}"})
            return
        _answer(link, {"ready": True})
        for line in lines:
            told = json.loads(line)
            _answer(link, done(resolve(told["call"]), Path(told["folder"]), told["work"]))


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
