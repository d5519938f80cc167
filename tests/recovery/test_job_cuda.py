"""The same promises with models on a GPU, over gloo: two ranks share one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forkserver import Ran

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = ["--device", "cuda"]


@pytest.mark.parametrize("site", ["bucket=1 at=during", "phase=forward", "phase=optimizer"])
def test_a_spare_on_a_gpu_ends_with_the_undisturbed_weights(launch: Callable[..., Ran], site: str) -> None:
    clean = launch("-n", 2, name="clean", arguments=CUDA)
    ran = launch("-n", 2, "--spares", 1, "--fail", f"kill rank=1 step=5 {site}", arguments=CUDA)
    assert (clean.code, ran.code) == (0, 0), clean.said + ran.said
    assert {one["rank"]: one["state"] for one in ran.results.values()} == {
        one["rank"]: one["state"] for one in clean.results.values()
    }
    assert ran.events("rank_joined")[0]["exact"]


@pytest.mark.parametrize("strategy", ["rollback", "forward"])
def test_survivors_on_a_gpu_go_on_alike(launch: Callable[..., Ran], strategy: str) -> None:
    failure = "kill rank=0 step=4 bucket=0 at=after"
    ran = launch("-n", 3, "--strategy", strategy, "--fail", failure, arguments=CUDA)
    assert ran.code == 0, ran.said
    assert len(ran.results) == 2
    assert len({one["weights"] for one in ran.results.values()}) == 1
