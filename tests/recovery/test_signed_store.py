"""Nobody but the job can write what it takes from the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from forkserver import Ran
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from evergrad._wire import Forged, Secret
from evergrad.errors import FileAccessError
from evergrad.recovery.store import SignedStore, SignedTorchStore

MINE, OTHERS = Secret(b"a" * 32), Secret(b"b" * 32)


@given(name=st.text(), text=st.binary())
def test_what_was_sealed_comes_back(name: str, text: bytes) -> None:
    assert MINE.open(name, MINE.seal(name, text)) == text


@given(text=st.binary(), place=st.integers(0, 200), bit=st.integers(0, 7))
def test_no_bit_can_be_changed(text: bytes, place: int, bit: int) -> None:
    sealed = bytearray(MINE.seal("plan/1", text))
    sealed[place % len(sealed)] ^= 1 << bit
    with pytest.raises(Forged, match="plan/1"):
        MINE.open("plan/1", bytes(sealed))


def test_a_value_counts_under_its_own_name_and_with_its_own_secret_only() -> None:
    sealed = MINE.seal("plan/1", b"text")
    for secret, name in ((MINE, "plan/2"), (OTHERS, "plan/1")):
        with pytest.raises(Forged):
            secret.open(name, sealed)


def test_the_secret_is_its_owners_alone(tmp_path: Path) -> None:
    made = Secret.make(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert Secret.read(tmp_path / "secret").open("a", made.seal("a", b"b")) == b"b"
    with pytest.raises(FileAccessError, match="cannot be written"):
        Secret.make(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(FileAccessError, match="0600"):
        Secret.read(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(FileAccessError, match="cannot be read"):
        Secret.read(tmp_path / "link")
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(FileAccessError, match="32 bytes"):
        Secret.read(tmp_path / "short")


def test_a_store_gives_nothing_that_others_wrote() -> None:
    store = HashStore()
    mine, stranger = SignedStore(store, MINE), SignedStore(store, OTHERS)
    mine.set("a", "text")
    assert (mine.get("a"), mine.find("a"), mine.has("a"), mine.find("b"), mine.has("b")) == (
        "text",
        "text",
        True,
        None,
        False,
    )
    assert mine.claim("c", "first") == "first"
    assert mine.claim("c", "second") == "first"
    stranger.set("a", "another")
    store.set("d", "plain")
    for ask in (lambda: mine.get("a"), lambda: mine.find("a"), lambda: mine.has("a"), lambda: mine.claim("d", "mine")):
        with pytest.raises(Forged):
            ask()


def test_gloo_meets_only_who_knows_the_secret() -> None:
    store, said = HashStore(), {}

    def meet(rank: int, secret: Secret) -> None:
        try:
            dist.ProcessGroupGloo(SignedTorchStore(store, "group/0", secret), rank, 2, timedelta(seconds=20))
            said[rank] = "met"
        except Forged as error:
            said[rank] = str(error)
            store.set("0/1", "wrong")

    threads = [threading.Thread(target=meet, args=(rank, secret)) for rank, secret in enumerate((MINE, OTHERS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "group/0" in said[0]
    assert "group/0" in said[1]


STRANGER = Path(__file__).parent / "strange_trainer.py"
ATTACKS = ["plan", "replay", "change"]
MORE = ["broken", "news", "fatal", "delete"]


@pytest.mark.parametrize("attack", [*ATTACKS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_a_stranger_at_the_stores_port_can_stop_the_job_and_never_steer_it(
    launch: Callable[..., Ran], attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it writes, ranks end with the weights of an undisturbed run, or the job ends and says why."""
    monkeypatch.setenv("EVERGRAD_TEST_LIMIT_S", "60")
    ran = launch("-n", 2, "--warn-after", 1, "--hang-timeout", 3, script=STRANGER, arguments=[attack])
    ends = {result["weights"] for result in ran.results.values()}
    if ran.code == 0:
        assert ends == {"undisturbed"}, ran.said
    else:
        assert "was not written by this job" in ran.said, ran.said
        assert os.listdir(ran.run), "and its record is there"
