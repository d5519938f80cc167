"""One measurement in a process of its own: `python listing.py CONTENDER FILE` prints what it took, as JSON.

The contender's library is imported first; then it says "ready" and waits for a line on stdin, so that several
can import at once and list one after the other. Only the listing is timed, and only its memory counts.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

__all__ = ["CONTENDERS"]

Listing = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of every tensor."""


def _evergrad() -> Callable[[str], Listing]:
    from evergrad import open_checkpoint

    def listing(path: str) -> Listing:
        with open_checkpoint(path) as checkpoint:
            return [(name, info.shape, info.dtype.value) for name, info in checkpoint.tensors.items()]

    return listing


def _torch_load(mmap: bool) -> Callable[[str], Listing]:
    import torch

    def listing(path: str) -> Listing:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()]

    return listing


def _safe_open() -> Callable[[str], Listing]:
    import torch  # noqa: F401  # safe_open would import it inside the timed part
    from safetensors import safe_open

    def listing(path: str) -> Listing:
        found: Listing = []
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                piece = file.get_slice(name)
                found.append((name, tuple(piece.get_shape()), piece.get_dtype()))
        return found

    return listing


def _load_file() -> Callable[[str], Listing]:
    from safetensors.torch import load_file

    def listing(path: str) -> Listing:
        return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in load_file(path).items()]

    return listing


CONTENDERS: dict[str, dict[str, Callable[[], Callable[[str], Listing]]]] = {
    ".pt": {
        "evergrad": _evergrad,
        "torch.load": lambda: _torch_load(False),
        "torch.load mmap": lambda: _torch_load(True),
    },
    ".safetensors": {
        "evergrad": _evergrad,
        "safe_open": _safe_open,
        "load_file": _load_file,
    },
}
"""By file ending: what imports a library and returns the function to be timed."""


def _peak_kib() -> int:
    """The process's largest resident size, in KiB.

    VmHWM and not `ru_maxrss`, which starts at the parent's size and cannot be reset.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> None:
    """Let the peak begin anew: importing a library takes more for a moment than it keeps, which would hide growth."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        print("the peak of the import counts: /proc/self/clear_refs cannot be written", file=sys.stderr)


def _digest(found: Listing) -> str:
    """The same for all contenders that listed the same, however they spell dtypes and whatever their order."""
    spelling = {"F32": "float32"}
    rows = sorted((name, shape, spelling.get(dtype, dtype.removeprefix("torch."))) for name, shape, dtype in found)
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _measure(contender: str, path: str) -> dict[str, object]:
    listing = CONTENDERS[Path(path).suffix][contender]()
    print("ready", flush=True)
    sys.stdin.readline()
    _forget_peak()
    before, maxrss_before = _peak_kib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = perf_counter(), process_time()
    found = listing(path)
    took, busy = perf_counter() - start, process_time() - busy
    process_cpu = process_time()
    after, maxrss = _peak_kib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measures = {
        "listing_s": took,
        "listing_cpu_s": busy,
        "process_cpu_s": process_cpu,
        "growth_mib": (after - before) / 1024,
        "maxrss_growth_mib": (maxrss - maxrss_before) / 1024,
        "peak_mib": after / 1024,
    }
    return {"measures": measures, "tensors": len(found), "digest": _digest(found)}


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
