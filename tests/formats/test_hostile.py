"""Bad input, by accident or on purpose: one clear line, nothing executed, little memory, little time."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import DamagedFile, FileAccessError, FormatError, LimitExceeded, UnknownFormat, UnsupportedContent
from evergrad.formats import pickle_reader
from refusals import refusal_of_file

LIST = """
import evergrad as eg
try:
    with eg.open_checkpoint(sys.argv[1]) as ck:
        for name in ck.tensors:
            ck.read_bits(name)
    print("read", len(ck.tensors))
except eg.EvergradError as error:
    assert "\\n" not in str(error), repr(str(error))
    print(type(error).__name__, error)
"""


def torch_zip(path: Path, pickled: bytes, records: dict[str, bytes] | None = None) -> Path:
    """A torch zip around any pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        for key, data in (records or {"0": bytes(64)}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


class Runs:
    """Unpickling this creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_read_and_not_run(zipped: bool, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    state = {"w": torch.ones(3), "evil": Runs(mark)}
    torch.save(state, path := tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with eg.open_checkpoint(path) as ck:
        assert ck.read("w").tolist() == [1, 1, 1]
        assert ck.others == {"evil": "posix.mkdir"}
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "torch would have run it"


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_understood(protocol: int, tmp_path: Path) -> None:
    value = {
        "t": (1, 2, 3, 4), "one": (1,), "none": None, "yes": True, "no": False, "int": -5, "long": 2**70, "float": 1.5,
        "text": "grüß", "bytes": b"\x00\xff", "list": [1, [2]], "dict": {3: {}}, "set": {1, 2},
        "frozen": frozenset({3}), "many": list(range(1500)), "long text": "x" * 70000, "complex": 1j,
    }  # fmt: skip
    path = torch_zip(tmp_path / "a.pt", pickle.dumps(value, protocol))
    with eg.open_checkpoint(path) as ck:
        assert not ck.others
        assert ck.state() == value


def tensor_pickle(shape: str, stride: str, offset: str = "I0", numel: str = "I16", key: str = "V0") -> bytes:
    """A pickle of one float32 tensor, by hand: `{"x": _rebuild_tensor_v2(storage, offset, shape, stride, …)}`."""
    lines = [
        "(dVx", "ctorch._utils", "_rebuild_tensor_v2", "((Vstorage", "ctorch", "FloatStorage", key,
        "Vcpu", numel, "tQ" + offset,
        f"({shape}t({stride}t" + "I00", "ccollections", "OrderedDict", ")RtRs.",
    ]  # fmt: skip
    return "\n".join(lines).encode()


def test_the_hand_made_pickle_is_a_valid_one(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor_pickle("I4\n", "I1\n"))
    with eg.open_checkpoint(path) as ck:
        assert ck.read("x").shape == (4,)


@pytest.mark.parametrize(
    ("pickled", "kind", "word"),
    [
        (tensor_pickle("I17\n", "I1\n"), DamagedFile, "too short"),
        (tensor_pickle("I4\n", "I1\n", numel="I999999999999"), DamagedFile, "too short"),
        (tensor_pickle("I4\n", "I1\n", offset="I13"), DamagedFile, "too short"),
        (tensor_pickle("I4\n", "I1\n", offset="I-1"), DamagedFile, "offset"),
        (tensor_pickle("I-4\n", "I1\n"), DamagedFile, "impossible shape"),
        (tensor_pickle("I4\n", "I-1\n"), DamagedFile, "impossible shape"),
        (tensor_pickle("I99999999999999999999\n", "I1\n"), DamagedFile, "impossible shape"),
        (tensor_pickle("I4\n", "I1\nI1\n"), DamagedFile, "damaged"),
        (tensor_pickle("I1000000000000\n", "I0\n"), LimitExceeded, "absurd shape"),
        (tensor_pickle("I4\n", "I1\n", key="V../../../etc/passwd"), DamagedFile, "record is missing"),
        (tensor_pickle("Va\n", "I1\n"), DamagedFile, "impossible shape"),
        (b"\x80\x02}", DamagedFile, "cut short"),
        (b"", DamagedFile, "cut short"),
        (b".", DamagedFile, "damaged"),
        (b"\x80\x09N.", DamagedFile, "protocol"),
        (b"\xff\xff", DamagedFile, "unknown opcode"),
        (b"(.", DamagedFile, "mark"),
        (b"X\xff\xff\xff\x7fabc.", DamagedFile, "runs beyond the end"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", DamagedFile, "run beyond the end"),
        (b"\x8b\xff\xff\xff\x7f.", DamagedFile, "integer of"),
        (b"I" + b"9" * 100_000 + b"\n.", DamagedFile, "damaged"),
        (b"j\xff\xff\xff\x7f.", DamagedFile, "damaged"),
        (b"}]Ns.", DamagedFile, "unhashable"),
        (b"\x82\x01.", DamagedFile, "extension"),
        (b"](" + b"(" * 100_000 + b"t" * 100_000 + b"e.", DamagedFile, "deep"),
        (
            b"}" * 300 + b"".join(b"X\x01\0\0\0as"[:0] for _ in range(1)) + b"0" * 299 + b"q\0X\x01\0\0\0ah\0s.",
            DamagedFile,
            "itself",
        ),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else None,
)
def test_a_bad_pickle_is_refused_in_one_line(
    pickled: bytes, kind: type[FormatError], word: str, tmp_path: Path
) -> None:
    path = torch_zip(tmp_path / "bad.pt", pickled)
    (line,) = refusal_of_file(path, kind)
    assert path.name in line
    assert word in line


@pytest.mark.parametrize(
    ("name", "pickled"),
    [
        ("huge memo index", b"Nr\xff\xff\xff\xff."),
        ("a crowd of empty dicts", b"(" + b"}" * 300_000 + b"l."),
        pytest.param("twenty million opcodes", b"N0" * 10_000_000 + b"N.", marks=pytest.mark.slow),
        ("lists in lists, twice each", b"]" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(60)) + b"."),
        ("tuples of tuples as a key", b"}K\x01\x85" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"Ns."),
        (
            "colliding integer keys",
            b"}("
            + b"".join(b"\x8a\x20" + ((2**61 - 1) * (i + 2**180)).to_bytes(32, "little") + b"N" for i in range(20_000))
            + b"u.",
        ),
        (
            "names that grow",
            b"}" + b"X\x00\x10\x00\x00" + b"k" * 4096 + b"q\0}" + b"".join(b"h\0}" for _ in range(1)) + b"ss.",
        ),
    ],
)
def test_a_bomb_stays_small(name: str, pickled: bytes, tmp_path: Path, limited: Callable[..., str]) -> None:
    path = torch_zip(tmp_path / "bomb.pt", pickled)
    said = limited(LIST, path, memory=2 << 30 if "opcodes" in name else 1 << 30, seconds=40)
    assert said.startswith(("DamagedFile", "LimitExceeded", "read 0")), said


def test_the_number_of_opcodes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_reader, "MAX_OPCODES", 1000)
    path = torch_zip(tmp_path / "a.pt", b"N0" * 1000 + b"N.")
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "opcodes" in line


def test_a_zip_bomb_is_refused(tmp_path: Path, limited: Callable[..., str]) -> None:
    with zipfile.ZipFile(path := tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        header = (
            b"\x93NUMPY\x01\x00v\x00"
            + b"{'descr': '|u1', 'fortran_order': False, 'shape': (1200000000,), }".ljust(117)
            + b"\n"
        )
        with archive.open("a.npy", "w", force_zip64=True) as member:
            member.write(header)
            for _ in range(1200):
                member.write(bytes(1_000_000))
    said = limited(
        """
        import evergrad as eg
        with eg.open_checkpoint(sys.argv[1]) as ck:
            print(ck.tensors["a"].nbytes)
        """,
        path,
    )
    assert int(said) == 1_200_000_000, "listing it costs nothing"


def _patched(raw: bytes, offset: int, form: str, value: int) -> bytes:
    return raw[:offset] + struct.pack(form, value) + raw[offset + struct.calcsize(form) :]


def test_a_zip_that_points_outside_is_refused(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor_pickle("I4\n", "I1\n"))
    raw = path.read_bytes()
    record = raw.index(b"archive/data/0", raw.index(b"PK\x01\x02")) - 46
    end = raw.index(b"PK\x05\x06")
    for offset, form, value, word in [
        (record + 42, "<L", 10**9, "lies outside"),  # where the member is
        (record + 42, "<L", 7, "overlap"),
        (record + 42, "<L", raw.index(b"PK\x03\x04", 4) + 3, "overlap"),
        (record + 20, "<L", 10**9, "lies outside"),  # its stored size
        (record + 24, "<L", 1, "two sizes"),
        (record + 10, "<H", 99, "compressed by method 99"),
        (record + 8, "<H", 1, "encrypted"),
        (end + 16, "<L", 10**9, "lies outside"),  # where the directory is
        (end + 12, "<L", 10**9, "lies outside"),  # its size
        (end + 10, "<H", 60_000, "cut short"),  # how many members
    ]:
        path.write_bytes(_patched(raw, offset, form, value))
        (line,) = refusal_of_file(path, FormatError)
        assert path.name in line
        assert word in line
    torch.save({"a": torch.arange(100.0)}, path)  # torch writes the 64-bit directory end, always
    raw = path.read_bytes()
    end64 = raw.index(b"PK\x06\x06")
    path.write_bytes(_patched(raw, end64 + 48, "<Q", 10**15))
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "lies outside" in line
    path.write_bytes(_patched(raw, end64 + 32, "<Q", 10**15))
    (line,) = refusal_of_file(path, LimitExceeded)
    assert path.name in line
    assert "members" in line
    path.write_bytes(raw.replace(b"a/data/0", b"b/data/0"))
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "record is missing" in line
    assert "a/data/0" in line


@pytest.mark.parametrize(
    ("header", "kind", "word"),
    [
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}', DamagedFile, "not JSON"),
        (b'{"a":' + b"[" * 200_000, DamagedFile, "not JSON"),
        (b'{"a":3}', DamagedFile, "without dtype"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1600]}}', DamagedFile, "beyond the end"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}', DamagedFile, "impossible"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[-4,12]}}', DamagedFile, "impossible"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}}', DamagedFile, "wrong length"),
        (
            b'{"a":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,16]}}',
            DamagedFile,
            "impossible",
        ),
        (b'{"a":{"dtype":"F32","shape":[4.5],"data_offsets":[0,16]}}', DamagedFile, "impossible"),
        (
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
            DamagedFile,
            "overlaps",
        ),
        (b'{"__metadata__":{"x":1}}', DamagedFile, "__metadata__"),
        (
            b'{"__metadata__":{"evergrad.skeleton":"{}"},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
            DamagedFile,
            "damaged",
        ),
        (
            b'{"__metadata__":{"evergrad.dtypes":"{\\"a\\":[\\"object\\",[1]]}"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            DamagedFile,
            "damaged",
        ),
        (b'{"__metadata__":{"evergrad.aliases":"{\\"a\\":\\"a\\"}"}}', DamagedFile, "damaged"),
    ],
    ids=lambda value: value[:40].decode() if isinstance(value, bytes) else None,
)
def test_a_bad_safetensors_header_is_refused(header: bytes, kind: type[FormatError], word: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    (line,) = refusal_of_file(path, kind)
    assert path.name in line
    assert word in line


def test_absurd_header_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((10**11).to_bytes(8, "little") + b'{"a":{}}')
    (line,) = refusal_of_file(path, LimitExceeded)
    assert path.name in line
    assert "header length" in line
    assert "expected at most" in line
    assert "found 100000000000" in line
    path.write_bytes((5000).to_bytes(8, "little") + b'{"a":{}}')
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "cut short" in line
    assert "expected 5000 bytes" in line


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000,), }", "cut short"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", "impossible shape"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1<<70,), }", "not an npy header"),
        ("{'descr': __import__('os').system('x'), 'fortran_order': False, 'shape': (1,), }", "not an npy header"),
        ("(" * 3000, "not an npy header"),
        ("{'descr': '<f4'}", "not an npy header"),
    ],
)
def test_a_bad_npy_header_is_refused(header: str, word: str, tmp_path: Path) -> None:
    text = header.encode() + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16))
    path = tmp_path / "a.npy"
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert word in line


def test_object_arrays_are_listed_and_left_alone(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    np.savez(tmp_path / "a.npz", evil=np.array([Runs(mark)], object), text=np.array(["a"]), good=np.ones(3))
    with eg.open_checkpoint(tmp_path / "a.npz") as ck:
        assert list(ck.tensors) == ["good"]
        assert ck.others == {"evil": "an array of object", "text": "an array of <U1"}
    assert not mark.exists()


@pytest.mark.parametrize(
    ("weight_map", "word"),
    [
        ({"a": "../outside.safetensors"}, "outside its folder"),
        ({"a": "/etc/passwd"}, "outside its folder"),
        ({"a": "..\\x.safetensors"}, "outside its folder"),
        ({"a": "x\0.safetensors"}, "outside its folder"),
        ({"a": ""}, "outside its folder"),
        ({"a": "model.safetensors.index.json"}, "outside its folder"),
        ({"a": "missing.safetensors"}, "not there"),
        ({"nope": "inside.safetensors"}, "does not hold it"),
        ({"a": 3}, "no weight_map"),
        (["a"], "no weight_map"),
    ],
    ids=str,
)
def test_an_index_that_points_elsewhere_is_refused(weight_map: object, word: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "a.pt")
    eg.convert(folder / "a.pt", folder / "inside.safetensors")
    (folder / "a.pt").rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (line,) = refusal_of_file(index, FormatError)
    assert index.name in line
    assert word in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"not a checkpoint", ["no checkpoint recognised", "expected", "found a file that begins 6e 6f 74"]),
        (b"PK\x03\x04" + bytes(100), ["no zip directory"]),
        (b"PK\x05\x06", ["no zip directory"]),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), ["is damaged"]),
        (b"\x93NUMPY\x07\x00", ["not an npy header"]),
        (bytes(257) + b"ustar" + bytes(300), ["tar"]),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(content: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    path = tmp_path / "x.pt"
    (line,) = refusal_of_file(path, FormatError)
    assert path.name in line
    assert all(word in line for word in words), line


def test_missing_files_and_strange_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(FileAccessError, match=r"modle\.pt: no such file or folder\. Did you mean .*model\.pt"):
        eg.open_checkpoint(tmp_path / "modle.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownFormat, match="an empty folder"):
        eg.open_checkpoint(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FileAccessError, match="neither a file nor a folder"):
            eg.open_checkpoint(path)
    with pytest.raises(FileAccessError):
        eg.open_checkpoint("/proc/self/mem")


def test_a_torchscript_archive_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(path := tmp_path / "net.pt", "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"net/{name}", b"")
    (line,) = refusal_of_file(path, UnsupportedContent)
    assert path.name in line
    assert "TorchScript" in line


def test_a_message_stays_one_printable_line_whatever_the_names_are(tmp_path: Path) -> None:
    torch.save({"evil\n\x1b[31m": torch.ones(2)}, path := tmp_path / "a.pt")
    with eg.open_checkpoint(path) as ck, pytest.raises(eg.EvergradError) as caught:
        ck.read("evil")
    assert str(caught.value).isprintable()


def test_thousands_of_tied_tensors_are_listed_at_a_bounded_cost(tmp_path: Path, limited: Callable[..., str]) -> None:
    base = torch.zeros(4)
    torch.save({f"t{i}": base for i in range(5000)}, path := tmp_path / "a.pt")
    said = limited(
        """
        import evergrad as eg
        with eg.open_checkpoint(sys.argv[1]) as ck:
            print(max(len(info.shares) for info in ck.tensors.values()))
        """,
        path,
    )
    assert int(said) == 100


def _large(count: int) -> bytes:
    """Integers that all have the same hash."""
    return b"".join(b"\x8a\x20" + ((2**61 - 1) * (i + 2**180)).to_bytes(32, "little") for i in range(count))


COMPLEX = b"c__builtin__\ncomplex\n(G" + bytes(8) + b"G" + bytes(8) + b"tR"


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"}(" + (COMPLEX + b"N") * 3 + b"u.", id="complex keys"),
        pytest.param(b"c__builtin__\nset\n((" + _large(5000) + b"ltR.", id="a set of colliding integers"),
        pytest.param(
            b"}X\x00\x10\x00\x00" + b"k" * 4096 + b"q\0(" + b"h\0" * 3000 + b"tNs.", id="a long tuple as a key"
        ),
        pytest.param(
            b"}X\xa0\x0f\x00\x00" + b"k" * 4000 + b"](" + b"NNNN" * 3000 + b"es.", id="one long name, many places"
        ),
    ],
)
def test_keys_that_cost_more_than_they_weigh_are_refused(pickled: bytes, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", pickled)
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line


def test_a_program_of_gigabytes_in_a_few_kilobytes_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(path := tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"N0" * 8_000_000 + b"N.")
    (line,) = refusal_of_file(path, LimitExceeded)
    assert path.name in line
    assert "too large" in line


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    path = tmp_path / "a.safetensors"
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "twice" in line
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"1")
        archive.writestr("y.npy", b"2")
    raw = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(raw.replace(b"y.npy", b"x.npy"))
    path = tmp_path / "a.npz"
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "two zip members" in line


def test_a_shape_that_no_tensor_has_is_refused_even_when_it_is_empty(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[0,2305843009213693952,2305843009213693952],"data_offsets":[0,0]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    path = tmp_path / "a.safetensors"
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "impossible shape" in line


def test_bytes_that_are_no_text_are_told_in_words(tmp_path: Path) -> None:
    header = b'{"\xff": 1}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": "\xff"}')
    for name, words in (
        ("a.safetensors", "header is not JSON: expected UTF-8 text, found the byte 0xff at offset 2"),
        ("model.safetensors.index.json", "is not JSON: expected UTF-8 text, found the byte 0xff at offset 16"),
    ):
        with pytest.raises(DamagedFile, match=f"{name}: {words}"):
            eg.open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(6, "expected 8 bytes or more"), (8, "expected 10 bytes or more"), (9, "expected 10 bytes or more"),
     (10, "expected 128 bytes"), (60, "expected 128 bytes"), (130, "expected 32 bytes for float32 (8,)")],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True], ids=["npy", "npz"])
def test_a_npy_file_that_is_cut_short_says_how_far_it_goes(
    length: int, expected: str, packed: bool, tmp_path: Path
) -> None:
    np.save(tmp_path / "whole.npy", np.ones(8, np.float32))
    data = (tmp_path / "whole.npy").read_bytes()[:length]
    path = tmp_path / ("cut.npz" if packed else "cut.npy")
    if packed:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", data)
    else:
        path.write_bytes(data)
    found = f"found {length - 128 if length > 128 else length} bytes)"
    (line,) = refusal_of_file(path, DamagedFile)
    assert path.name in line
    assert "is cut short" in line
    assert expected in line
    assert found in line
    assert "Take another copy of the file." in line
