"""What DeepSpeed's ZeRO leaves: a folder for each step, with a torch file for each rank."""

from __future__ import annotations

import re
from pathlib import Path

from evergrad._files import file_errors, open_file
from evergrad.errors import DamagedFile, FileAccessError, UnknownFormat, UnsupportedContent
from evergrad.formats.byte_source import close_all
from evergrad.formats.checkpoint import Checkpoint, Format, Probe
from evergrad.formats.folders import OpenCheckpoint, by_file
from evergrad.formats.unsupported_files import Beside, unread_file

LATEST = "latest"
MAX_LATEST_BYTES = 4096
MAX_FILES = 4096  # all of them are open at once
_FILE = re.compile(r".*(model|optim)_states\.pt")
_STEP = re.compile(r"global_step\d+")


class DeepSpeed(Format):
    """A `global_step…` folder, or the folder above it through the name in `latest`.

    No index says what belongs together, so tensors are listed by file: `mp_rank_00_model_states.pt/module/fc.weight`.
    """

    name = "deepspeed"

    def __init__(self, opener: OpenCheckpoint) -> None:
        self._open_file = opener

    def recognises(self, probe: Probe) -> bool:
        """A folder with `…model_states.pt` or `…optim_states.pt`, or one that names such a folder in `latest`."""
        if any(_FILE.fullmatch(name) for name in probe.names):
            return True
        if LATEST not in probe.names or not (probe.path / LATEST).is_file():
            return False
        if any(_STEP.fullmatch(name) for name in probe.names) or "zero_to_fp32.py" in probe.names:
            return True
        tag = _tag(probe.path)
        return tag in probe.names and bool(_states(probe.path / tag))

    def open(self, path: Path) -> Checkpoint:
        """Open every file of the step."""
        folder = path if _states(path) else _latest(path)
        opened: dict[str, Checkpoint] = {}
        beside = Beside()
        try:
            files = _states(folder)
            if len(files) > MAX_FILES:
                hint = "Open single files."
                raise UnsupportedContent(folder, f"{len(files)} files, more than can be open at once", hint=hint)
            for file in files:
                try:
                    opened[file.name] = self._open_file(file)
                except UnknownFormat:
                    beside.add(file, unread_file(file))
            beside.add_rest(folder, {folder / name for name in opened})
            return by_file(self.name, folder, opened, beside)
        except BaseException:
            close_all(opened.values())
            raise


def _latest(folder: Path) -> Path:
    """The folder that `latest` names, which is one beside it."""
    latest, tag = folder / LATEST, _tag(folder)
    if "/" in tag or "\\" in tag or not tag.isprintable() or tag in ("", ".", ".."):
        expected = "the name of a folder beside it"
        raise DamagedFile(latest, "points elsewhere", expected=expected, found=repr(tag[:200]))
    step = folder / tag
    if not step.is_dir():
        raise FileAccessError(latest, f"names {tag!r}, which is not there", hint="Is the download complete?")
    if not _states(step):
        raise FileAccessError(latest, f"names {tag!r}, which holds no …model_states.pt and no …optim_states.pt")
    return step


def _tag(folder: Path) -> str:
    latest = folder / LATEST
    with file_errors(latest), open_file(latest) as file:
        return file.read(MAX_LATEST_BYTES).decode("utf-8", "replace").strip()


def _states(folder: Path) -> list[Path]:
    with file_errors(folder):
        return sorted(child for child in folder.iterdir() if _FILE.fullmatch(child.name) and child.is_file())
