"""A training script with configuration in globals and batches drawn at random, in plain DDP.

torchrun --nproc-per-node 2 nano_plain.py --out_dir=out
"""

import math
import os
import sys

import torch
from tiny_gpt import GPT, TOKENS, await_joiner, die_here, leave_result
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

# configuration; every one can be set on the command line: --key=value
out_dir = "out"
eval_interval = 4
eval_iters = 2
gradient_accumulation_steps = 6  # of the whole job
batch_size = 4
block_size = 8
dropout = 0.1
learning_rate = 1e-2
max_iters = 12
weight_decay = 1e-1
grad_clip = 1.0
warmup_iters = 3
lr_decay_iters = 12
min_lr = 1e-3
for argument in sys.argv[1:]:
    key, _, text = argument.removeprefix("--").partition("=")
    globals()[key] = type(globals()[key])(text)

ddp = "RANK" in os.environ
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    ddp_rank = 0
    master_process = True
    seed_offset = 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)


def get_batch(split):
    cut = int(0.9 * len(TOKENS))
    data = TOKENS[:cut] if split == "train" else TOKENS[cut:]
    ix = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


iter_num = 0
best_val_loss = 1e9
model = GPT(block=block_size, dropout=dropout)
optimizer = model.configure_optimizer(weight_decay, learning_rate)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    die_here("eval", ddp_rank)
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def set_lr(lr):
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


X, Y = get_batch("train")
while True:
    set_lr(get_lr(iter_num))
    await_joiner(iter_num)

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
            }
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    die_here("clip", ddp_rank)
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.6f}")
    iter_num += 1
    if iter_num >= max_iters:
        break

leave_result(out_dir, ddp_rank, iter_num, raw_model, optimizer)
if ddp:
    destroy_process_group()
