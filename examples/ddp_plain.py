"""A plain DDP loop: one lost rank ends it. `ddp_evergrad.py` is the same loop, and goes on.

evergrad run -n 4 examples/ddp_plain.py    (or torchrun --nproc-per-node 4 examples/ddp_plain.py)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(768, 32)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
net = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 2))

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # each rank draws its own dropout
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)

step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        if rank == 0:
            print(f"step {step}: loss {loss.item():.9g}")
dist.destroy_process_group()
