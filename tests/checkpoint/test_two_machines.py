"""What one machine has saved another one goes on with, though they share nothing but the URL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from two_machines import COMMAND

PROGRAM = Path(__file__).with_name("two_machines.py")


def _why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.getuid() != 0:
        return "only root can make a network"
    missing = [tool for tool in ("unshare", "ip", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = "mount -t tmpfs none /mnt && ip link add eg0 type veth peer name eg1"
    done = subprocess.run(
        [*COMMAND, "sh", "-c", probe], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    return "" if done.returncode == 0 else f"this machine allows no namespaces: {done.stderr.strip()}"


def test_a_machine_goes_on_with_what_another_saved_from_the_url_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := _why_not():
        pytest.skip(why)
    monkeypatch.delenv("EVERGRAD_SHM")  # each has a /dev/shm of its own
    (tmp_path / "work").mkdir()
    log = tmp_path / "errors.txt"
    with log.open("wb") as errors:
        command = [*COMMAND, sys.executable, str(PROGRAM), str(tmp_path)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=100, check=False
        )
    assert done.returncode == 0, log.read_text()
    first, between, second = (json.loads(line) for line in done.stdout.splitlines())
    assert any(name.endswith("rank-00000.safetensors") for name in first["files"])
    assert any("agent" in command for command in between["ran"])
    assert between["left"] == [], "the first machine is not gone"
    assert not any(name.startswith("work/") for name in between["seen"]), "its folders are seen from outside"
    assert second["before"] == [], "the second machine sees what the first one wrote"
    assert second["nothing"] is None
    assert (second["step"], second["tier"]) == (3, "persistent")
    assert second["restored"] == first["saved"]
    assert list((tmp_path / "work").iterdir()) == []
    assert {"to1", "to2"}.isdisjoint(os.listdir("/sys/class/net")), "this machine's own network was changed"
