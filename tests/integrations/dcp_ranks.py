"""Ranks that use torch.distributed.checkpoint, for tests: `python dcp_ranks.py FOLDER`.

Runs every scenario in a folder of its own, and leaves there what went wrong, if anything did: `failure.txt`. torch is
imported once; the ranks are forked before there is any other thread. A scenario is a list of phases, each with its own
number of ranks and its own process group; 0 is a process without one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP would import it in every rank
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

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def checkpointer() -> eg.Checkpointer:
    return eg.Checkpointer(FOLDER / "run", tiers=[eg.Memory(), eg.Local(FOLDER / "disk", keep=3)])


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


def save_spread(rank: int) -> None:
    net, optimizer = trained(1, spread=True)
    with checkpointer() as ck:
        stager = ArenaStager(ck)
        future = dcp.async_save(
            state_of(net, optimizer, 120), async_stager=stager, storage_writer=TierWriter(ck, step=120)
        )
        with torch.no_grad():  # the state may change at once
            for parameter in net.parameters():
                parameter.fill_(7)
        future.result()
        assert ck.versions()[0].step == 120
        assert not list(FOLDER.rglob(".metadata")), "a pickle was written"


def load_spread(rank: int) -> None:
    expected = state_of(*trained(1, spread=False), 120)
    net, optimizer = trained(2, spread=True)
    live = state_of(net, optimizer, 0)
    live["history"], live["note"] = [], {"who": ""}
    with checkpointer() as ck:
        dcp.load(live, storage_reader=TierReader(ck))
    set_state_dict(net, optimizer, model_state_dict=live["model"], optim_state_dict=live["optimizer"])
    same(live, expected)
    same(dict(net.state_dict()), dict(expected["model"]))
    same(get_state_dict(net, optimizer)[1]["state"], expected["optimizer"]["state"])
    distributed.barrier()


def load_alone(rank: int) -> None:
    expected = state_of(*trained(1, spread=False), 120)
    live = state_of(*trained(2, spread=False), 0)
    with checkpointer() as ck:
        dcp.load(live, storage_reader=TierReader(ck, version=120))
    same(live["model"], expected["model"])
    same(live["optimizer"]["state"], expected["optimizer"]["state"])
    assert (live["step"], live["history"]) == (120, [0.5, 0.25])


def two_versions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    with checkpointer() as ck:
        for step in (10, 20):
            cut = distribute_tensor(torch.arange(12.0).reshape(4, 3) + step, mesh, [Shard(0)])
            dcp.save(
                {"cut": cut, "mine": torch.full((2,), float(rank)), "step": step}, storage_writer=TierWriter(ck, step)
            )


def damage_20(rank: int) -> None:
    """A bit of rank 1's shard flips, in every tier."""
    shards = [*FOLDER.glob("disk/*/*/v0000000020-01/rank-00001.safetensors")]
    shards += Path(os.environ["EVERGRAD_SHM"]).rglob("rank-00001.*.safetensors")
    assert len(shards) >= 2
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-3] ^= 4
        shard.write_bytes(data)


def load_10(rank: int) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    live = {"cut": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]), "mine": torch.zeros(2), "step": 0}
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evergrad").addHandler(handler)
    with checkpointer() as ck:
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
    same(live, {"cut": torch.arange(12.0).reshape(4, 3) + 10, "mine": torch.full((2,), float(rank)), "step": 10})
    distributed.barrier()


def fail_on_one(rank: int) -> None:
    with checkpointer() as ck:
        state = {"x": torch.ones(3), "extra": {"thing": object() if rank == 1 else 1}}
        try:
            dcp.save(state, storage_writer=TierWriter(ck, 10))
        except dcp.CheckpointException as error:
            assert "extra.thing: a builtins.object has no form that can be stored" in str(error), error
        else:
            raise AssertionError("saved")


def write_folders(rank: int) -> None:
    net, optimizer = trained(1, spread=True)
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": states, "step": 5}, checkpoint_id=FOLDER / "named")
    plain = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    dcp.save(plain, checkpoint_id=FOLDER / "numbered")


def restore_folders(rank: int) -> None:
    spread = distributed.is_initialized()
    expected, expected_optimizer = trained(1, spread=False)
    for name in ("named", "numbered"):
        for fresh in (False, True):
            net, optimizer = trained(2, spread=spread)
            if fresh:
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
            live = {"model": net, "optimizer": optimizer, "step": 0}
            assert restore_dcp(FOLDER / name, live) == ()
            same(dict(net.state_dict()), dict(expected.state_dict()))
            same(optimizer.state_dict()["state"], expected_optimizer.state_dict()["state"])
            assert optimizer.param_groups[0]["lr"] == 0.0625
            assert live["step"] == 5


