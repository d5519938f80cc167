"""`evergrad study show`: what a study asks, how, and what differs from the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, print_json, printable, told
from evergrad.cli.study.arguments import Name, Scale

if TYPE_CHECKING:
    from evergrad.records import Json
    from evergrad.study.plan import Plan

EPILOG = (
    "Examples:\n\n  evergrad study show bitflip-nev --scale paper\n\n"
    "  evergrad study show bitflip-nev --plan > mine.toml\n\n"
    "Exit codes: 0 shown · 2 usage, or a wrong plan."
)


def show(
    name: Name,
    scale: Scale = None,
    plan_text: Annotated[bool, typer.Option("--plan", help="Print the plan itself, as TOML.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show a study's question, cells, training, thresholds, and what differs from the published one."""
    from evergrad.study.facts import facts_of
    from evergrad.study.plan import Plan
    from evergrad.study.plan_files import read_plan_text

    source = read_plan_text(name)
    plan = Plan.of(source, scale)
    if plan_text:
        print(source.text, end="")
        return 0
    facts = {key: text for key, text in facts_of(plan, (), ()).items() if text}
    if as_json:
        print_json(_json(plan, facts))
        return 0
    print(printable(f"{plan.study}: {plan.title}"))
    if plan.question:
        print(told("", plan.question))
    print()
    for axis, values in plan.axes.items():
        print(told(f"  {axis:10} ", ", ".join(map(str, values)), indent=13))
    each = plan.cells[0].trainings
    most = "at most " if plan.sampling.stop else ""
    print(printable(f"  {'trials':10} {len(plan.cells)} cells × {most}{each:,} trainings = {plan.trials:,}"))
    print()
    for key, text in facts.items():
        print(told(f"  {key:12} ", text, indent=15))
    return 0


def _json(plan: Plan, facts: dict[str, str]) -> Json:
    return {
        "study": plan.study,
        "title": plan.title,
        "question": plan.question,
        "source": plan.source,
        "differs": plan.differs,
        "scale": plan.scale,
        "seed": plan.seed,
        "axes": {axis: list(values) for axis, values in plan.axes.items()},
        "cells": len(plan.cells),
        "trainings": plan.cells[0].trainings,
        "trials": plan.trials,
        "facts": dict(facts),
    }
