"""What every table says beside its numbers: seed, commit, width, data, thresholds, and what differs from the paper."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

from evergrad.records import Json
from evergrad.study.golden import GoldenRun
from evergrad.study.plan import Plan
from evergrad.study.trials import Command
from evergrad.training.settings import Direction


def run_facts(command: Sequence[str] = ()) -> dict[str, Json]:
    """Who writes the journal: versions, machine, and the commit if this is a checkout."""
    return {
        "command": " ".join(command),
        "evergrad": str(import_module("evergrad").__version__),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def facts_of(plan: Plan, golden: Sequence[GoldenRun], runs: Sequence[dict[str, Json]]) -> dict[str, str]:
    """By name, in the order of printing."""
    limits, rules, sampling = plan.thresholds, plan.rules, plan.sampling
    found = {"study": f"{plan.study}{f' at scale {plan.scale}' if plan.scale else ''}", "seed": str(plan.seed)}
    if plan.source:
        found["after"] = plan.source
    if plan.differs:
        found["differs"] = plan.differs
    found |= _trainings(plan)
    found |= _faults(plan)
    models = [
        f"{_name(one)}: width {one.facts['width']}, {one.facts['parameters']} parameters"
        for one in golden
        if "parameters" in one.facts
    ]
    found |= {"models": "; ".join(dict.fromkeys(models))} if models else {}
    for name in sorted({name for one in golden for name in one.facts} - {"model", "width", "parameters"}):
        told = dict.fromkeys(one.facts[name] for one in golden if name in one.facts)
        found[f"{name} (models)" if name in found else name] = "; ".join(told)
    found["golden runs"] = "; ".join(
        f"{_name(one)} {one.observation.metrics[0]:.4f} → {one.observation.metrics[-1]:.4f}" for one in golden
    )
    found["N-EV"] = f"NaN, infinity or |number| > {rules.extreme:g} in state, loss or outputs"
    found["given up"] = f"as soon as it is {' or '.join(rules.abandon)}" if rules.abandon else "never"
    worse, better = _sides(plan, golden)
    found |= _directions(plan, golden)
    found["degraded"] = f"metric {worse} than the golden run's by more than {limits.margin:g}"
    found["failed"] = f"crashed, not finished, or at most {limits.chance:g} {better} guessing"
    found["identical"] = f"the same final {limits.result} as the golden run"
    kind = "valid at any time" if sampling.stop else sampling.interval
    found["intervals"] = f"{kind}, {sampling.confidence:.0%}"
    for name in ("command", "commit", "evergrad", "torch", "python", "machine"):
        values = list(dict.fromkeys(str(run[name]) for run in runs if run.get(name)))
        if values:
            found[name] = "; ".join(values)
    return found


def _directions(plan: Plan, golden: Sequence[GoldenRun]) -> dict[str, str]:
    """The metrics of programs, and those of workloads that are better lower: which values are better, and why."""
    told: dict[str, None] = {}
    for cell in plan.cells:
        if isinstance(one := cell.training, Command):
            by = "as the plan states" if one.direction else "by its name (direction in [command] states another)"
            told[f"metric {one.metric}: {one.judged_by.words}, {by}"] = None
    for run in golden:
        if "command" not in run.settings and run.direction is Direction.LOWER:
            told[f"metric of {_name(run)}: {run.direction.words}"] = None
    return {"direction": "; ".join(told)} if told else {}


def _sides(plan: Plan, golden: Sequence[GoldenRun]) -> tuple[str, str]:
    """The words for a worse metric and for one that is better than guessing, where all cells have one direction."""
    made = {run.key: run.direction for run in golden}
    found: set[Direction | None] = set()
    for cell in plan.cells:
        if isinstance(one := cell.training, Command):
            found.add(one.judged_by)
        else:
            found.add(made.get(one.key, None if one.workload else Direction.HIGHER))
    if found == {Direction.LOWER}:
        return "higher", "below"
    return ("lower", "above") if found == {Direction.HIGHER} else ("worse", "better than")


def _faults(plan: Plan) -> dict[str, str]:
    """What all cells share, of how they are hit; what differs is an axis, and in the table."""
    told = [
        {
            "fault": cell.fault,
            "where": cell.where,
            "target": cell.target,
            "step": cell.step,
            "hit": f"{cell.corrupt} of {getattr(cell.training, 'ranks', 1)} ranks",
        }
        for cell in plan.cells
        if cell.saving is None
    ]
    shared = {name: told[0][name] for name in told[0] if len({one[name] for one in told}) == 1} if told else {}
    usual = {"target": "state", "step": 0, "hit": "1 of 1 ranks", "where": ""}
    parts = [f"{name} {value}" for name, value in shared.items() if value != usual.get(name)]
    return {"faults": ", ".join(parts)} if parts else {}


def _trainings(plan: Plan) -> dict[str, str]:
    """What all cells share, of how they train."""
    settings = [cell.training for cell in plan.cells]
    if any(isinstance(one, Command) for one in settings):
        return {"training": "; ".join(dict.fromkeys(one.command for one in settings if isinstance(one, Command)))}
    told = [one.to_json() for one in settings]
    shared = {}
    for name in (
        "width",
        "data",
        "precision",
        "mechanism",
        "optimizer",
        "learning_rate",
        "batch_size",
        "checkpoint",
        "epochs",
    ):
        if name in ("width", "data") and any(one["workload"] for one in told):
            continue
        if len(values := list(dict.fromkeys(one[name] for one in told if name in one))) == 1:
            shared[name] = values[0]
    return {"training": ", ".join(f"{name} {value}" for name, value in shared.items())}


def _name(golden: GoldenRun) -> str:
    told = golden.settings
    if "command" in told:
        return str(told["command"])
    words = [str(told.get("workload") or told.get("model"))]
    if told.get("precision", "float32") != "float32":
        words.append(str(told["precision"]))
    return " ".join(words)


def _commit() -> str:
    """Of the checkout that this package lies in, if it lies in one."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return ""
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    if head.returncode:
        return ""
    return head.stdout.strip() + (" with local changes" if changed.stdout.strip() else "")
