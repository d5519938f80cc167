"""How fast digests are, and what a check takes by the size of the model: on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import torch
from benchmarks.harness import Sample
from torch import nn
from torch.nn.functional import cross_entropy

from evergrad.recovery.guard.digests import digest_tensors
from evergrad.recovery.guard.norms import gradient_norm, magnitudes
from evergrad.recovery.guard.replicas import replica_of

__all__ = ["EVERY", "digest_cases", "step_share"]

EVERY = 50
SIZES = {"one tensor": (1, 256), "layers of 4 MiB": (64, 4), "10,000 small tensors": (10_000, 0)}


def digest_cases(device: str, repetitions: int, *, quick: bool) -> Iterator[tuple[str, dict[str, list[Sample]]]]:
    """256 MiB (a tenth if quick) in different pieces: the digest against one plain copy of the same bytes."""
    for name, (count, mebibytes) in SIZES.items():
        numel = mebibytes << 18 if mebibytes else 4096 + 3
        count, numel = (count, numel // 8) if quick else (count, numel)
        tensors = {f"model/layer{n}.weight": torch.randn(numel, device=device) for n in range(count)}
        targets = [torch.empty_like(tensor) for tensor in tensors.values()]

        def copy(tensors: dict[str, torch.Tensor] = tensors, targets: list[torch.Tensor] = targets) -> None:
            for target, tensor in zip(targets, tensors.values(), strict=True):
                target.copy_(tensor)

        size = sum(tensor.nbytes for tensor in tensors.values())
        acts: dict[str, Callable[[], object]] = {
            "copy": copy,
            "digest": lambda tensors=tensors: digest_tensors(tensors),  # type: ignore[misc]
            "largest magnitude": lambda tensors=tensors: magnitudes(tensors),  # type: ignore[misc]
            "gradient norm": lambda tensors=tensors: gradient_norm(tensors.values()),  # type: ignore[misc]
        }
        samples: dict[str, list[Sample]] = {act: [] for act in acts}
        for turn in range(repetitions + 1):
            for act, run in acts.items():
                took = timed(run, device)
                if turn:
                    samples[act].append({"time_s": took, "gb_s": size / 1e9 / took})
        yield f"{device}, {name}, {size >> 20} MiB", samples


def step_share(device: str, width: int, layers: int, repetitions: int) -> dict[str, list[Sample]]:
    """A training step, and what the guard adds to it by itself: the digests of a check, the norm of a step."""
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)), nn.Linear(width, 10)
    )
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    x, y = torch.randn(4 * width, width, device=device), torch.randint(0, 10, (4 * width,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def check() -> None:
        replica = replica_of(net, [optimizer])
        replica.digests()
        magnitudes({path: tensor for path, tensor in replica.tensors.items() if path.startswith("model/")})

    # As DDP's buckets hold them: flat, 25 MiB each.
    buckets = torch.split(torch.randn(sum(each.numel() for each in net.parameters()), device=device), 25 << 18)

    def norm() -> None:
        gradient_norm(buckets)

    samples: dict[str, list[Sample]] = {"step": [], "guard": []}
    for turn in range(repetitions + 2):
        step_s = timed(step, device)
        check_s, norm_s = timed(check, device), timed(norm, device)
        if turn > 1:
            samples["step"].append({"time_s": step_s})
            share = (check_s / EVERY + norm_s) / step_s
            samples["guard"].append({"time_s": check_s, "norm_s": norm_s, "share": share})
    return samples


def timed(act: Callable[[], object], device: str) -> float:
    """Seconds, with everything on the device done."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start
