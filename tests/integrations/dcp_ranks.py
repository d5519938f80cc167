"""Ranks of the tests that use torch.distributed.checkpoint on several ranks: what each of them does."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import evergrad as eg
from evergrad.checkpoint.restore.dcp_folder import restore_dcp
from evergrad.errors import EvergradError
from evergrad.integrations.dcp import ArenaStager, TierReader, TierWriter
from ranks import Rank


def in_group(me: Rank, function: Callable[[Rank], None]) -> None:
    """Call a function in a process group."""
    _raise_warnings()
    me.join()
    function(me)


def alone(me: Rank, function: Callable[[Rank], None]) -> None:
    """Call a function without a process group."""
    _raise_warnings()
    function(me)


def _raise_warnings() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def checkpointer(me: Rank) -> eg.Checkpointer:
    return eg.Checkpointer(me.folder / "run", tiers=[eg.Memory(), eg.Local(me.folder / "disk", keep=3)])


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3, bias=False))


def trained(seed: int, *, spread: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training on any number of ranks: every rank has the same batch, and all is exact in float32."""
    net = network(seed)
    if spread:
        fully_shard(net, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.grad = torch.full_like(parameter, 0.25 * (number + 1))
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0625
    return net, optimizer


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(a: Any, b: Any) -> None:
    """Bit for bit, DTensors as a whole, containers throughout."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(whole(a), whole(b)), (whole(a), whole(b))
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        for key in a:
            same(a[key], b[key])
    else:
        assert a == b, (a, b)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model, states = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": states, "step": step, "history": [0.5, 0.25], "note": {"who": "me"}}


def save_spread(me: Rank) -> None:
    net, optimizer = trained(1, spread=True)
    with checkpointer(me) as ck:
        stager = ArenaStager(ck)
        future = dcp.async_save(
            state_of(net, optimizer, 120), async_stager=stager, storage_writer=TierWriter(ck, step=120)
        )
        with torch.no_grad():  # the state may change at once
            for parameter in net.parameters():
                parameter.fill_(7)
        future.result()
        assert ck.versions()[0].step == 120
        assert not list(me.folder.rglob(".metadata")), "a pickle was written"


def load_spread(me: Rank) -> None:
    expected = state_of(*trained(1, spread=False), 120)
    net, optimizer = trained(2, spread=True)
    live = state_of(net, optimizer, 0)
    live["history"], live["note"] = [], {"who": ""}
    with checkpointer(me) as ck:
        dcp.load(live, storage_reader=TierReader(ck))
    set_state_dict(net, optimizer, model_state_dict=live["model"], optim_state_dict=live["optimizer"])
    same(live, expected)
    same(dict(net.state_dict()), dict(expected["model"]))
    same(get_state_dict(net, optimizer)[1]["state"], expected["optimizer"]["state"])
    distributed.barrier()


def load_alone(me: Rank) -> None:
    expected = state_of(*trained(1, spread=False), 120)
    live = state_of(*trained(2, spread=False), 0)
    with checkpointer(me) as ck:
        dcp.load(live, storage_reader=TierReader(ck, version=120))
    same(live["model"], expected["model"])
    same(live["optimizer"]["state"], expected["optimizer"]["state"])
    assert (live["step"], live["history"]) == (120, [0.5, 0.25])


def two_versions(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    with checkpointer(me) as ck:
        for step in (10, 20):
            cut = distribute_tensor(torch.arange(12.0).reshape(4, 3) + step, mesh, [Shard(0)])
            dcp.save(
                {"cut": cut, "mine": torch.full((2,), float(me.rank)), "step": step},
                storage_writer=TierWriter(ck, step),
            )


def damage_20(me: Rank) -> None:
    """A bit of rank 1's shard flips, in every tier."""
    shards = [*me.folder.glob("disk/*/*/v0000000020-01/rank-00001.safetensors")]
    shards += Path(os.environ["EVERGRAD_SHM"]).rglob("rank-00001.*.safetensors")
    assert len(shards) >= 2
    for shard in shards:
        with suppress(FileNotFoundError), shard.open("r+b") as file:  # an agent that leaves removes the older arena
            file.seek(-3, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-3, os.SEEK_END)
            file.write(bytes([byte ^ 4]))


def load_10(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    live = {"cut": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]), "mine": torch.zeros(2), "step": 0}
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evergrad").addHandler(handler)
    with checkpointer(me) as ck:
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        try:
            dcp.load(live, storage_reader=TierReader(ck, version=20))
        except dcp.CheckpointException as error:
            # torch 2.11 keeps the reason to itself.
            assert "version 20 cannot be loaded" in str(error) or "metadata is None" in str(error), error
        else:
            raise AssertionError("a corrupt version was loaded")
        assert live["step"] == 0, "something was touched"
        assert not live["mine"].any(), "something was touched"
        dcp.load(live, storage_reader=TierReader(ck))
    assert any("not what was captured" in line and "Loading step 10" in line for line in told), told
    same(live, {"cut": torch.arange(12.0).reshape(4, 3) + 10, "mine": torch.full((2,), float(me.rank)), "step": 10})
    distributed.barrier()


