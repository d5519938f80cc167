"""Two machines and a storage service, each with a network and folders of its own: `python two_machines.py FOLDER`.

Run as root in new network, mount and process namespaces (`COMMAND`), so that whatever it makes goes when it ends:

    machine a  10.77.1.1 ── 10.77.1.2  service  10.77.2.2 ── 10.77.2.1  machine b

Each machine has its own /dev/shm and its own FOLDER/work, both empty at first, at the same paths. What it prints, one
JSON object a line, is what the test judges.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

COMMAND = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--"]
URL = "s3://bucket/r50"
_SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="0.0.0.0", port=5000, verbose=False).start()
print("ready", flush=True)
sys.stdin.read()
"""


def call(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


@contextmanager
def service() -> Iterator[None]:
    """An S3 server with a bucket, on every address of this namespace."""
    call("ip", "link", "set", "lo", "up")
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            connection = HTTPConnection("127.0.0.1", 5000, timeout=30)
            connection.request("PUT", "/bucket", headers={"Authorization": _SIGNED})
            assert connection.getresponse().status == 200
            connection.close()
            yield
        finally:
            server.kill()


@contextmanager
def machine(number: int, verb: str, folder: str) -> Iterator[subprocess.Popen[str]]:
    """A process in namespaces of its own, with a cable to this one."""
    command = [*COMMAND, sys.executable, __file__, folder, verb, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert json.loads(process.stdout.readline()) == {"is": "up"}
            call("ip", "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
            call("ip", "address", "add", f"10.77.{number}.2/24", "dev", f"to{number}")
            call("ip", "link", "set", f"to{number}", "up")
            process.stdin.write("plugged in\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()  # and with it all that runs there


def hear(process: subprocess.Popen[str]) -> str:
    """What a machine says; it is an error if that is nothing."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "a machine ended and said nothing"
    return line


def settle_in(folder: str, number: int) -> Path:
    """Make this namespace a machine: a name, memory and a disk that nobody else sees, and the network."""
    work = Path(folder, "work")
    call("hostname", f"machine{number}")
    for path in (work, Path("/dev/shm")):
        call("mount", "-t", "tmpfs", "-o", "size=256m", "none", str(path))
        assert list(path.iterdir()) == []
    print(json.dumps({"is": "up"}), flush=True)
    assert sys.stdin.readline() == "plugged in\n"
    call("ip", "link", "set", "lo", "up")
    call("ip", "address", "add", f"10.77.{number}.1/24", "dev", "eth0")
    call("ip", "link", "set", "eth0", "up")
    return work


def tiers(work: Path, number: int) -> list[Any]:
    import evergrad as eg

    endpoint = {"endpoint_url": f"http://10.77.{number}.2:5000", "region_name": "us-east-1"}
    options = {"key": "AKIAEXAMPLE", "secret": "not-to-be-shown", "client_kwargs": endpoint}
    return [eg.Memory(), eg.Local(work / "disk"), eg.Persistent(URL, every=2, options=options)]


def made(seed: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "loss": 0.0}


def train(state: dict[str, Any]) -> None:
    import torch

    state["optimizer"].zero_grad()
    loss = state["model"](torch.randn(16, 64)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["loss"] = float(loss.detach())


def digest(state: dict[str, Any]) -> str:
    from evergrad.state import flatten

    found = hashlib.sha256(repr(state["loss"]).encode())
    for path, tensor in sorted(flatten({name: state[name] for name in ("model", "optimizer")}).tensors.items()):
        found.update(path.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def save(work: Path, number: int) -> None:
    """Train and save; stand still, as a machine that hangs."""
    import evergrad as eg

    state = made(1)
    ck = eg.Checkpointer(work / "run", tiers=tiers(work, number))
    for step in (1, 2, 3):
        train(state)
        pending = ck.save(step, state)
    pending.wait("persistent", timeout=60)
    saved = digest(state)
    train(state)
    ck.save(4, state).wait(timeout=60)  # on this machine only
    print(json.dumps({"saved": saved, "files": _files(work)}), flush=True)
    time.sleep(600)


def restore(work: Path, number: int) -> None:
    """Go on with what the URL has; nothing else is there."""
    import evergrad as eg

    before = _files(work) + _files(Path("/dev/shm"))
    state = made(2)
    train(state)
    with eg.Checkpointer(work / "run", tiers=tiers(work, number)) as ck:
        nothing = ck.restore(state)  # this job has saved nothing, and this machine has nothing
        step = ck.restore(state, source=URL)
        told = {"restored": digest(state), "step": step, "nothing": nothing, "before": before}
        told["tier"] = ck.restored.tier if ck.restored is not None else None
    print(json.dumps(told), flush=True)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _others() -> list[str]:
    """What runs on the machines: all but this process and the service."""
    found, here = [], os.readlink("/proc/self/ns/net")
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # dead by now
            if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") != here:
                found.append(Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def main() -> None:
    folder = sys.argv[1]
    if len(sys.argv) > 2:
        number = int(sys.argv[3])
        {"save": save, "restore": restore}[sys.argv[2]](settle_in(folder, number), number)
        return
    watchdog = threading.Timer(90, os._exit, [3])  # the first process of a namespace gets no alarm
    watchdog.daemon = True
    watchdog.start()
    with service():
        with machine(1, "save", folder) as first:
            print(hear(first), flush=True)
            running = _others()
        for _ in range(1000):
            if not _others():
                break
            time.sleep(0.01)
        print(json.dumps({"ran": running, "left": _others(), "seen": _files(Path(folder))}), flush=True)
        with machine(2, "restore", folder) as second:
            print(hear(second), flush=True)


if __name__ == "__main__":
    main()
