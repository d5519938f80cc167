"""Whole jobs with a persistent tier on a real S3 server: trainer, agent, and a network that fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_jobs import PATIENCE_S, Bucket, Observer, Trainer, another_machine, files_with_secrets, holds, state, until
from s3_server import SECRET, Fault, Proxy, s3_server
from torch import distributed, nn

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.run_folder import RunFolder
from evergrad.cli import main
from evergrad.errors import TierError, UsageError
from living_agents import agents_of
from ranks import Rank, Ranks


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def bucket(server: Proxy, tmp_path: Path, shm: Path) -> Iterator[Bucket]:
    server.reset()
    yield Bucket(server, tmp_path)
    server.reset()  # or an agent would wait for a server that stands still


def stand_still(s3: Proxy, let_by: int = 0) -> None:
    """From now on no object and no part arrives, but for the first few."""
    s3.reset()
    s3.let_by, s3.hold = let_by, threading.Event()


def evergrad(*words: object) -> int:
    """Run a command; its exit code."""
    return main([str(word) for word in words])


def restores(bucket: Bucket, steps: list[int], size: int = 1000) -> bool:
    """Whether a machine that knows the URL alone gets exactly what was saved."""
    with another_machine(bucket) as ck:
        for step in steps:
            live = state(0, size)
            assert ck.restore(live, source=bucket.url, version=step) == step
            assert holds(live, step)
    return True


def test_saves_do_not_wait_for_a_server_that_stands_still(bucket: Bucket, tmp_path: Path) -> None:
    stand_still(bucket.s3)
    with eg.Checkpointer(tmp_path / "run", tiers=bucket.tiers(keep=9)) as ck:
        pending = []
        for step in range(1, 6):
            pending.append(ck.save(step, state(step)))
            pending[-1].wait(timeout=PATIENCE_S)  # the local copy
        assert bucket.s3.held.wait(PATIENCE_S)
        assert not any(each.done("persistent") for each in pending)
        on_disk = {path.parent.name for path in (tmp_path / "disk").rglob("rank-00000.json")}
        assert len(on_disk) == 5, "what has to be flushed is not retired, however little is kept"
        bucket.s3.reset()
        for each in pending:
            assert each.wait("persistent", timeout=PATIENCE_S) == each.version
        assert bucket.commits() == [each.version.name for each in pending]
        until(lambda: len({path.parent.name for path in (tmp_path / "disk").rglob("rank-00000.json")}) == 2)
    assert bucket.visible() == [1, 2, 3, 4, 5]
    assert restores(bucket, [1, 5])


def test_the_first_save_of_an_attempt_and_every_nth_after_it_are_flushed(bucket: Bucket, tmp_path: Path) -> None:
    for steps in ((1, 2, 3, 4, 5), (6, 7)):
        with eg.Checkpointer(tmp_path / "run", tiers=bucket.tiers(every=3, keep=9)) as ck:
            for step in steps:
                pending = ck.save(step, state(step))
                assert pending.wait(timeout=PATIENCE_S).step == step
                if step in (1, 4, 6):
                    pending.wait("persistent", timeout=PATIENCE_S)
                else:
                    with pytest.raises(UsageError, match=r"unknown tier 'persistent'. .* goes to memory, local"):
                        pending.wait("persistent")
    assert bucket.visible() == [1, 4, 6]
    assert restores(bucket, [1, 4, 6])


def test_whichever_request_of_a_job_fails_what_is_called_committed_restores(bucket: Bucket, tmp_path: Path) -> None:
    observer = Observer(bucket, tmp_path / "observed")
    steps = []
    with observer.looking(), eg.Checkpointer(tmp_path / "run", tiers=bucket.tiers(keep=99)) as ck:
        ck.save(1, state(1)).wait("persistent", timeout=PATIENCE_S)
        bucket.s3.reset()
        ck.save(2, state(2)).wait("persistent", timeout=PATIENCE_S)
        number, total = 1, len(bucket.s3.requests)
        while number <= total:
            bucket.s3.reset()
            bucket.s3.faults = [Fault(number, ("503", "cut", "lost")[number % 3])]
            step = number + 2
            ck.save(step, state(step)).wait("persistent", timeout=PATIENCE_S)
            paths = [each.path for each in bucket.s3.requests if each.kind == "put"]
            assert paths[-1].split("?")[0].endswith(f"v{step:010d}-01/COMMIT.json"), "the commit is not the last"
            steps.append(step)
            number += 1
        until(lambda: steps[-1] in observer.seen)
    assert len(steps) > 5
    assert bucket.visible() == [1, 2, *steps]
    assert restores(bucket, steps)


def test_without_patience_a_version_that_failed_is_seen_by_nobody(bucket: Bucket, tmp_path: Path) -> None:
    observer = Observer(bucket, tmp_path / "observed")
    failed, committed = [], [1]
    with observer.looking(), eg.Checkpointer(tmp_path / "run", tiers=bucket.tiers(keep=99, patience_s=0)) as ck:
        ck.save(1, state(1)).wait("persistent", timeout=PATIENCE_S)
        for step in range(2, 10):
            bucket.s3.reset()
            bucket.s3.faults = [Fault(step - 1, "503")]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eg.CheckpointWarning)
                pending = ck.save(step, state(step))
            assert pending.wait(timeout=PATIENCE_S).step == step  # on disk in any case
            try:
                pending.wait("persistent", timeout=PATIENCE_S)
                committed.append(step)
            except TierError as error:
                assert "a bad day" in str(error)
                assert step not in bucket.visible()
                failed.append(step)
    assert len(failed) > 3
    assert bucket.visible() == committed
    assert observer.seen.isdisjoint(failed)
    assert restores(bucket, committed)


LARGE, PART = 3_500_000, 5 << 20  # floats: two whole parts and a rest


def large_tiers(bucket: Bucket, local: bool) -> list[Any]:
    tiers = bucket.tiers(part_bytes=PART)
    return tiers if local else [tiers[0], tiers[2]]


def parts_sent(s3: Proxy) -> int:
    return sum(each.kind == "upload_part" and each.sent_bytes > 0 for each in s3.requests)


@pytest.mark.parametrize("local", [True, False], ids=["from the disk", "from memory"])
def test_an_upload_whose_agent_is_killed_is_taken_up_by_the_next(
    bucket: Bucket, tmp_path: Path, shm: Path, local: bool
) -> None:
    with eg.Checkpointer(tmp_path / "run", tiers=large_tiers(bucket, local)) as ck:
        stand_still(bucket.s3, let_by=1)
        pending = ck.save(1, state(1, LARGE))
        assert bucket.s3.held.wait(PATIENCE_S)
        (agent,) = agents_of(shm)
        os.kill(agent, signal.SIGKILL)
        bucket.s3.reset()
        assert bucket.visible() == []
        assert pending.wait("persistent", timeout=PATIENCE_S) == Version(1, 1)
        assert parts_sent(bucket.s3) == 2, "parts that were there are sent again"
        assert bucket.s3.count()["create_upload"] == 0
        with pytest.warns(eg.CheckpointWarning, match=rf"the agent \(process {agent}\) is gone"):
            ck.save(2, state(2)).wait("persistent", timeout=PATIENCE_S)
    assert restores(bucket, [1], LARGE)


@pytest.mark.parametrize("local", [True, False], ids=["from the disk", "from memory"])
def test_an_upload_is_taken_up_also_if_nobody_is_left(bucket: Bucket, tmp_path: Path, shm: Path, local: bool) -> None:
    tiers = large_tiers(bucket, local)

    def train() -> None:
        eg.Checkpointer(tmp_path / "run", tiers=tiers).save(1, state(1, LARGE))

    stand_still(bucket.s3, let_by=1)
    trainer = Trainer.start(train)
    assert bucket.s3.held.wait(PATIENCE_S)
    (agent,) = agents_of(shm)
    trainer.kill()  # first: it would start another agent
    os.kill(agent, signal.SIGKILL)
    until(lambda: agents_of(shm) == [])
    bucket.s3.reset()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers) as ck:
        until(lambda: bucket.visible() == [1])  # by itself, without any save
        assert parts_sent(bucket.s3) == 2
        assert bucket.s3.count()["create_upload"] == 0
        live = state(0, LARGE)
        assert ck.restore(live) == 1
        assert holds(live, 1)
    assert restores(bucket, [1], LARGE)


def test_retention_leaves_what_is_pinned(bucket: Bucket, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with eg.Checkpointer(run, tiers=bucket.tiers(keep=2)) as ck:
        for step in range(1, 6):
            ck.save(step, state(step)).wait("persistent", timeout=PATIENCE_S)
            if step == 1:
                assert evergrad("checkpoints", "pin", run, 1) == 0
            if step == 2:
                Pins(run).tag(Version(2, 1), "best")
        assert bucket.visible() == [1, 2, 4, 5]
        assert evergrad("checkpoints", "pin", run, 1, "--unpin") == 0
        ck.save(6, state(6)).wait("persistent", timeout=PATIENCE_S)
        assert bucket.visible() == [2, 5, 6]
    assert {name.partition("/")[0] for name in bucket.names()} == {
        "JOB.json", "v0000000002-01", "v0000000005-01", "v0000000006-01",
    }  # fmt: skip
    assert restores(bucket, [2, 5, 6])


def test_without_a_server_saves_are_local_and_said_to_be_and_flushed_by_the_next_job(
    bucket: Bucket, tmp_path: Path, shm: Path
) -> None:
    tiers = bucket.tiers(keep=9, patience_s=0.3)
    with eg.Checkpointer(tmp_path / "run", tiers=tiers) as ck:
        bucket.s3.faults = [Fault(number, "503") for number in range(1, 500)]
        for step in (1, 2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eg.CheckpointWarning)
                pending = ck.save(step, state(step))
            assert pending.wait(timeout=PATIENCE_S).step == step
            with pytest.raises(TierError, match=r"s3://bucket/\S+: .*a bad day"):
                pending.wait("persistent", timeout=PATIENCE_S)
        with pytest.warns(eg.CheckpointWarning, match=r"step 2 \(attempt 1\) is not in tier persistent: .*a bad day"):
            ck.save(3, state(3)).wait(timeout=PATIENCE_S)
    until(lambda: agents_of(shm) == [])
    assert bucket.visible() == []
    bucket.s3.reset()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers) as ck:
        live = state(0)
        assert ck.restore(live) == 3
        until(lambda: bucket.visible() == [2, 3])  # two are kept on the disk
        ck.save(4, state(4)).wait("persistent", timeout=PATIENCE_S)
    assert restores(bucket, [2, 3, 4])


def test_what_was_overtaken_while_the_server_was_away_is_not_flushed_any_more(bucket: Bucket, tmp_path: Path) -> None:
    tiers = [eg.Memory(), eg.Local(tmp_path / "disk", keep=9), bucket.tier(keep=9, patience_s=0.1)]
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        bucket.s3.faults = [Fault(number, "503") for number in range(1, 500)]
        with pytest.raises(TierError):
            ck.save(1, state(1)).wait("persistent", timeout=PATIENCE_S)
        bucket.s3.reset()
        with pytest.warns(eg.CheckpointWarning):
            ck.save(2, state(2)).wait("persistent", timeout=PATIENCE_S)
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        ck.save(3, state(3)).wait("persistent", timeout=PATIENCE_S)
    assert bucket.visible() == [2, 3]


def test_compressed_versions_are_smaller_and_the_same_bit_for_bit(bucket: Bucket, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    tiers = bucket.tiers()
    with eg.Checkpointer(tmp_path / "run", tiers=[*tiers[:2], eg.Compress("zstd"), tiers[2]], agent=False) as ck:
        ck.save(1, {"model": model, "optimizer": optimizer}).wait("persistent", timeout=PATIENCE_S)
    (plain,) = (tmp_path / "disk").rglob("rank-00000.safetensors")
    packed = bucket.objects()["v0000000001-01/rank-00000.safetensors.zst"]
    assert len(packed) < 0.95 * plain.stat().st_size
    found = torch.nn.Linear(256, 256)
    others = torch.optim.Adam(found.parameters())
    with another_machine(bucket) as ck:
        assert ck.restore({"model": found, "optimizer": others}, source=bucket.url) == 1
    assert torch.equal(found.weight, model.weight)
    for mine, theirs in zip(optimizer.state.values(), others.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_credentials_are_in_no_file_no_object_and_no_log(bucket: Bucket, tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path / "run", tiers=bucket.tiers()) as ck:
        ck.save(1, state(1)).wait("persistent", timeout=PATIENCE_S)
        bucket.s3.reset()
        bucket.s3.faults = [Fault(number, how) for number, how in enumerate(["503", "cut", "403"] * 20, 1)]
        with pytest.raises(TierError) as caught:
            ck.save(2, state(2)).wait("persistent", timeout=PATIENCE_S)
        assert files_with_secrets(tmp_path) == []
        private = list(shm.rglob("*.ticket"))
        assert private
        assert all(path.parent.stat().st_mode & 0o077 == 0 for path in private)  # there they have to be
    until(lambda: agents_of(shm) == [])
    (log,) = (tmp_path / "run" / "agents").glob("*.log")
    assert "trying again" in log.read_text()
    assert files_with_secrets(tmp_path) == []
    told = [SECRET, "AKIAEXAMPLE"]
    assert not any(word in str(caught.value) for word in told)
    objects = bucket.objects()
    assert "JOB.json" in objects
    assert not any(word.encode() in data for word in told for data in objects.values())


def test_another_jobs_bucket_is_restored_from_and_never_written_to(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with eg.Checkpointer(first, tiers=bucket.tiers()) as ck:
        ck.save(1, state(1)).wait("persistent", timeout=PATIENCE_S)
    before, owner = bucket.objects(), RunFolder.open(first).id
    with eg.Checkpointer(second, tiers=[eg.Local(tmp_path / "other"), bucket.tier()], agent=False) as ck:
        live = state(0)
        assert ck.restore(live, source=bucket.url) == 1
        assert holds(live, 1)
        pending = ck.save(2, state(2))
        pending.wait(timeout=PATIENCE_S)
        with pytest.raises(TierError, match=rf"belongs to job {owner}: choose another URL, or adopt=True"):
            pending.wait("persistent", timeout=PATIENCE_S)
        with pytest.warns(eg.CheckpointWarning, match=rf"belongs to job {owner}: .* adopt=True"):
            ck.save(3, state(3)).wait(timeout=PATIENCE_S)
    own = Bucket(bucket.s3, tmp_path, "-third")
    with eg.Checkpointer(third, tiers=[eg.Local(tmp_path / "other"), own.tier()], agent=False) as ck:
        assert ck.restore(state(0), source=f"{bucket.url}/") == 1  # by the credentials of its own place in the bucket
        ck.save(2, state(2)).wait("persistent", timeout=PATIENCE_S)
    assert own.visible() == [2]
    assert bucket.objects() == before
    capsys.readouterr()
    assert evergrad("checkpoints", "lineage", third, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["edges"] == [{"from": f"{owner}/v0000000001-01", "to": f"{RunFolder.open(third).id}/v0000000002-01"}]


def agent_of(shm: Path, node: str) -> int:
    """The agent of a node."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in agents_of(shm)}
    (found,) = (pid for pid, said in words.items() if node.encode() in said)
    return found


