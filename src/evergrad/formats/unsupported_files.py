"""Files that are no checkpoint of ours, named by their signature, each with what to do instead.

Only names are given: nothing of these files is read beyond their first bytes, a zip directory, or the field numbers of
a protocol buffer.
"""

from __future__ import annotations

import bz2
import lzma
import re
import stat
import zlib
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evergrad._files import file_errors
from evergrad.errors import FormatError, UnknownFormat
from evergrad.formats.checkpoint import OtherTensor, Probe
from evergrad.formats.hdf5.checkpoint import Hdf5
from evergrad.formats.keras_zip import KerasZip
from evergrad.formats.numpy_file import Npy, Npz
from evergrad.formats.safetensors import Safetensors
from evergrad.formats.torch_file import TorchLegacy, TorchZip
from evergrad.formats.zip_archive import Archive


@dataclass(frozen=True, slots=True)
class FileSignature:
    """A kind of file that is not read: its name in a sentence, and the next step as a sentence."""

    what: str
    advice: str
    holds_tensors: bool = False
    """True if such a file usually is a model or the data of one, whatever its name."""


_SAVE_STATE = "Save the weights of the model it was made from with torch.save or safetensors."
_UNPACK = "Unpack it, and open the checkpoint in it."
_DOWNLOAD = "Download the file again: this is what the server answered instead."
_NO_MODEL = "It holds no checkpoint."

_GZIP, _XZ, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\0", b"BZh"

_STARTS: tuple[tuple[bytes, FileSignature], ...] = (
    (
        b"GGUF",
        FileSignature("a GGUF model (llama.cpp)", "Open the safetensors or PyTorch files it was made from.", True),
    ),
    (b"version https://git-lfs", FileSignature("a Git LFS pointer", "Fetch the file itself: git lfs pull.")),
    (b"/annex/objects/", FileSignature("a git-annex pointer", "Fetch the file itself: git annex get.")),
    (_GZIP, FileSignature("a gzip file", "Unpack it: gunzip, or tar -xzf.")),
    (b"\x28\xb5\x2f\xfd", FileSignature("a Zstandard file", "Unpack it: zstd -d.")),
    (_XZ, FileSignature("an xz file", "Unpack it: xz -d.")),
    (_BZIP2, FileSignature("a bzip2 file", "Unpack it: bunzip2.")),
    (b"\x04\x22\x4d\x18", FileSignature("an LZ4 file", "Unpack it: lz4 -d.")),
    (b"7z\xbc\xaf\x27\x1c", FileSignature("a 7z archive", _UNPACK)),
    (b"Rar!\x1a\x07", FileSignature("a RAR archive", _UNPACK)),
    (b"PAR1", FileSignature("a Parquet file", "It holds tables. " + _NO_MODEL)),
    (b"ARROW1", FileSignature("an Arrow file", "It holds tables. " + _NO_MODEL)),
    (b"SQLite format 3\0", FileSignature("an SQLite database", _NO_MODEL)),
    (b"\x7fELF", FileSignature("an ELF program or library", _NO_MODEL)),
    (b"%PDF-", FileSignature("a PDF document", _NO_MODEL)),
    (b"\x89PNG\r\n\x1a\n", FileSignature("a PNG image", _NO_MODEL)),
    (b"\xff\xd8\xff", FileSignature("a JPEG image", _NO_MODEL)),
    (
        b"MATLAB 5.0 MAT-file",
        FileSignature("a MATLAB file", "Load it with scipy.io.loadmat and save it with numpy.savez.", True),
    ),
    (
        (0x112).to_bytes(8, "little"),
        FileSignature("an MXNet parameter file", "Load it with mxnet.nd.load and save it with numpy.savez.", True),
    ),
    *(
        (magic, FileSignature("a GGML model (llama.cpp before GGUF)", "Open the PyTorch files it was made from.", True))
        for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
)
_LITE = FileSignature("a TensorFlow Lite model", "Open the SavedModel or Keras file it was made from.", True)
_ONNX = FileSignature("an ONNX model", _SAVE_STATE, True)
_CORE_ML = FileSignature("a Core ML model", _SAVE_STATE, True)
_CORE_ML_PACKAGE = FileSignature("a Core ML package", _SAVE_STATE)
_GRAPH = FileSignature(
    "the graph of a SavedModel", "Open the folder that holds it: its variables/ has the tensors.", True
)
_JOBLIB = FileSignature(
    "a joblib pickle", "Load it with joblib.load where you trust it, and save its arrays with numpy.savez.", True
)
_JOBLIB_PACKED = "as joblib writes it with compress="
_JOBLIB_STATE = "Load it with joblib.load where you trust it, and save its state uncompressed, with torch.save."
_ZLIB = FileSignature("zlib-compressed data", f"If joblib wrote it: {_JOBLIB_STATE[0].lower()}{_JOBLIB_STATE[1:]}")
_PICKLE = FileSignature("a pickle", "Load it with pickle where you trust it, and save its state with torch.save.", True)
_MSGPACK = FileSignature(
    "a msgpack file, as Flax writes it",
    "Load it with flax.serialization.msgpack_restore and save it with safetensors.flax.save_file.",
    True,
)
_HTML = FileSignature("an HTML page", _DOWNLOAD)
_XML = FileSignature("an XML document", _DOWNLOAD)
_ZEROS = FileSignature("a file of zeros", "It was allotted and not written: take another copy.")
_KERAS_JSON = FileSignature("a Keras architecture", "It holds no weights: open the .weights.h5 or .keras file.")
_JSON = FileSignature("a JSON file", "It holds no tensors: open the weights beside it.")
_OLD_TAR = FileSignature("PyTorch's tar format of 2016", "Load it with torch.load and save it again.", True)
_EXPORT = FileSignature("a torch.export program", "Save its state_dict with torch.save.", True)
_ARCHIVED = re.compile(r".*\.(safetensors|pt|pth|bin|ckpt|h5|hdf5|keras|npz|npy|pb|index)")
_MSGPACK_MAP = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.|\xda..)[\w./-]", re.DOTALL)
# Protocols 2 to 5 say so; 1 and 0 begin with a container that is put into the memo, or with a global.
_PICKLED = re.compile(rb"\x80[\x02-\x05]|[\]}(]q[\x00\x01]|\([dl]p[01]\n|c[a-z_][\w.]*\n")
_MAX_FIELDS = 64
_START_BYTES = 64
_LZMA_MEMORY = 1 << 27


