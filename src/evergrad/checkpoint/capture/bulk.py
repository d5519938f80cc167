"""Copying large tensors: plain moves of memory, shared by a few threads.

torch would start and join its threads for each tensor. When other processes keep the cores busy, as data loaders do,
every join waits for a thread that is not running: a gigabyte then takes several times as long as in one piece.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence

import torch

from evergrad.checkpoint.layout import Entry

_PIECE_BYTES = 8 << 20  # a tensor larger than this is shared by threads, too
_WORTH_A_THREAD = 16 << 20
_MOST_THREADS = 8  # a memory bus is full by then


class Bulk:
    """Entries whose sources lie in host memory exactly as they will in the file."""

    def __init__(self, address: int, entries: Iterable[tuple[int, Entry]]) -> None:
        """Entries of a shard at this address, each with its number."""
        pieces: list[tuple[int, int, int, int]] = []
        self._numbers: list[int] = []
        for n, entry in entries:
            for start in range(0, entry.nbytes, _PIECE_BYTES):
                nbytes = min(_PIECE_BYTES, entry.nbytes - start)
                pieces.append((len(self._numbers), start, address + entry.offset + start, nbytes))
            self._numbers.append(n)
        total = sum(nbytes for *_, nbytes in pieces)
        # As many as torch itself would take: one, where a launcher gave each of many ranks one.
        count = max(1, min(torch.get_num_threads(), _MOST_THREADS, total // _WORTH_A_THREAD))
        self._shares: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
        done = 0
        for piece in pieces:
            self._shares[done * count // total].append(piece)
            done += piece[-1]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the entries' tensors, picked out of those of all entries, to their places."""
        # What a conjugated or negated view shows is not what lies in memory.
        sources = [tensors[n].resolve_conj().resolve_neg() for n in self._numbers]
        addresses = [source.data_ptr() for source in sources]
        helpers = [threading.Thread(target=_move, args=(share, addresses)) for share in self._shares[1:]]
        for helper in helpers:
            helper.start()
        _move(self._shares[0], addresses)
        for helper in helpers:
            helper.join()


def _move(pieces: Iterable[tuple[int, int, int, int]], addresses: list[int]) -> None:
    for n, start, target, nbytes in pieces:
        ctypes.memmove(target, addresses[n] + start, nbytes)  # lets other threads run meanwhile