def fail_on_one(me: Rank) -> None:
    with checkpointer(me) as ck:
        state = {"x": torch.ones(3), "extra": {"thing": object() if me.rank == 1 else 1}}
        try:
            dcp.save(state, storage_writer=TierWriter(ck, 10))
        except dcp.CheckpointException as error:
            assert "extra.thing: a builtins.object has no form that can be stored" in str(error), error
        else:
            raise AssertionError("saved")


def write_folders(me: Rank) -> None:
    net, optimizer = trained(1, spread=True)
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": states, "step": 5}, checkpoint_id=me.folder / "named")
    plain = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    dcp.save(plain, checkpoint_id=me.folder / "numbered")


def restore_folders(me: Rank) -> None:
    spread = distributed.is_initialized()
    expected, expected_optimizer = trained(1, spread=False)
    for name in ("named", "numbered"):
        for fresh in (False, True):
            net, optimizer = trained(2, spread=spread)
            if fresh:
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
            live = {"model": net, "optimizer": optimizer, "step": 0}
            assert restore_dcp(me.folder / name, live) == ()
            same(dict(net.state_dict()), dict(expected.state_dict()))
            same(optimizer.state_dict()["state"], expected_optimizer.state_dict()["state"])
            assert optimizer.param_groups[0]["lr"] == 0.0625
            assert live["step"] == 5


def refuse_folder(me: Rank) -> None:
    """The state of one rank does not fit: nothing is touched on any."""
    net, _ = trained(2, spread=False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state: dict[str, Any] = {"model": net, "step": 0}
    if me.rank == 1:
        state["model"] = nn.Sequential(nn.Linear(6, 11))
    try:
        restore_dcp(me.folder / "named", state, where="model/**")
    except EvergradError as error:
        assert "expected float32 (11, 6), found float32 (10, 6)" in str(error), error
    else:
        raise AssertionError("restored")
    same(dict(net.state_dict()), before)


def share(me: Rank) -> None:
    """What all ranks have alike is stored once in a tier that they share."""
    tiers = [eg.Memory(), eg.Persistent(str(me.folder / "shared"))]
    with eg.Checkpointer(me.folder / "run", tiers=tiers, replicated=True) as ck:
        state = {"a": torch.arange(999.0), "b": torch.ones(999), "pair": (1, torch.arange(5)), "step": 3}
        dcp.save(state, storage_writer=TierWriter(ck, 3))


def load_shared(me: Rank) -> None:
    live = {"a": torch.zeros(999), "b": torch.zeros(999), "pair": (0, torch.zeros(5)), "step": 0}
    with eg.Checkpointer(me.folder / "run", tiers=[eg.Persistent(str(me.folder / "shared"))], agent=False) as ck:
        dcp.load(live, storage_reader=TierReader(ck))
    assert torch.equal(live["a"], torch.arange(999.0))
    assert torch.equal(live["b"], torch.ones(999))
    assert torch.equal(live["pair"][1], torch.arange(5))
    assert live["step"] == 3


def save_and_die(me: Rank) -> None:
    ck = checkpointer(me)
    state = {"x": torch.arange(1 << 20), "step": 40}
    dcp.async_save(state, async_stager=ArenaStager(ck), storage_writer=TierWriter(ck, step=40))
    os.kill(os.getpid(), signal.SIGKILL)


def load_after_death(me: Rank) -> None:
    live = {"x": torch.zeros(1 << 20, dtype=torch.int64), "step": 0}
    with checkpointer(me) as ck:
        dcp.load(live, storage_reader=TierReader(ck))
    same(live, {"x": torch.arange(1 << 20), "step": 40})
