"""What the studies' tests share: plans over toy workloads, and trials of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse
from evergrad.study.trials import Trial

TOYS = Path(__file__).parent / "toys.py"

PLAN = """
study = "toy"
seed = 3

[axes]
flips = [1, 4]

[training]
workload = "{toys}:{name}"
batch_size = 32
checkpoint = 1
epochs = {epochs}
learning_rate = 0.05

[trial]
fault = "{fault}"
where = "{where}"

[sampling]
trainings = {trainings}
"""

MakePlan = Callable[..., Plan]


@pytest.fixture
def toy_plan() -> MakePlan:
    """A plan over one of the toys; settings by name."""

    def make(name: str = "small", **given: Any) -> Plan:
        return Plan.of(parse(toy_text(name, **given), "toy.toml"))

    return make


@pytest.fixture
def toy_toml() -> Callable[..., str]:
    """The text of such a plan."""
    return toy_text


def toy_text(name: str = "small", *, more: str = "", **given: Any) -> str:
    """The plan with these settings, and more tables behind."""
    settings = {"fault": "bitflip", "where": "role:model", "trainings": 3, "epochs": 1} | given
    return PLAN.format(toys=TOYS, name=name, **settings) + more


@pytest.fixture
def first_trial(toy_plan: MakePlan) -> Callable[..., Trial]:
    """One trial of such a plan."""

    def make(name: str = "small", repetition: int = 0, cell: int = 0, **given: Any) -> Trial:
        return toy_plan(name, **given).cells[cell].trial(repetition)

    return make
