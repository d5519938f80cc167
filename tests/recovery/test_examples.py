"""The two examples of the docs: plain DDP, and the ten lines that make it go on; the same losses to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nursery import Ran

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
    assert len(killed.events("killing")) == 1
    assert losses(killed) == plain
