"""A digest of 128 bits for each tensor: what ranks compare instead of their states.

On the CPU it is xxh3 over the tensor's own bytes. On another device the bytes stay where they are: two sums, modulo
2^64, over words of 8 bytes,

    Σ wᵢ·mᵢ   and   Σ g(wᵢ·mᵢ)·mᵢ₊₁,   g(x) = x ^ (x >> 32),   mᵢ odd

An odd number has an inverse modulo 2^64, so a change of one word always changes the first sum. Changes of several words
can cancel out in it (two flipped top bits do), which is what the second one is for: it is not linear.

A digest goes by elements in their logical order, by type and by shape; strides do not matter. Ranks whose copies of a
tensor lie on different kinds of device have different digests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from evergrad._digest import balanced, bytes_of, digest_bytes

CHUNK_WORDS = 4 << 20
"""How much is worked on at once on a device: three times this, in words, is the memory that it takes meanwhile."""

_MOST_THREADS = 4
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The digest of every tensor, by its path. What is on a device is waited for once."""
    found: dict[str, bytes] = {}
    places: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg()
        places.setdefault(plain.device, {})[path] = plain
    for device, some in places.items():
        contents = _contents_on_cpu(some) if device.type == "cpu" else contents_on_device(some, CHUNK_WORDS)
        for path, content in contents.items():
            found[path] = digest_bytes(content + f"{some[path].dtype} {tuple(some[path].shape)}".encode())
    return {path: found[path] for path in tensors}


def _contents_on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    items = list(tensors.items())
    # As many threads as torch may use: where every core has a rank, that is one.
    parts = balanced(items, min(_MOST_THREADS, torch.get_num_threads()), lambda item: item[1].nbytes)
    if len(parts) == 1:
        return _hashed(items)
    with ThreadPoolExecutor(len(parts)) as pool:
        return {path: content for part in pool.map(_hashed, map(list, parts)) for path, content in part.items()}


def _hashed(items: list[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    return {path: digest_bytes(bytes_of(tensor).numpy().data) for path, tensor in items}


# On a device.


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a tensor, of a whole number of words but for the tensor's end."""

    path: str
    number: int
    data: torch.Tensor

    @property
    def words(self) -> int:
        return -(-self.data.numel() // 8)


def contents_on_device(tensors: Mapping[str, torch.Tensor], chunk_words: int) -> dict[str, bytes]:
    """Both sums of each tensor; all tensors are on one device, and it is waited for once, at the end."""
    assert sys.byteorder == "little", "words are read as they lie in memory"
    totals = dict.fromkeys(tensors, (0, 0))
    longest = min(chunk_words, max((-(-tensor.nbytes // 8) for tensor in tensors.values()), default=0))
    if longest == 0:
        return {path: bytes(16) for path in tensors}
    device = next(iter(tensors.values())).device
    factors = _factors(longest + 1, device)
    pieces: list[_Piece] = []
    sums: list[torch.Tensor] = []
    for load in _loads(tensors, chunk_words):
        sums.append(_sums_of(load, factors))
        pieces += load
    for piece, (first, second) in zip(pieces, torch.cat(sums).tolist(), strict=True):
        factor = _factor(piece.number)
        one, two = totals[piece.path]
        totals[piece.path] = (one + first * factor) & _MASK, (two + second * factor) & _MASK
    return {path: one.to_bytes(8, "little") + two.to_bytes(8, "little") for path, (one, two) in totals.items()}


def _loads(tensors: Mapping[str, torch.Tensor], chunk_words: int) -> Iterator[list[_Piece]]:
    """Pieces to be worked on together: a chunk of a large tensor, or many small ones, which cost a launch each else."""
    load: list[_Piece] = []
    total = 0
    for path, tensor in tensors.items():
        data = bytes_of(tensor)
        for number, chunk in enumerate(torch.split(data, 8 * chunk_words) if data.numel() else ()):
            piece = _Piece(path, number, chunk)
            if total + piece.words > chunk_words:
                yield load
                load, total = [], 0
            load.append(piece)
            total += piece.words
    if load:
        yield load


def _sums_of(load: list[_Piece], factors: torch.Tensor) -> torch.Tensor:
    """Both sums of each piece, as rows."""
    words = _words_of(load)
    many = len(load) > 1
    first = torch.cat([factors[: piece.words] for piece in load]) if many else factors[: words.numel()]
    second = torch.cat([factors[1 : piece.words + 1] for piece in load]) if many else factors[1 : words.numel() + 1]
    product = words * first
    mixed = product >> 32
    mixed.bitwise_xor_(product).mul_(second)
    if not many:
        return torch.stack([product.sum(), mixed.sum()]).view(1, 2)
    ends = torch.tensor([piece.words for piece in load]).cumsum(0).to(words.device) - 1
    # Sums that wrap are as good as any: what stood before a piece is taken off again, modulo 2^64.
    running = torch.stack([product.cumsum(0)[ends], mixed.cumsum(0)[ends]], dim=1)
    return torch.diff(running, dim=0, prepend=torch.zeros_like(running[:1]))


def _words_of(load: list[_Piece]) -> torch.Tensor:
    """The pieces one after the other, each filled up with zeros to whole words; a single one is not copied."""
    if len(load) == 1 and load[0].data.numel() % 8 == 0 and load[0].data.data_ptr() % 8 == 0:
        return load[0].data.view(torch.int64)
    zeros = torch.zeros(8, dtype=torch.uint8, device=load[0].data.device)
    parts: list[torch.Tensor] = []
    for piece in load:
        parts.append(piece.data)
        if rest := piece.data.numel() % 8:
            parts.append(zeros[rest:])
    return torch.cat(parts).view(torch.int64)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random, the same on every rank."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_signed(_GOLDEN))
    for _ in range(2):
        mixed.bitwise_xor_(mixed >> 32).mul_(_signed(_MIX))
    return mixed.bitwise_or_(1)


def _factor(number: int) -> int:
    """The same for one chunk of a tensor; 1 for the first."""
    return (number * _GOLDEN * 2 + 1) & _MASK


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
