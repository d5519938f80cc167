"""Which formats there are, and which one a file is of."""

from __future__ import annotations

import logging
import os
import struct
import zlib
from functools import lru_cache
from importlib.metadata import entry_points
from os import PathLike
from pathlib import Path

from evergrad._files import file_errors
from evergrad.errors import (
    DamagedFile,
    EvergradError,
    FileAccessError,
    LimitExceeded,
    UnknownFormat,
    UsageError,
    nearest,
    reason,
)
from evergrad.formats.checkpoint import Checkpoint, Format, Probe
from evergrad.formats.dcp import Dcp
from evergrad.formats.deepspeed import DeepSpeed
from evergrad.formats.folders import PlainFolder, Sharded, TrainerFolder
from evergrad.formats.gc_pause import gc_paused
from evergrad.formats.hdf5.checkpoint import Hdf5
from evergrad.formats.keras_zip import KerasZip
from evergrad.formats.numpy_file import Npy, Npz
from evergrad.formats.orbax import Orbax
from evergrad.formats.safetensors import Safetensors
from evergrad.formats.tensorflow import TensorFlow, index_of_prefix
from evergrad.formats.torch_file import TorchLegacy, TorchZip
from evergrad.formats.unsupported_files import signature_of, unread_file_error
from evergrad.formats.version_folder import VersionFolder
from evergrad.records import MAX_AXES

log = logging.getLogger(__name__)

ENTRY_POINTS = "evergrad.formats"
_MAX_LOOKED_AT = 256


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Open any checkpoint, a file or a folder, recognised by its content and not by its name.

    >>> with open_checkpoint("model.pt") as ck:                         # doctest: +SKIP
    ...     ck.tensors["fc.weight"].shape, ck.read("fc.weight")
    """
    if not os.fspath(path):
        raise UsageError("an empty path names no file: expected the path of a checkpoint, a file or a folder")
    where = _found(Path(path))
    probe = Probe(where)
    try:
        with gc_paused():
            for family in (_ours, _plugins):  # looking for plugins takes longer than opening a file
                for format in family():
                    if format.recognises(probe):
                        return _checked(where, format.open(where))
    except EvergradError:
        raise
    except OSError as error:
        raise FileAccessError(where, f"cannot be read: {reason(error)}") from error
    except MemoryError:
        raise LimitExceeded(where, "does not fit into memory") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        OverflowError,
        RecursionError,
        struct.error,
        zlib.error,
    ) as error:
        # The last net: a damaged file has found a way that no check of ours names.
        raise DamagedFile(where, f"is damaged: {type(error).__name__}: {error}") from error
    raise _unknown(probe)


def _checked(where: Path, opened: Checkpoint) -> Checkpoint:
    """Refuse what no format may serve: arrays with more axes than NumPy has names for."""
    for name, info in opened.tensors.items():
        if len(info.shape) > MAX_AXES:
            opened.close()
            raise LimitExceeded(
                where, f"{name!r}: number of axes", expected=f"at most {MAX_AXES}", found=len(info.shape)
            )
    return opened


def _found(where: Path) -> Path:
    """The file or folder itself, or the index of the TensorFlow checkpoint that is named by its prefix."""
    with file_errors(where):
        if not where.exists():
            index = index_of_prefix(where)
            if index is None:
                raise _missing(where)
            where = index
        if not where.is_file() and not where.is_dir():  # opening a pipe would wait for ever
            raise FileAccessError(where, "is neither a file nor a folder")
        return where


def formats() -> tuple[Format, ...]:
    """Every format, ours first, then those that installed packages add."""
    return (*_ours(), *_plugins())


@lru_cache(maxsize=1)
def _ours() -> tuple[Format, ...]:
    return (
        VersionFolder(),  # before safetensors: a shard with its manifest beside it is one of those, too
        Safetensors(),
        TorchZip(),
        TorchLegacy(),
        Npz(),
        Npy(),
        KerasZip(),
        Hdf5(),
        TensorFlow(),
        Dcp(),
        TrainerFolder(open_checkpoint),
        DeepSpeed(open_checkpoint),
        Sharded(open_checkpoint),
        PlainFolder(open_checkpoint),
        Orbax(),  # last: it looks into every folder below
    )


@lru_cache(maxsize=1)
def _plugins() -> tuple[Format, ...]:
    found: list[Format] = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            format = loaded() if isinstance(loaded, type) else loaded
            if not isinstance(format, Format):
                raise TypeError(f"{entry.value} is not an evergrad Format")
            found.append(format)
        except Exception as error:  # one broken plugin must not take every format with it
            log.warning("format plugin %r could not be loaded: %s", entry.name, error)
    return tuple(found)


def _missing(path: Path) -> FileAccessError:
    beside = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, (name for name in beside if name != path.name), count=1)
    hint = f"Did you mean {str(path.with_name(close[0]))!r}?" if close else ""
    return FileAccessError(path, "no such file or folder", hint=hint)


def _inner(folder: Path, names: list[str]) -> UnknownFormat | None:
    """The error that names the model in a folder, by the first file in it that is one of another format."""
    for name in names[:_MAX_LOOKED_AT]:
        if not name.endswith((".json", ".md", ".txt", ".py")) and (folder / name).is_file():
            signature = signature_of(Probe(folder / name))
            if signature is not None:
                return unread_file_error(folder, signature, name)
    return None


def _unknown(probe: Probe) -> UnknownFormat:
    known = ", ".join(format.name for format in formats())
    if (signature := signature_of(probe)) is not None:
        return unread_file_error(probe.path, signature)
    if probe.is_folder:
        names = sorted(probe.names)
        if (inner := _inner(probe.path, names)) is not None:
            return inner
        found = f"a folder with {', '.join(names[:4])}{' …' if len(names) > 4 else ''}" if names else "an empty folder"
        hint = f"It is a job's run folder: evergrad checkpoints ls {probe.path}" if "job.json" in names else ""
        return UnknownFormat(probe.path, "no checkpoint recognised", expected=known, found=found, hint=hint)
    if not probe.head:
        return UnknownFormat(probe.path, "is empty", expected=known, found="0 bytes")
    return UnknownFormat(
        probe.path, "no checkpoint recognised", expected=known, found=f"a file that begins {probe.head[:8].hex(' ')}"
    )