def unread_file_error(path: Path, signature: FileSignature, inner: str = "") -> UnknownFormat:
    """The error that names a file, or a folder by a file in it."""
    which = f"{inner} is" if inner else "is"
    return UnknownFormat(path, f"{which} {signature.what}, which is not read", hint=signature.advice)


def signature_of(probe: Probe) -> FileSignature | None:
    """The kind of a file or folder that no format recognises, if its first bytes tell."""
    if probe.is_folder:
        return _CORE_ML_PACKAGE if {"Manifest.json", "Data"} <= probe.names else None
    head = probe.head
    if (packed := _packed_pickle(head)) is not None:
        return packed
    for start, signature in _STARTS:
        if head.startswith(start):
            return signature
    if head[4:8] == b"TFL3":
        return _LITE
    if head[257:262] == b"ustar":
        return _tar(head)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip(probe.path)
    if head and not head.strip(b"\0"):
        return _ZEROS
    return _text(head) or _protobuf(probe) or _serialised(head)


def _text(head: bytes) -> FileSignature | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:512].lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return _HTML
    if text.startswith(b"<?xml"):
        return _XML
    if re.match(rb'[{\[]\s*["{\[}\]]', text):
        return _KERAS_JSON if b'"class_name"' in head and b'"config"' in head else _JSON
    return None