def six_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def save_to_bucket(me: Rank, url: str, options: dict[str, Any]) -> None:
    """Save a model after one step of DDP to a bucket, and write the same to whole.pt."""
    me.join()
    torch.manual_seed(1)
    wrapped = nn.parallel.DistributedDataParallel(six_layers())
    optimizer = torch.optim.Adam(wrapped.parameters())
    torch.manual_seed(10 + me.rank)
    wrapped(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    tiers = [eg.Memory(), eg.Local(me.folder / "disk"), eg.Persistent(url, options=options)]
    with eg.Checkpointer(me.folder / "run", tiers=tiers) as ck:
        pending = ck.save(30, {"model": wrapped.module, "optimizer": optimizer, "epoch": 7})
        pending.wait(timeout=60)
        pending.wait("persistent", timeout=60)
    if me.rank == 0:
        torch.save({"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()}, me.folder / "whole.pt")
    distributed.destroy_process_group()


def test_a_version_of_two_nodes_is_there_when_both_are_done_and_restores_on_one_rank(
    bucket: Bucket, tmp_path: Path, shm: Path
) -> None:
    stand_still(bucket.s3)
    options = bucket.s3.options | {"config_kwargs": {"read_timeout": 3600}}  # no request is made again meanwhile
    with Ranks(2, save_to_bucket, tmp_path, bucket.url, options, nodes=2) as ranks:
        # Both wait for the server, so each knows what the other one uploads.
        until(lambda: bucket.s3.count()["put"] == 2 or not ranks.are_running)
        assert ranks.are_running, ranks.said
        second = agent_of(shm, "n1")
        os.kill(second, signal.SIGSTOP)
        try:
            bucket.s3.reset()
            until(lambda: "v0000000030-01/rank-00000.json" in bucket.names())
            assert bucket.visible() == [], "half of the ranks, and it is called a version"
        finally:
            os.kill(second, signal.SIGCONT)
        ranks.results()
    commit = json.loads(bucket.objects()["v0000000030-01/COMMIT.json"])
    assert (commit["world_size"], [shard["rank"] for shard in commit["shards"]]) == (2, [0, 1])
    model = six_layers()
    optimizer = torch.optim.Adam(model.parameters())
    live = {"model": model, "optimizer": optimizer, "epoch": 0}
    with another_machine(bucket) as ck:
        assert ck.restore(live, source=bucket.url) == 30
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert live["epoch"] == 7
    assert all(torch.equal(found, whole["model"][name]) for name, found in model.state_dict().items())
    for number, saved in whole["optimizer"]["state"].items():
        assert all(torch.equal(found, saved[name]) for name, found in optimizer.state_dict()["state"][number].items())


def test_a_server_that_never_answers_keeps_no_save_from_the_disk_and_the_newest_waits_for_it(
    bucket: Bucket, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}", "region_name": "us-east-1"}
        options = {"client_kwargs": endpoint, "config_kwargs": {"read_timeout": 3600}}  # nothing is given up before
        tiers = bucket.tiers(options=bucket.s3.options | options, patience_s=0.1)
        with eg.Checkpointer(tmp_path / "run", tiers=tiers) as ck:
            pending = []
            for step in (1, 2, 3, 4):
                pending.append(ck.save(step, state(step)))
                pending[-1].wait(timeout=PATIENCE_S)
            assert not any(each.done("persistent") for each in pending)
            silent.close()
            left_out = []
            for each in pending:
                with pytest.raises(TierError, match="is not in tier persistent") as caught:
                    each.wait("persistent", timeout=PATIENCE_S)
                left_out.append("left out: the one before failed there, and step 4" in str(caught.value))
            assert left_out == [False, True, True, False]
