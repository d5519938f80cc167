"""Whole jobs that lose a rank: whoever survives goes on, all alike, and with a spare as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nursery import Ran

Launch = Callable[..., Ran]


@pytest.fixture(scope="session")
def undisturbed(nursery, tmp_path_factory) -> Ran:
    """The same job without any failure."""
    ran = nursery.run(tmp_path_factory.mktemp("undisturbed"), "-n", 4)
    assert ran.code == 0, ran.said
    return ran


def test_a_spare_takes_the_place_of_rank_0_and_nothing_is_different(launch: Launch, undisturbed: Ran) -> None:
    ran = launch("-n", 4, "--spares", 1, "--fail", "kill rank=0 step=3 bucket=1 at=during")
    assert ran.code == 0, ran.said
    by_rank = {result["rank"]: result["state"] for result in ran.results.values()}
    assert by_rank == {result["rank"]: result["state"] for result in undisturbed.results.values()}
    assert ran.results.keys() == {1, 2, 3, 4}