def refuse_folder(rank: int) -> None:
    """The state of one rank does not fit: nothing is touched on any."""
    net, _ = trained(2, spread=False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state: dict[str, Any] = {"model": net, "step": 0}
    if rank == 1:
        state["model"] = nn.Sequential(nn.Linear(6, 11))
    try:
        restore_dcp(FOLDER / "named", state, where="model/**")
    except EvergradError as error:
        assert "expected float32 (11, 6), found float32 (10, 6)" in str(error), error
    else:
        raise AssertionError("restored")
    same(dict(net.state_dict()), before)


def share(rank: int) -> None:
    """What all ranks have alike is stored once in a tier that they share."""
    tiers = [eg.Memory(), eg.Persistent(str(FOLDER / "shared"))]
    with eg.Checkpointer(FOLDER / "run", tiers=tiers, replicated=True) as ck:
        state = {"a": torch.arange(999.0), "b": torch.ones(999), "pair": (1, torch.arange(5)), "step": 3}
        dcp.save(state, storage_writer=TierWriter(ck, 3))


def load_shared(rank: int) -> None:
    live = {"a": torch.zeros(999), "b": torch.zeros(999), "pair": (0, torch.zeros(5)), "step": 0}
    with eg.Checkpointer(FOLDER / "run", tiers=[eg.Persistent(str(FOLDER / "shared"))], agent=False) as ck:
        dcp.load(live, storage_reader=TierReader(ck))
    assert torch.equal(live["a"], torch.arange(999.0))
    assert torch.equal(live["b"], torch.ones(999))
    assert torch.equal(live["pair"][1], torch.arange(5))
    assert live["step"] == 3


def save_and_die(rank: int) -> None:
    ck = checkpointer()
    state = {"x": torch.arange(1 << 20), "step": 40}
    dcp.async_save(state, async_stager=ArenaStager(ck), storage_writer=TierWriter(ck, step=40))
    os.kill(os.getpid(), signal.SIGKILL)


def load_after_death(rank: int) -> None:
    live = {"x": torch.zeros(1 << 20, dtype=torch.int64), "step": 0}
    with checkpointer() as ck:
        dcp.load(live, storage_reader=TierReader(ck))
    same(live, {"x": torch.arange(1 << 20), "step": 40})


Phase = tuple[int, Callable[[int], None]]

SCENARIOS: dict[str, list[Phase]] = {
    "reshard": [(4, save_spread), (2, load_spread), (0, load_alone)],
    "corrupt": [(2, two_versions), (0, damage_20), (2, load_10)],
    "fail": [(2, fail_on_one)],
    "shared": [(2, share), (2, load_shared), (0, load_shared)],
    "killed": [(0, save_and_die), (0, load_after_death)],
    "folders": [(4, write_folders), (2, restore_folders), (0, restore_folders), (2, refuse_folder)],
}


def run_rank(phase: Callable[[int], None], rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    signal.alarm(90)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        if world_size:
            store = f"file://{FOLDER}/store-{phase.__name__}"
            distributed.init_process_group("gloo", store, rank=rank, world_size=world_size)
        phase(rank)
        if world_size:
            distributed.destroy_process_group()
    except BaseException:
        with (FOLDER / "failure.txt").open("a") as out:
            out.write(f"rank {rank} in {phase.__name__}:\n{traceback.format_exc()}\n")
        os._exit(1)
    os._exit(0)


def run_phase(phase: Callable[[int], None], world_size: int) -> bool:
    children = []
    for rank in range(max(world_size, 1)):
        if (child := os.fork()) == 0:
            run_rank(phase, rank, world_size)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    expected = -signal.SIGKILL if phase is save_and_die else 0
    if any(code != expected for code in codes):
        with (FOLDER / "failure.txt").open("a") as out:
            out.write(f"{phase.__name__}: exit codes {codes}\n")
        return False
    return True


def main() -> None:
    global FOLDER  # noqa: PLW0603 - each scenario has its own, and the ranks are forked after it was set
    root = FOLDER
    chosen = sys.argv[2:] or list(SCENARIOS)
    for name in chosen:
        FOLDER = root / name
        FOLDER.mkdir()
        all(run_phase(phase, world_size) for world_size, phase in SCENARIOS[name])


if __name__ == "__main__":
    main()
