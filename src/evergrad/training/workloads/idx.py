"""Strict reading of idx files, as MNIST has them: a magic number, big-endian dimensions, unsigned bytes.

Nothing is believed before it is checked, and no more is unpacked from a gzip file than the header speaks of.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded

_UNSIGNED_BYTE = 8
_LARGEST = 1 << 30  # bytes; MNIST's images are 47 million


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in an idx file of so many dimensions, gzipped if its name ends with .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read(path, cast(BinaryIO, file), dimensions)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedFile(path, f"gzip: {error}", hint="Get the file again.") from None
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {error.strerror or error}") from None


def _read(path: Path, file: BinaryIO, dimensions: int) -> npt.NDArray[np.uint8]:
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    length = 4 + 4 * dimensions
    header = file.read(length)
    if header[:4] != magic:
        raise DamagedFile(
            path, "is no such idx file", expected=f"magic {magic.hex()}", found=header[:4].hex() or "nothing"
        )
    if len(header) < length:
        raise DamagedFile(path, "header cut short", expected=f"{length} bytes", found=len(header))
    shape = struct.unpack(f">{dimensions}I", header[4:])
    size = 1
    for extent in shape:
        size *= extent
    told = "×".join(map(str, shape))
    if size > _LARGEST:
        raise LimitExceeded(path, f"header speaks of {told} bytes", expected=f"{_LARGEST} or fewer")
    # One more than there should be: what follows shows, and a gzip file's checksum is looked at.
    content = file.read(size + 1)
    if len(content) != size:
        found = f"{len(content)}" if len(content) < size else "more"
        raise DamagedFile(path, f"size is not the header's {told}", expected=f"{size} bytes", found=found)
    return np.frombuffer(content, np.uint8).reshape(shape)
