"""The examples: plain DDP, and the ten lines that make it go on, with the same losses; and a guarded loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forkserver import Ran

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def losses(ran: Ran) -> list[str]:
    """What rank 0 printed."""
    assert ran.code == 0, ran.said
    found = [line for line in ran.stdout.splitlines() if "loss" in line]
    assert len(found) >= 10, ran.said
    return found


def test_the_wrapped_loop_prints_the_losses_of_the_plain_one_also_when_a_rank_is_lost(
    launch: Callable[..., Ran],
) -> None:
    plain = losses(launch("-n", 2, name="plain", script=EXAMPLES / "ddp_plain.py"))
    assert losses(launch("-n", 2, name="wrapped", script=EXAMPLES / "ddp_evergrad.py")) == plain
    killed = launch("-n", 2, "--spares", 1, "--fail", "kill rank=1 step=9", script=EXAMPLES / "ddp_evergrad.py")
    assert len(killed.events("kill_injected")) == 1
    assert losses(killed) == plain


def test_the_guarded_loop_prints_the_same_losses_with_a_flipped_bit(launch: Callable[..., Ran]) -> None:
    undisturbed = losses(launch("-n", 3, name="undisturbed", script=EXAMPLES / "guarded.py"))
    fault = "flip rank=1 step=9 phase=optimizer where=model/2.weight bits=mantissa"
    flipped = launch("-n", 3, "--fail", fault, script=EXAMPLES / "guarded.py")
    assert [event["path"] for event in flipped.events("corruption_found")] == ["model/2.weight"]
    assert losses(flipped) == undisturbed
