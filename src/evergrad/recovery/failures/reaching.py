"""How a scheduled failure reaches processes on other machines, and a whole node with the launcher that runs there.

A process number says nothing on another machine: there the head is asked, through the store, to have the signal sent.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Mapping, Sequence

from evergrad.recovery.launch.posts import NodeKeys
from evergrad.recovery.membership import Keys
from evergrad.recovery.stores import Sealed


def send(client: Sealed, number: int, uids: Sequence[int], *, env: Mapping[str, str], whole_node: bool = False) -> None:
    """Send these processes, which have joined, a signal: in this order, those on other machines first.

    With `whole_node` they are all that has a rank on this node, and SIGKILL ends its launcher too, and so whatever else
    runs here; not where that is the head, without which there is no job. `env` is the environment of this process.
    """
    about = {uid: json.loads(client.get(Keys.joined(uid))) for uid in uids}
    is_spread, node = env.get("EVERGRAD_SPREAD") == "1", env.get("EVERGRAD_NODE")
    elsewhere = [uid for uid in uids if is_spread and about[uid]["node"] != node]
    if elsewhere:
        _ask(client, number, elsewhere)
    if whole_node and number == signal.SIGKILL and "EVERGRAD_LAUNCHER" in env:
        os.kill(int(env["EVERGRAD_LAUNCHER"]), number)
    for uid in uids:
        if uid not in elsewhere:
            os.kill(about[uid]["pid"], number)


def _ask(client: Sealed, number: int, uids: Sequence[int]) -> None:
    """Ask the head, under the first name that is free."""
    mine = json.dumps({"number": int(number), "uids": [*uids], "token": secrets.token_hex(8)})
    turn = 0
    while client.claim(NodeKeys.doom(turn), mine) != mine:
        turn += 1
