"""A script of which one rank, at its third step, talks to the store as a stranger would: without the job's secret.

python strange_trainer.py OUT ATTACK: every rank that finishes leaves OUT/<uid>.json, and whether its weights are what
they have to be: the gradient of every step is 1, however many ranks there are.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg
from evergrad.recovery.membership import MembershipPlan, PointKind, StoreKeys
from evergrad.recovery.store import PREFIX

out, attack = Path(sys.argv[1]), sys.argv[2]


def interfere() -> None:
    """As somebody with access to the port, and to this very source."""
    host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
    store = PrefixStore(PREFIX, TCPStore(host, int(port), None, False, timedelta(seconds=30), False))
    news = json.dumps({"uid": 1, "reason": "says a stranger"})
    steered = MembershipPlan(1, (0,), previous=(0, 1), dead=(1,), point=7, kind=PointKind.STEP).to_json()
    match attack:
        case "plan":
            store.set(StoreKeys.plan(1), steered)
            store.set(StoreKeys.news(1, 0), news)
        case "replay":
            store.set(StoreKeys.plan(1), store.get(StoreKeys.plan(0)))  # type: ignore[arg-type]
            store.set(StoreKeys.broken(0), news)
        case "broken":
            store.set(StoreKeys.broken(0), news)
        case "news":
            store.set(StoreKeys.news(0, 0), news)
        case "change":
            store.set(StoreKeys.change(0), "{}")
        case "fatal":
            store.set(StoreKeys.fatal, "says a stranger")
        case "delete":
            for key in (StoreKeys.plan(0), StoreKeys.joined(0), StoreKeys.joined(1)):
                store.delete_key(key)


torch.set_num_threads(1)
job = eg.join()
net = nn.Linear(1, 1, bias=False)
nn.init.zeros_(net.weight)
model = job.wrap(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(torch.ones(400, 1)), batch_size=2)
for (x,) in job.batches(loader):
    if job.rank == 0 and job.applied == 3:
        interfere()
    optimizer.zero_grad()
    model(x).mean().backward()
    job.step(optimizer)
steps = 400 // 2 // 2
is_right = job.applied == steps and net.weight.item() == -0.5 * steps
out.mkdir(parents=True, exist_ok=True)
partial = out / f"{os.environ['EVERGRAD_UID']}.partial"
partial.write_text(json.dumps({"weights": "undisturbed" if is_right else "steered"}))
partial.replace(partial.with_suffix(".json"))  # a process that is killed here leaves no half of it
