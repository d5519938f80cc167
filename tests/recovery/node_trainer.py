"""A training script that waits where it is told to: `python node_trainer.py OUT [--steps N] [--gate STEP …]`.

Before step STEP every rank waits until OUT/go-STEP is there, and says so by OUT/at-STEP-<uid>. With `--world W` it
goes on until there are so many ranks. Whoever finishes leaves OUT/<uid>.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg
from evergrad._wire import Secret
from evergrad.recovery.failures.injector import send_signal
from evergrad.recovery.store import StoreClient

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--gate", type=int, action="append", default=[])
parser.add_argument(
    "--strike", help="UID:STEP:UIDS:KIND, as 0:5:2,3:rank: then this one kills those, or its whole node"
)
parser.add_argument("--world", type=int, default=0)
parser.add_argument("--checkpoints", type=Path)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1)
options.out.mkdir(parents=True, exist_ok=True)
uid = os.environ["EVERGRAD_UID"]
striker, strikes_at, struck, kind = (options.strike or ":::").split(":")
features = torch.randn(1 << 14, 8)
loader = DataLoader(TensorDataset(features, (features.sum(1) > 0).long()), batch_size=4, shuffle=True)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
checkpointer = eg.Checkpointer(options.checkpoints, agent=False) if options.checkpoints else None
job = eg.join(checkpointer, every=5 if checkpointer else None)
model = job.wrap(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
first = None
for x, y in job.batches(loader):
    first = job.applied if first is None else first
    if job.applied in options.gate:
        (options.out / f"at-{job.applied}-{uid}").touch()
        while not (options.out / f"go-{job.applied}").exists():
            time.sleep(0.005)
    if (uid, str(job.applied)) == (striker, strikes_at):
        host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
        store = StoreClient(host, int(port), secret=Secret.read(Path(os.environ["EVERGRAD_SECRET"])))
        uids, striker = [int(one) for one in struck.split(",")], ""
        send_signal(store, signal.SIGKILL, uids, env=os.environ, whole_node=kind == "node")
    nn.functional.cross_entropy(model(x), y).backward()
    job.step(optimizer)
    optimizer.zero_grad()
    if job.applied >= options.steps and job.world_size >= options.world:  # alike for all of them
        break

weights = hashlib.blake2b(digest_size=8)
for parameter in net.parameters():
    weights.update(parameter.detach().numpy().tobytes())
told = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "EVERGRAD_NODE")}
result = {"rank": job.rank, "world_size": job.world_size, "steps": job.applied, "first": first}
result |= {"weights": weights.hexdigest(), "machine": socket.gethostname(), "told": told}
partial = options.out / f"{uid}.partial"
partial.write_text(json.dumps(result))
partial.replace(partial.with_suffix(".json"))  # a process that is killed here leaves no half of it
if checkpointer is not None:
    checkpointer.close()
