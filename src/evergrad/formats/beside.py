"""Files in a folder that are no part of the checkpoint opened there: models of other formats, and all else.

A file that is a model, or may hold tensors, is listed as content that is not read. Any other (`config.json`, a
tokenizer, a README) is only named when a conversion would drop it.
"""

from __future__ import annotations

import stat
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evergrad.errors import FormatError
from evergrad.formats.contract import OtherTensor, Probe
from evergrad.formats.data_file import file_errors
from evergrad.formats.hdf5 import Hdf5
from evergrad.formats.keras_zip import KerasZip
from evergrad.formats.numpy_files import Npy, Npz
from evergrad.formats.safetensors import Safetensors
from evergrad.formats.signatures import signature_of
from evergrad.formats.torch_legacy import TorchLegacy
from evergrad.formats.torch_zip import TorchZip

TENSOR_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy")
"""The endings of files that are opened with their folder."""
_MODELS = (
    *TENSOR_FILES,
    *(".h5", ".hdf5", ".keras", ".gguf", ".ggml", ".onnx", ".onnx_data", ".tflite", ".pb", ".msgpack", ".mlmodel"),
    *(".pt2", ".ot", ".pdparams", ".params", ".mat", ".pkl", ".pickle", ".joblib"),
)
_TEXTS = (".json", ".jsonl", ".md", ".txt", ".py", ".yaml", ".yml", ".toml", ".csv", ".log", ".html", ".jinja")
_READ = (Safetensors(), TorchZip(), TorchLegacy(), Npz(), Npy(), KerasZip(), Hdf5())
_MAX_LOOKED_AT = 1024


@dataclass(slots=True)
class Beside:
    """The content of a folder beside the parts of its checkpoint."""

    others: dict[str, str] = field(default_factory=dict)
    """Models and tensor files that are not read: name → what it is."""
    files: dict[str, Path] = field(default_factory=dict)
    """The path of each of these that is a file."""
    unkept: dict[str, str] = field(default_factory=dict)
    """All else: name → what it is."""

    def add(self, path: Path, what: str) -> None:
        """Name a file that is not read."""
        self.others[path.name], self.files[path.name] = OtherTensor(what), path

    def add_rest(self, folder: Path, taken: Container[Path]) -> None:
        """Name everything in the folder that is not taken; of each file the beginning is read at most."""
        with file_errors(folder):
            rest = sorted(child for child in folder.iterdir() if child not in taken and child.name not in self.others)
        looked_at = 0
        for child in rest:
            is_model = child.name.lower().endswith(_MODELS)
            try:
                mode = child.stat().st_mode
            except OSError:
                self.unkept[child.name] = "a link that leads to no file"
                continue
            if stat.S_ISDIR(mode):
                self.unkept[child.name] = "a folder"
            elif not stat.S_ISREG(mode):
                self.unkept[child.name] = "neither a file nor a folder"
            elif is_model:
                self.add(child, unread_file(child))
            elif child.name.lower().endswith(_TEXTS) or looked_at == _MAX_LOOKED_AT:
                self.unkept[child.name] = "a file without tensors"
            else:
                looked_at += 1
                found = _model(child)
                self._add(child, found or "a file without tensors", is_model=bool(found))

    def _add(self, path: Path, what: str, *, is_model: bool) -> None:
        if is_model:
            self.add(path, what)
        else:
            self.unkept[path.name] = what


def unread_file(path: Path) -> str:
    """Describe a file that is not opened, by its first bytes."""
    probe = Probe(path)
    try:
        signature = signature_of(probe)
        if signature is None or not signature.holds_tensors:
            known = _known(probe)
            if known:
                return known
        return signature.what if signature else "a file of no known format"
    except (FormatError, OSError):
        return "a file that cannot be read"


def _model(path: Path) -> str:
    """Describe a file if its first bytes show that it holds tensors; else return an empty string."""
    probe = Probe(path)
    with suppress(FormatError, OSError):
        signature = signature_of(probe)
        return signature.what if signature is not None and signature.holds_tensors else _known(probe)
    return ""


def _known(probe: Probe) -> str:
    name = next((format.name for format in _READ if format.recognises(probe)), "")
    return f"{'an' if name == Hdf5.name else 'a'} {name} file, which is not opened with its folder" if name else ""
