"""Text as characters: your own, or the documentation that comes with Python."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded, UsageError
from evergrad.injection.rng import Draws
from evergrad.training.workloads.contract import Dataset
from evergrad.training.workloads.gpt import CONTEXT
from evergrad.wording import shown

MOST_TOKENS = 256
"""Different characters; beyond this, the rarest are one."""

_SEED = 64
_LARGEST = 100_000_000  # bytes
_FEWEST = 10  # windows


def read_text() -> tuple[Dataset, int]:
    """Windows of 64 characters and the characters that follow each, and how many different characters there are.

    The last tenth of the text is to judge by; the windows of the rest are shuffled once and for all.
    """
    source, text = _text()
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    known, tokens, counts = np.unique(codes, return_inverse=True, return_counts=True)
    if len(known) > MOST_TOKENS:
        kept = np.sort(np.lexsort((known, -counts))[: MOST_TOKENS - 1])
        table = np.full(len(known), MOST_TOKENS - 1)
        table[kept] = np.arange(len(kept))
        tokens = table[tokens]
    windows = (len(tokens) - 1) // CONTEXT
    if windows < _FEWEST:
        raise UsageError(
            f"data text: expected {_FEWEST * CONTEXT + 1} characters or more in {source}, found {len(text)}"
        )
    train = windows - windows // 10
    x = tokens[: windows * CONTEXT].reshape(windows, CONTEXT)
    y = tokens[1 : windows * CONTEXT + 1].reshape(windows, CONTEXT)
    order = np.argsort(Draws(_SEED).raw(train), kind="stable")
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    data = Dataset(
        name="text",
        train_x=torch.from_numpy(x[order].astype(np.int64)),
        train_y=torch.from_numpy(y[order].astype(np.int64)),
        test_x=torch.from_numpy(x[train:].astype(np.int64)),
        test_y=torch.from_numpy(y[train:].astype(np.int64)),
        chance=float(np.bincount(y[train:].ravel()).max() / y[train:].size),
        facts={
            "samples": f"{CONTEXT} characters of {min(len(known), MOST_TOKENS)} kinds",
            "source": f"{source}, {len(text):,} characters, digest {digest}",
        },
    )
    return data, min(len(known), MOST_TOKENS)


def _text() -> tuple[str, str]:
    if given := os.environ.get("EVERGRAD_DATA"):
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise UsageError(
                f"data text: EVERGRAD_DATA: expected a folder, found {shown(given)}. Unset it, or name one."
            )
        files = sorted(folder.glob("*.txt"))
        named = [path for path in files if path.name == "text.txt"]
        if len(named or files) > 1:
            raise UsageError(f"data text: {len(files)} .txt files in {folder}. Name the one to learn from text.txt.")
        for path in named or files:
            return str(path), _read(path)
    from pydoc_data.topics import topics

    return "Python's own documentation", "\n\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {error.strerror or error}") from None
    if len(content) > _LARGEST:
        raise LimitExceeded(path, "is too long to learn from", expected=f"{_LARGEST:,} bytes or fewer")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "is no UTF-8 text", found=f"{error.reason} at byte {error.start}") from None
