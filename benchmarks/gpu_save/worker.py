"""One contender in a process of its own: trains, saves now and then, and writes down what each save cost."""

from __future__ import annotations

import json
import statistics
import threading
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.gpu_save.contenders import CONTENDERS, Contender
from benchmarks.gpu_save.trainings import CASES, Training
from benchmarks.states import settle

__all__ = ["BARE", "work"]

BARE = "bare copy"
GAP, WARM_UP, AT_LEAST, MOST = 6, 5, 5, 400
NEAR = 5
"""Steps, the saving one and those after it, in which a capture has long ended."""


@dataclass
class Findings:
    """What is written down; again after every save, so that a worker that is killed leaves what it knew."""

    path: Path
    samples: list[dict[str, float]] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    state_bytes: int = 0

    def write(self) -> None:
        """As JSON."""
        data = {key: value for key, value in vars(self).items() if key != "path"}
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(self.path)


def work(case: str, name: str, folder: Path, out: Path, device: str, saves: int, seconds: float, quick: bool) -> None:
    """Measure one contender for at most so many saves and so many seconds."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP; one process is meant
    end = perf_counter() + seconds
    findings = Findings(out)
    contender: Contender | None = None
    try:
        training = Training(CASES[case], torch.device(device), quick)
        for _ in range(WARM_UP):
            training.step(_nothing)
        findings.state_bytes = sum(tensor.nbytes for tensor in training.tensors().values())
        print(f"{case}, {name}: {findings.state_bytes / 1e9:.3f} GB in {len(training.tensors())} tensors", flush=True)
        if name == BARE:
            _bare(training, findings, saves)
        else:
            contender = CONTENDERS[name](training, folder)
            _measure(training, contender, findings, saves, end)
            if said := contender.check():
                print(f"{case}, {name}: {said}", flush=True)
    except Exception as error:
        traceback.print_exc()
        findings.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if contender is not None:
        findings.notes += contender.notes
    findings.write()
    if contender is not None:
        contender.close()


def _measure(training: Training, contender: Contender, findings: Findings, saves: int, end: float) -> None:
    """Some steps, a save with the steps until it is on the disk, some steps, and so on."""
    gap = _steps(training, contender, GAP)
    longest, failures = 0.0, 0
    number = 0
    while number < contender.warm_ups + saves and perf_counter() + longest < end:
        start = perf_counter()
        settle()
        training.sync()
        try:
            window, sample = _save(training, contender, number)
        except Exception as error:
            failures += 1
            if failures > 1 or not contender.notes:  # a contender that changed its ways gets another chance
                raise
            print(f"save {number}: {type(error).__name__}: {error}", flush=True)
            continue
        contender.tidy()
        after = _steps(training, contender, GAP)
        base = statistics.median([*gap, *after])
        gap = after
        sample |= {
            "base_s": base,
            "first_s": window[0] - base,
            "near_s": sum(window[:NEAR]) - NEAR * base,
            "added_s": sum(window) - len(window) * base,
            "steps": float(len(window)),
        }
        print(json.dumps({"save": number} | sample), flush=True)
        if number >= contender.warm_ups:
            findings.samples.append(sample)
            findings.base.append(base)
            findings.write()
        longest = max(longest if number else 0.0, perf_counter() - start)
        number += 1


def _save(training: Training, contender: Contender, number: int) -> tuple[list[float], dict[str, float]]:
    """The times of the steps from a save until it is on the disk, and of the save itself."""
    durable: list[float] = []
    errors: list[BaseException] = []
    start = perf_counter()
    wait = contender.save(number)
    returned = perf_counter()

    def watch() -> None:
        try:
            wait()
            durable.append(perf_counter() - start)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    window: list[float] = []
    begun = start  # the step that saves is the save and the step
    try:
        while len(window) < AT_LEAST or (thread.is_alive() and len(window) < MOST):
            training.step(contender.before_update)
            now = perf_counter()
            window.append(now - begun)
            begun = now
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return window, {"returns_s": returned - start, "durable_s": durable[0]}


def _steps(training: Training, contender: Contender, count: int) -> list[float]:
    training.step(contender.before_update)
    found = []
    for _ in range(count):
        start = perf_counter()
        training.step(contender.before_update)
        found.append(perf_counter() - start)
    return found


def _bare(training: Training, findings: Findings, saves: int) -> None:
    """The same bytes into pinned memory, and nothing else."""
    sources = list(training.tensors().values())
    whole = torch.empty(findings.state_bytes, dtype=torch.uint8, pin_memory=training.device.type == "cuda")
    places: list[Any] = []
    at = 0
    for tensor in sorted(sources, key=lambda tensor: -tensor.element_size()):
        places.append((whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor.detach()))
        at += tensor.nbytes
    for number in range(saves + 1):
        training.sync()
        start = perf_counter()
        for place, tensor in places:
            place.copy_(tensor, non_blocking=True)
        training.sync()
        if number:
            findings.samples.append({"returns_s": perf_counter() - start})


def _nothing() -> None:
    """There is nothing to wait for."""
