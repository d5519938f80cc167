"""Torch, and what depends on it: looked at in another process, which may crash, hang or not start at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evergrad.doctor.check import Check, checked
from evergrad.errors import reason

Probe = dict[str, dict[str, Any]]
"""Of each part its facts, or the `error` that it ended with; what is missing was not reached."""

_LIMIT_S = 120.0

# A line a part, at once: what was known before a crash is not lost.
_CODE = r"""
import json, sys, warnings
warnings.simplefilter("ignore")
def part(name, look):
    try:
        facts = look()
    except BaseException as error:
        facts = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    print(json.dumps({name: facts}), flush=True)
def numpy():
    import numpy
    return {"version": numpy.__version__}
def xxhash():
    import xxhash
    return {"version": xxhash.VERSION, "digest": xxhash.xxh3_128_hexdigest(b"evergrad")}
def torch():
    import torch
    torch.ones(2).numpy()
    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
def cuda():
    import torch
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append({"name": device.name, "total_bytes": total, "free_bytes": free})
    return {"built": torch.version.cuda or torch.version.hip, "devices": found}
def transports():
    import torch.distributed as dist
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
def gloo():
    import datetime, torch, torch.distributed as dist
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return {"works": True}
for look in (numpy, xxhash, torch, cuda, transports, gloo):
    part(look.__name__, look)
"""


def probe(python: str = sys.executable, limit_s: float = _LIMIT_S) -> Probe:
    """Import torch in a process of its own, and ask it. What it says before it ends counts, however it ends."""
    found: Probe = {}
    try:
        done = subprocess.run(
            [python, "-c", _CODE], stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
        said, ended = done.stdout, f"the process that tried it ended with {_ending(done.returncode)}"
    except subprocess.TimeoutExpired as late:
        said, ended = late.stdout or b"", f"no answer within {limit_s:.0f} s"
    except OSError as error:
        said, ended = b"", f"no process could be started: {reason(error)}"
    for line in said.splitlines():
        try:
            told = json.loads(line)
        except ValueError:  # what a library printed
            continue
        if isinstance(told, dict):
            found |= {name: facts for name, facts in told.items() if isinstance(facts, dict)}
    for name in ("numpy", "xxhash", "torch", "cuda", "transports", "gloo"):
        found.setdefault(name, {"error": ended})
    return found


def look(found: Probe) -> Iterator[Check]:
    """Devices, and how ranks can talk to each other."""
    yield from checked("cuda", lambda: _cuda(found))
    yield from checked("gloo", lambda: _gloo(found))
    yield from checked("nccl", lambda: _nccl(found))


def _cuda(found: Probe) -> Iterator[Check]:
    facts = found["cuda"]
    there = _has_gpu()
    if "error" in facts:
        yield Check("cuda", "failed" if there and "error" not in found["torch"] else "unknown", facts["error"])
        return
    devices = facts.get("devices") or []
    for index, device in enumerate(devices):
        free, total = device["free_bytes"] / 1e9, device["total_bytes"] / 1e9
        told = f"{device['name']}, {free:.1f} of {total:.1f} GB free"
        yield Check(f"cuda:{index}", "ok", told, facts=device)
    if devices:
        return
    if not there:
        yield Check("cuda", "ok", "no device: training runs on the CPU")
    elif facts.get("built"):
        todo = "see whether nvidia-smi works, and what CUDA_VISIBLE_DEVICES says"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
        yield Check("cuda", "degraded", f"there is a device, and torch cannot use it{why}", todo)
    else:
        yield Check("cuda", "degraded", "there is a device, and this torch was built without CUDA",
                    "install torch's build for CUDA: https://pytorch.org/get-started")  # fmt: skip


def _gloo(found: Probe) -> Check:
    transports, tried = found["transports"], found["gloo"]
    if "error" in transports:
        return Check("gloo", "unknown", transports["error"], "mend torch first")
    if not transports.get("gloo"):
        return Check("gloo", "failed", "torch was built without it: ranks cannot talk to each other",
                     "install torch from PyPI")  # fmt: skip
    if "error" in tried:
        return Check("gloo", "failed", tried["error"],
                     "see whether this host's name resolves: getent hosts $(hostname)")  # fmt: skip
    return Check("gloo", "ok", "works, tried with one rank")


def _nccl(found: Probe) -> Check:
    transports, devices = found["transports"], found["cuda"].get("devices") or []
    if "error" in transports:
        return Check("nccl", "unknown", transports["error"], "mend torch first")
    if transports.get("nccl"):
        return Check("nccl", "ok", "built in" if devices else "built in, with no device to use it")
    if devices:
        return Check("nccl", "degraded", "torch was built without it: ranks exchange gradients through gloo",
                     "install torch's build for CUDA: https://pytorch.org/get-started")  # fmt: skip
    return Check("nccl", "ok", "not built in, and not needed without a GPU")


def _has_gpu() -> bool:
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