def _packed_pickle(head: bytes) -> FileSignature | None:
    """A pickle that was compressed as a whole, by what its first bytes become; zlib also where it is none."""
    is_zlib = head[:2] in (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
    kinds = {
        "zlib": is_zlib,
        "gzip": head.startswith(_GZIP),
        "bzip2": head.startswith(_BZIP2),
        "xz": head.startswith(_XZ),
        "lzma": head.startswith(b"\x5d\0\0"),
    }
    kind = next((kind for kind, fits in kinds.items() if fits), "")
    start = b""
    with suppress(zlib.error, lzma.LZMAError, OSError, EOFError, ValueError):
        if kind in ("zlib", "gzip"):
            start = zlib.decompressobj(15 if kind == "zlib" else 31).decompress(head, _START_BYTES)
        elif kind == "bzip2":
            start = bz2.BZ2Decompressor().decompress(head, _START_BYTES)
        elif kind:
            start = lzma.LZMADecompressor(memlimit=_LZMA_MEMORY).decompress(head, _START_BYTES)
    if _PICKLED.match(start):
        article = "an" if kind in ("xz", "lzma") else "a"
        return FileSignature(f"{article} {kind}-compressed pickle, {_JOBLIB_PACKED}", _JOBLIB_STATE, True)
    return _ZLIB if is_zlib and start else None


def _tar(head: bytes) -> FileSignature:
    """A tar archive with its first file; what comes before it (longer names, Python's `PaxHeader`) is passed over."""
    at, longer = 0, b""
    while head[at + 257 : at + 262] == b"ustar":
        kind, name = head[at + 156 : at + 157], longer or head[at : at + 100].split(b"\0")[0]
        if kind not in b"xgLK" or not kind:
            text = name.decode("utf-8", "backslashreplace")
            return _OLD_TAR if text == "sys_info" else FileSignature(f"a tar archive with {text}", _UNPACK)
        digits = head[at + 124 : at + 136].strip(b"\0 ")
        size = int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else len(head)
        data = head[at + 512 : at + 512 + size]
        if kind == b"L":
            longer = data.split(b"\0")[0]
        elif kind == b"x" and (told := re.search(rb"(?:^|\n)\d+ path=([^\n]+)\n", data)):
            longer = told[1]
        at += 512 + (size + 511) // 512 * 512
    return FileSignature("a tar archive", _UNPACK)


def _zip(path: Path) -> FileSignature:
    try:
        archive = Archive.open(path)
    except FormatError:
        return FileSignature("a zip archive", "It is damaged: take another copy.")
    archive.close()
    names = list(archive.members)
    if any(name.endswith(("archive_format", "serialized_exported_program.json")) for name in names):
        return _EXPORT
    found = next((name for name in names if _ARCHIVED.fullmatch(name)), None)
    if found:
        return FileSignature(f"a zip archive with {found}", _UNPACK, True)
    return FileSignature("a zip archive", _NO_MODEL)


def _serialised(head: bytes) -> FileSignature | None:
    if _PICKLED.match(head):
        return _JOBLIB if b"joblib.numpy_pickle" in head else _PICKLE
    return _MSGPACK if _MSGPACK_MAP.match(head) else None


def _protobuf(probe: Probe) -> FileSignature | None:
    """ONNX, Core ML and SavedModel are protocol buffers, which have no magic number: their fields tell."""
    if not probe.head.startswith(b"\x08"):  # all three begin with a version in their field 1
        return None
    fields = _field_numbers(probe.path)
    if 7 in fields and fields <= {*range(1, 9), 14, 20, 25, 26}:
        return _ONNX
    if fields & set(range(200, 4000)) and fields <= {1, 2, 10, *range(200, 4000)}:
        return _CORE_ML
    return _GRAPH if 1 in fields and fields <= {1, 2} and probe.path.name == "saved_model.pb" else None


def _field_numbers(path: Path) -> set[int]:
    """The numbers of the outermost fields of a protocol buffer; none if the file is not made of such."""
    found: set[int] = set()
    with file_errors(path), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)

        def varint() -> int:
            value = shift = 0
            while byte := file.read(1):
                value |= (byte[0] & 0x7F) << shift
                shift += 7
                if byte[0] < 0x80 or shift > 63:
                    return value
            return -1

        for _ in range(_MAX_FIELDS):
            if file.tell() == size:
                return found
            tag = varint()
            kind = tag & 7
            length = {0: 0, 1: 8, 5: 4}.get(kind, -1)
            if kind == 0:
                length = min(0, varint())
            elif kind == 2:
                length = varint()
            if tag < 8 or length < 0 or file.tell() + length > size:
                return set()
            found.add(tag >> 3)
            file.seek(length, 1)
    return found


# Files in a folder that are no part of the checkpoint opened there: models of other formats, and all else.
#
# A file that is a model, or may hold tensors, is listed as content that is not read. Any other (`config.json`, a
# tokenizer, a README) is only named when a conversion would drop it.

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
