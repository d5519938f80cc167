"""What is trained: a transformer whose state is 6 GB, and convolutional nets with batch norm and dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CASES", "Training"]


class Block(nn.Module):
    """Attention and two wide layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch, time, width."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in torch.split(self.qkv(self.norm1(x)), width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        down: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


@dataclass(frozen=True)
class Case:
    """One training, at full size and quick."""

    name: str
    model: Callable[[bool], nn.Module]
    batch: Callable[[bool, torch.device], torch.Tensor]


def _transformer(quick: bool) -> nn.Module:
    width, layers = (64, 2) if quick else (2048, 10)
    return nn.Sequential(*(Block(width, 16) for _ in range(layers)))


def _tokens(quick: bool, device: torch.device) -> torch.Tensor:
    return torch.randn((2, 16, 64) if quick else (16, 1024, 2048), device=device)


def _convolutions(quick: bool) -> nn.Module:
    return _net([3, 8, 16] if quick else [3, 64, 128, 256, 512, 512, 768, 768])


def _wide_convolutions(quick: bool) -> nn.Module:
    return _net([3, 16, 32] if quick else [3, 256, 512, 1024, 2048, 2048, 2048])


def _net(widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        for source in (before, after):
            layers += [nn.Conv2d(source, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        if number < 4:
            layers.append(nn.MaxPool2d(2))
        layers.append(nn.Dropout(0.1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))


def _images(quick: bool, device: torch.device) -> torch.Tensor:
    return torch.randn((2, 3, 16, 16) if quick else (256, 3, 128, 128), device=device)


def _fewer_images(quick: bool, device: torch.device) -> torch.Tensor:
    return torch.randn((2, 3, 16, 16) if quick else (64, 3, 128, 128), device=device)


CASES = {
    "transformer": Case("transformer", _transformer, _tokens),
    "wide convolutions": Case("wide convolutions", _wide_convolutions, _fewer_images),
    "convolutions": Case("convolutions", _convolutions, _images),
}


class Training:
    """A model with AdamW; a step ends when its loss is known on the host, as in most training loops."""

    def __init__(self, case: Case, device: torch.device, quick: bool) -> None:
        torch.manual_seed(7)
        torch.backends.cudnn.benchmark = True
        self.device = device
        with torch.device(device):
            self.model = case.model(quick)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self._x = case.batch(quick, device)

    def step(self, before_update: Callable[[], None]) -> float:
        """One step; `before_update` is called when the gradients are there."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self._x).float().square().mean()
        loss.backward()
        before_update()
        self.optimizer.step()
        return float(loss.detach())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything by name, as rivals get it: the tensors themselves, not copies."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, memory in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": tensor for name, tensor in memory.items()}
        return found

    def sync(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
