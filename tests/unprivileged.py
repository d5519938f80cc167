"""Somebody who may read and not write."""

from __future__ import annotations

import os
from pathlib import Path


class Unprivileged:
    """A folder that others may read; as a context, be somebody who may not write there. Root may write anything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        if os.getuid() == 0:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        if os.getuid() == 0:
            os.seteuid(0)
