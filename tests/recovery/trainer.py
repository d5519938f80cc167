"""A training script as a user would write it: batch norm, dropout, accumulation, a scheduler; run by `evergrad run`.

python trainer.py OUT [--epochs N] [--accumulate K] [--checkpoints RUN --every N] …: every process that finishes leaves
OUT/<uid>.json: losses by step, a digest of everything that was trained, and the samples of every applied step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.store import StoreClient

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--samples", type=int, default=192)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--bucket-mb", type=float, default=0.03)
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--every", type=int, default=3)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--validate", action="store_true")
parser.add_argument("--device", default="cpu")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a batch takes at least")
parser.add_argument("--guard", type=int, help="compare all ranks every so many steps")
parser.add_argument("--overlap", action="store_true", help="the optimizer within backward, so without clipping")
parser.add_argument("--unclipped", action="store_true", help="the same without overlap")
parser.add_argument("--await-change", type=int, help="in this generation, go on when the launcher lets somebody in")
parser.add_argument("--await-spare", type=int, help="nobody begins before the spare of this number waits")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1)
features = torch.randn(options.samples, 16)
data = TensorDataset(features, (features.sum(1) > 0).long(), torch.arange(options.samples))
loader = DataLoader(data, batch_size=options.batch, shuffle=True, num_workers=options.workers)
width = options.width
net = nn.Sequential(
    nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2),
).to(options.device)  # fmt: skip

checkpointer = eg.Checkpointer(options.checkpoints, agent=False) if options.checkpoints else None
job = eg.join(checkpointer, every=options.every if checkpointer else None)
torch.manual_seed(100 + job.rank)  # each rank draws its own dropout
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
overlapped = {"optimizer": optimizer, "overlap": True} if options.overlap else {}
model = job.wrap(net, bucket_cap_mb=options.bucket_mb, **overlapped)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
job.track(scheduler=scheduler)
if options.guard:
    job.guard(every=options.guard)


def await_waiting(uid: int) -> None:
    """Until this process waits to be called."""
    host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
    StoreClient(host, int(port), secret=None).wait(StoreKeys.waiting(uid))


if options.await_spare is not None and job.rank >= 0:
    await_waiting(options.await_spare)


losses: dict[int, float] = {}
used: dict[int, list[int]] = {}
for _ in range(options.epochs):
    model.train()
    pending: list[int] = []
    count = 0
    for x, y, samples in job.batches(loader):
        x, y = x.to(options.device), y.to(options.device)
        count += 1
        time.sleep(options.pause)
        while job.generation == options.await_change and job.applied == 3 and not job._worker.is_change_requested:
            time.sleep(0.001)
        is_last = count == options.accumulate or job.is_last_batch
        with nullcontext() if is_last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / options.accumulate
            loss.backward()
        pending += [] if job.idle else samples.unique().tolist()
        if not is_last:
            continue
        if not (options.overlap or options.unclipped):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step = job.applied
        if job.step(optimizer):
            scheduler.step()
            losses[step], used[step] = loss.item(), pending
        optimizer.zero_grad()
        pending, count = [], 0
    if options.validate and not job.joining:
        model.eval()
        with torch.no_grad():
            model(features[:8].to(options.device))

digest = hashlib.blake2b(digest_size=8)
for tensor in net.state_dict().values():
    digest.update(tensor.cpu().numpy().tobytes())
weights = hashlib.blake2b(digest_size=8)
for parameter in net.parameters():
    weights.update(parameter.detach().cpu().numpy().tobytes())
result = {
    "rank": job.rank, "world_size": job.world_size, "generation": job.generation, "steps": job.applied,
    "weights": weights.hexdigest(), "state": digest.hexdigest(), "losses": losses, "used": used,
    "lr": optimizer.param_groups[0]["lr"],
}  # fmt: skip
options.out.mkdir(parents=True, exist_ok=True)
partial = options.out / f"{os.environ.get('EVERGRAD_UID', 'alone')}.partial"
partial.write_text(json.dumps(result))
partial.replace(partial.with_suffix(".json"))  # a process that is killed here leaves no half of it
if checkpointer is not None:
    checkpointer.close()
