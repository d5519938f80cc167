"""Which node this is, what Slurm says of it, where the head is, and where processes go."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from evergrad.errors import FileAccessError, UsageError
from evergrad.recovery.launch.rendezvous import HeadAddress, await_head, expanded, node_identity
from evergrad.recovery.launch.settings import OPTION_OF, LaunchSettings, ProcessPlacement, ProcessPlacements
from evergrad.recovery.sockets import address_towards, listening, own_address

SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[08-09],login",
    "SLURMD_NODENAME": "login",
}


@pytest.fixture
def head(tmp_path: Path) -> HeadAddress:
    return HeadAddress("10.0.0.1", 4321, "gpu08", 77, {"num_ranks": 4, "silent_s": 1.0, "node_names": ["a", "b"]})


def test_srun_says_which_node_this_is_and_what_they_are_called() -> None:
    here = node_identity(None, None, SLURM)
    assert (here.rank, here.names, here.is_head) == (2, ("gpu08", "gpu09", "login"), False)


def test_options_come_before_the_environment_and_that_before_slurm() -> None:
    assert node_identity(None, None, SLURM | {"EVERGRAD_NODE_RANK": "1", "SLURMD_NODENAME": "gpu09"}).rank == 1
    here = node_identity(4, 3, SLURM | {"EVERGRAD_NODE_RANK": "1"})
    assert (here.rank, here.names) == (3, ("n0", "n1", "n2", "n3"))


@pytest.mark.parametrize(
    "changed",
    [{"SLURMD_NODENAME": "other"}, {"SLURM_STEP_NODELIST": "gpu08"}, {"SLURM_STEP_NODELIST": "x,x,login"}],
)
def test_names_that_are_not_certain_are_not_used(changed: dict[str, str]) -> None:
    assert node_identity(None, None, SLURM | changed).names == ("n0", "n1", "n2")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"SLURM_NTASKS": "6"}, "expected one launcher a node, found 6 on 3 nodes"),
        ({"SLURM_PROCID": "3"}, "--node-rank: expected 0 to 2, as there are 3 nodes, found 3"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID: expected a number, found 'x'"),
        ({"SLURM_NNODES": "0", "SLURM_NTASKS": "0"}, "--nnodes: expected the number of nodes, 1 or more"),
        ({"SLURM_STEP_NODELIST": "gpu[9-1]"}, "expected a range as 08-10, found '9-1'"),
        ({"SLURM_STEP_NODELIST": "gpu[0-9999999]"}, "expected a range"),
        ({"SLURM_STEP_NODELIST": "a[1-999]b[1-999]"}, "expected at most 65536 nodes"),
    ],
)
def test_what_slurm_cannot_mean_is_refused(changed: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected.replace("[", r"\[")):
        node_identity(None, None, SLURM | changed)


def test_node_lists_are_expanded_as_slurm_does() -> None:
    assert expanded("") == []
    assert expanded("a[1-2]-b[3,05]") == ["a1-b3", "a1-b05", "a2-b3", "a2-b05"]


def test_the_head_file_comes_back_as_it_was_written(tmp_path: Path, head: HeadAddress) -> None:
    assert HeadAddress.read(tmp_path) is None
    assert HeadAddress.read(tmp_path / "nowhere") is None
    head.write(tmp_path)
    assert await_head(tmp_path, 0.0) == head


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 2}', '{"schema_version": 1, "host": "a"}'])
def test_a_head_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    with pytest.raises(FileAccessError, match=r"head\.json: is no head file"):
        HeadAddress.read(tmp_path)


def test_a_head_that_never_comes_is_waited_for_and_no_longer(tmp_path: Path) -> None:
    pauses: list[float] = []
    with pytest.raises(UsageError, match=r"no head\.json after 0\.01 s \(it is empty or of something else\)"):
        await_head(tmp_path, 0.01, pauses.append)
    assert pauses


def test_settings_that_differ_from_the_heads_are_named_by_their_option(head: HeadAddress) -> None:
    head.check({"num_ranks": 4, "silent_s": 1.0, "node_names": ["n0", "n1"]}, OPTION_OF)
    with pytest.raises(UsageError, match=r"^-n: expected what the head .* on gpu08, 4, found 8\."):
        head.check({"num_ranks": 8, "silent_s": 1.0}, OPTION_OF)
    with pytest.raises(UsageError, match=r"^--heartbeat-timeout: "):
        head.check({"num_ranks": 4, "silent_s": 2.0}, OPTION_OF)


def test_the_address_is_that_of_the_interface_on_the_way() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no address") == ""
    found = own_address(["no-such-node.invalid"])
    with socket.create_server((found, 0)):  # it is one of this machine's own
        pass
    listener, host = listening("localhost", ())
    with listener, socket.create_connection((host, listener.getsockname()[1]), timeout=5):
        assert host == "127.0.0.1"


def test_devices_are_counted_on_each_node(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = LaunchSettings(script=str(script), num_ranks=4, num_nodes=2, num_spares=2, node_rank=0, out=tmp_path)
    found = [(place.uid, place.node, place.device, place.rank) for place in settings.places()]
    assert found == [(0, 0, 0, 0), (1, 0, 1, 1), (2, 1, 0, 2), (3, 1, 1, 3), (4, 0, 2, None), (5, 1, 2, None)]
    told = json.loads(json.dumps(settings.to_json()))
    assert (told["node_names"], told["is_spread"]) == (["n0", "n1"], True)


def test_who_takes_a_place_on_a_node_that_is_gone_goes_where_the_fewest_are() -> None:
    places = ProcessPlacements(
        [
            ProcessPlacement(0, 0, 0, 0),
            ProcessPlacement(1, 0, 1, 1),
            ProcessPlacement(2, 1, 0, 2),
            ProcessPlacement(3, 2, 0, 3),
        ]
    )
    assert places.instead_of(places[2], lambda node: True, [0, 1, 3]) == (1, 0)
    assert places.instead_of(places[2], lambda node: node != 1, [0, 1, 3]) == (2, 1)
    assert places.instead_of(places[2], lambda node: node == 0, [0, 1]) == (0, 2)
    assert places.add(2, 1, 2) == ProcessPlacement(4, 2, 1, 2)
    assert places.nodes == [0, 0, 1, 2, 2]
