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

import json
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import wait

from evergrad.recovery.launch.forking import end_with_parent

_MOST_RANKS = 256


def tend(descriptor: int) -> None:
    """The process itself: until its worker is gone."""
    # What ranks need is loaded once, here: DDP and optimizers bring the second one in when they are first used.
    import torch._dynamo
    import torch.nn.parallel  # noqa: F401

    import evergrad.study.saving.blocks
    import evergrad.study.work  # noqa: F401

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
        from evergrad.study.ranks.rank import serve_rank

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
