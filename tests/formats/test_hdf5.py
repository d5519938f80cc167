"""HDF5 files of every layout and type, written by h5py and by real frameworks; and states saved as HDF5."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import evergrad as eg
from evergrad.cli import main
from evergrad.dtypes import DType
from evergrad.errors import (
    ConversionLoss,
    DamagedFile,
    EvergradError,
    FileAccessError,
    LimitExceeded,
    UnsupportedContent,
)
from evergrad.formats import losses
from evergrad.formats.hdf5.storage import hyperslabs
from evergrad.records import Check, Role
from evergrad.state import flatten
from evergrad.testing import FormatContract, raw_bytes
from states import every_dtype, same, states, training_state
from unprivileged import Unprivileged

DATA = Path(__file__).parent.parent / "data"

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": True},
    "gzip": {"chunks": True, "compression": "gzip"},
    "gzip-shuffle-fletcher": {"chunks": True, "compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"chunks": True, "compression": "lzf"},
    "fletcher": {"chunks": True, "fletcher32": True},
}
NUMBERS = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16"]
ORDERS = [f"{order}{kind}" for kind in NUMBERS for order in ("<", ">")]


def some_array(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(kind)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(zlib.crc32(kind.encode())).integers(0, 256, count, np.uint8)
    return (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


def to_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every numeric data set, by h5py alone."""
    found: dict[str, torch.Tensor] = {}

    def take(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = (
                torch.zeros(0).to(to_torch(np.zeros(0, item.dtype)).dtype)
                if item.shape is None
                else (to_torch(item[()] if item.shape else np.asarray(item[()], item.dtype)))
            )

    with h5py.File(path, "r") as file:
        file.visititems(take)
    return found


class Hdf5Contract(FormatContract):
    format = "hdf5"

    def write(self, file: h5py.File) -> None:
        raise TypeError(f"{type(self).__name__} must say what to write")

    def options(self) -> dict[str, Any]:
        return {}

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        with h5py.File(path := folder / "data.h5", "w", **self.options()) as file:
            self.write(file)
        return path, read_all(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return read_all(path)


class TestContiguous(Hdf5Contract):
    layout = "contiguous"

    def write(self, file: h5py.File) -> None:
        for kind in [*ORDERS, "?"]:
            file.create_dataset(f"all/{kind}", data=some_array(kind, (5, 7)), **LAYOUTS[self.layout])
        for rank in range(1, 7):
            file.create_dataset(f"rank/{rank}", data=some_array("f4", (3,) * rank), **LAYOUTS[self.layout])
        file["scalar/f4"] = np.float32(3)
        file["scalar/c16"] = 1 + 2j
        file["scalar/flag"] = True
        file["empty/none"] = h5py.Empty("f4")
        file["empty/rows"] = np.zeros((0, 3))


class TestContiguousAfterAUserBlock(TestContiguous):
    def options(self) -> dict[str, Any]:
        return {"userblock_size": 8192}


class TestContiguousOfTheLatestVersion(TestContiguous):
    def options(self) -> dict[str, Any]:
        return {"libver": "latest"}


class TestChunked(TestContiguous):
    layout = "chunked"

    def write(self, file: h5py.File) -> None:
        super().write(file)
        file.create_dataset("edges", data=some_array("f4", (7, 11, 5)), chunks=(3, 4, 2))
        file.create_dataset("roomy", data=some_array("f8", (3, 2)), chunks=(4, 4), maxshape=(None, None))


class TestChunkedAfterAUserBlock(TestChunked):
    def options(self) -> dict[str, Any]:
        return {"userblock_size": 512}


class TestChunkedOfTheLatestVersion(TestChunked):
    def options(self) -> dict[str, Any]:
        return {"libver": "latest"}


class TestGzip(TestContiguous):
    layout = "gzip"
    byte_exact = False


class TestGzipOfTheLatestVersion(TestGzip):
    def options(self) -> dict[str, Any]:
        return {"libver": "latest", "userblock_size": 1024}


class TestGzipShuffleFletcher(TestGzip):
    layout = "gzip-shuffle-fletcher"


class TestLzf(TestGzip):
    layout = "lzf"


class TestFletcher(TestGzip):
    layout = "fletcher"


class TestCompact(Hdf5Contract):
    def write(self, file: h5py.File) -> None:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        creation.set_obj_track_times(False)  # or the library notes in the file at which second it was written to
        for kind in [*ORDERS, "?"]:
            array = some_array(kind, (5, 7))
            item = h5py.h5t.py_create(array.dtype, logical=True)
            data = h5py.h5d.create(file.id, kind.encode(), item, h5py.h5s.create_simple((5, 7)), creation)
            h5py.Dataset(data)[...] = array


class TestNeverWritten(Hdf5Contract):
    """Data sets without a byte of their own: they read as their fill value."""

    byte_exact = False

    def write(self, file: h5py.File) -> None:
        file.create_dataset("contiguous", (40, 5), "f4")
        file.create_dataset("filled", (6, 5), ">i4", fillvalue=7)
        file.create_dataset("chunked", (30, 9), "f8", chunks=(4, 4), fillvalue=-1)
        file.create_dataset("gzip", (9, 9), "u2", chunks=(4, 4), compression="gzip")
        partly = file.create_dataset("partly", (20, 20), "f4", chunks=(6, 7), fillvalue=2)
        partly[8:11, 3:9] = some_array("f4", (3, 6))


class TestLinks(Hdf5Contract):
    """Two names for the same bytes, by hard and soft links, also of whole groups."""

    def write(self, file: h5py.File) -> None:
        file["a/w"] = some_array("f4", (4, 5))
        file["a/other"] = some_array("f4", (3,))
        file["tied"] = file["a/w"]
        file["b"] = file["a"]

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        path, _ = super().make(folder)
        return path, self.load(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        with h5py.File(path) as file:  # visititems gives each object one name only
            return {name: to_torch(file[name][()]) for name in ("a/w", "a/other", "tied", "b/w", "b/other")}


class TestChainerModel(Hdf5Contract):
    format, file, byte_exact = "chainer-h5", "chainer_convnet_gzip.h5", False

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        path = Path(shutil.copy(DATA / self.file, folder))
        return path, read_all(path)


class TestChainerOptimizer(TestChainerModel):
    file, byte_exact = "chainer_adam_plain.h5", True


class TestSavedState(FormatContract):
    format = "pytorch-h5"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        return eg.save_hdf5(state := training_state(), folder / "state.h5"), flatten(state).tensors

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        with h5py.File(path) as file:
            return {"base": to_torch(file["base"][()]), "transposed": to_torch(file["transposed"][()])}


class TestSavedStateOfEveryDtype(FormatContract):
    format = "pytorch-h5"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        return eg.save_hdf5(state := every_dtype(), folder / "state.h5"), state


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*ORDERS, "?"])
def test_exactly_the_asked_bits_differ_to_an_independent_reader(layout: str, kind: str, tmp_path: Path) -> None:
    array = some_array(kind, (9, 11))
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=array, **{**LAYOUTS[layout], **({"chunks": (4, 3)} if LAYOUTS[layout] else {})})
        file.create_dataset("y", data=array, **LAYOUTS[layout])
    random = np.random.default_rng(1)
    with eg.open_checkpoint(path) as ck:
        dtype = ck.tensors["x"].dtype
        indices = random.integers(0, array.size, 200)  # many come several times
        shape = (200,) if dtype.parts == 1 else (200, 2)
        patterns = random.integers(0, np.iinfo(dtype.bits).max, shape, dtype.bits, endpoint=True)
        if dtype is DType.BOOL:
            patterns &= 1
        before = ck.read_bits("x")
        np.testing.assert_array_equal(ck.xor("x", indices, patterns), before[indices])
        wanted = before.copy()
        np.bitwise_xor.at(wanted, indices, patterns)
        np.testing.assert_array_equal(ck.read_bits("x"), wanted)
        for start, stop in ((0, 1), (5, 61), (10, 12), (98, 99), (40, 99)):
            np.testing.assert_array_equal(ck.read_bits("x", start, stop), wanted[start:stop])
    after = read_all(path)
    np.testing.assert_array_equal(raw_bytes(after["x"]), wanted.tobytes())
    assert raw_bytes(after["y"]) == raw_bytes(to_torch(array))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5, 1, 2), (3, 1)])
def test_any_range_is_made_of_few_boxes(shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    numbers = np.arange(count).reshape(shape)
    for start in range(count):
        for stop in range(start + 1, count + 1):
            parts = [
                numbers[tuple(slice(a, a + n) for a, n in zip(corner, lengths, strict=True))].reshape(-1)
                for corner, lengths in hyperslabs(shape, start, stop)
            ]
            assert len(parts) <= 2 * len(shape)
            np.testing.assert_array_equal(np.concatenate(parts), np.arange(start, stop))


def test_layouts_in_one_file_are_altered_side_by_side(tmp_path: Path) -> None:
    arrays = {name: some_array("f4", (20, 10)) for name in LAYOUTS}
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        for name, options in LAYOUTS.items():
            file.create_dataset(name, data=arrays[name], **options)
        file.create_dataset("late", (50, 10), "f4", fillvalue=1)
        arrays["late"] = np.ones((50, 10), np.float32)
    with eg.open_checkpoint(path) as ck:
        for turn in range(3):
            for name in reversed(ck.tensors):
                ck.xor(name, [turn, 150 + turn], [1 << 31, 3])
                arrays[name].view(np.uint32).reshape(-1)[[turn, 150 + turn]] ^= np.array([1 << 31, 3], np.uint32)
                for other, array in arrays.items():
                    np.testing.assert_array_equal(ck.read_bits(other), array.view(np.uint32).reshape(-1), other)
    with h5py.File(path) as file:
        for name, array in arrays.items():
            np.testing.assert_array_equal(file[name][()].view(np.uint32), array.view(np.uint32), name)


def test_tied_names_share_and_soft_links_are_second_names(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["a/w"] = np.arange(4.0)
        file["tied"] = file["a/w"]
        file["soft"] = h5py.SoftLink("/a/w")
        file["a/near"] = h5py.SoftLink("w")
        file["twice"] = h5py.SoftLink("soft")
    with eg.open_checkpoint(path) as ck:
        assert set(ck.tensors) == {"a/w", "tied", "soft", "a/near", "twice"}
        assert set(ck.tensors["a/w"].shares) == {"tied", "soft", "a/near", "twice"}
        ck.xor("twice", [0], [1])
        assert ck.read_bits("tied")[0] == ck.read_bits("a/w")[0] == 1
        state = ck.state()
        assert state["tied"].data_ptr() == state["a"]["w"].data_ptr()


def test_what_is_no_tensor_is_listed_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(bytes(32))
    with h5py.File(tmp_path / "else.h5", "w") as file:
        file["secret"] = np.arange(3)
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["w"] = np.arange(4.0)
        file["text"] = "hello"
        file["fixed"] = np.array([b"ab"])
        file["record"] = np.zeros(2, [("x", "f4"), ("y", "i4")])
        file["almost complex"] = np.zeros(2, [("r", "f4"), ("i", "f8")])
        file.create_dataset("lists", (2,), h5py.vlen_dtype(np.int32))
        file["pointer"] = file["w"].ref
        file["opaque"] = np.void(b"abc")
        file["choice"] = np.zeros(2, h5py.enum_dtype({"A": 0, "B": 1}, "i4"))
        file["wide"] = np.zeros(2, np.longdouble)
        file["when"] = np.array(["2020-01-01"], "M8[s]").astype(h5py.opaque_dtype("M8[s]"))
        file["type"] = np.dtype("f4")
        file["outside"] = h5py.ExternalLink("else.h5", "secret")
        file["sneaky"] = h5py.SoftLink("/outside")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["round"] = h5py.SoftLink("round")
        file["folder"] = h5py.SoftLink("/g")
        file.create_group("g")["up"] = file["/"]
        file.create_dataset("raw", (4,), "f8", external=[(tmp_path / "raw.bin", 0, 32)])
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource("else.h5", "secret", (3,))
        file.create_virtual_dataset("virtual", layout)
        names = set(file)
    before = path.read_bytes()
    with eg.open_checkpoint(path) as ck:
        assert set(ck.tensors) == {"w"}
        assert set(ck.others) == names - {"w", "g"} | {"g/up"}
        assert "left alone" in ck.others["outside"]
        assert "left alone" in ck.others["raw"]
        assert ck.read("w").tolist() == [0, 1, 2, 3]
        with pytest.raises(UnsupportedContent):
            ck.state()
    assert path.read_bytes() == before


def test_a_broken_checksum_is_told_and_a_good_one_too(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        for name, options in LAYOUTS.items():
            file.create_dataset(name, data=np.arange(100.0), **options)
    with eg.open_checkpoint(path) as ck:
        ck.xor("fletcher", [5], [1])
        found = {name: ck.checksum(name) for name in ck.tensors}
        for name in ("fletcher", "gzip", "gzip-shuffle-fletcher"):
            assert found.pop(name) is Check.OK, name
        assert set(found.values()) == {Check.UNKNOWN}
    with h5py.File(path) as file:
        places = {n: file[n].id.get_chunk_info(0).byte_offset for n in ("fletcher", "gzip", "gzip-shuffle-fletcher")}
    data = bytearray(path.read_bytes())
    for place in places.values():
        data[place + 8] ^= 0x10
    path.write_bytes(data)
    with eg.open_checkpoint(path) as ck:
        for name in places:
            assert ck.checksum(name) is Check.FAILED, name
            with pytest.raises(DamagedFile, match=name):
                ck.read(name)
        assert ck.checksum("contiguous") is Check.UNKNOWN


def chunked(path: Path, **more: Any) -> Path:
    """A file with one compressed, checksummed data set of ten chunks, whose index has no checksum."""
    options: dict[str, Any] = {"chunks": (100,), "compression": "gzip", "fletcher32": True, **more}
    with h5py.File(path, "w") as file:
        file.create_dataset("g", data=np.arange(1.0, 1001.0), **options)
    return path


NODE, ENTRY = 24, 8 + 2 * 8 + 8  # bytes of a node before its entries; size, mask, coordinates and place of a chunk


def with_bytes(path: Path, *changes: tuple[int, bytes]) -> Path:
    """The same file with other bytes in the only node of its chunk index."""
    data = bytearray(path.read_bytes())
    start = data.find(b"TREE\x01")
    for at, new in changes:
        data[start + at : start + at + len(new)] = new
    path.write_bytes(data)
    return path


def entry(number: int, field: int) -> int:
    """Where a field of a chunk's entry lies in the node: size at 0, mask at 4, corner at 8, place at 24."""
    return NODE + ENTRY * number + field


DAMAGE: dict[str, tuple[tuple[int, bytes], ...]] = {
    # These nine bytes end the process in the library.
    "crash": ((80, bytes(2)), (88, b"\0"), (96, b"\0"), (112, bytes(2)), (120, b"\0"), (128, bytes(2))),
    "no-bytes": ((entry(3, 0), bytes(4)),),
    "beyond-the-end": ((entry(9, 0), b"\xff\xff"),),
    "off-the-grid": ((entry(4, 8), b"\x91"),),
    "within-the-element": ((entry(4, 16), b"\1"),),
    "outside": ((entry(9, 8), b"\xe8\x03"),),
    "twice": ((entry(4, 8), (300).to_bytes(8, "little")),),
    "out-of-order": ((entry(4, 8), (600).to_bytes(8, "little")),),
    "last-bound": ((entry(10, 8), bytes(8)),),
    "unfiltered-size": ((entry(2, 4), b"\1"), (entry(2, 0), b"\2")),
    "level": ((5, b"\3"),),
    "too-many": ((6, b"\xff\xff"),),
    "signature": ((0, b"XREE"),),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_chunk_index_that_cannot_be_is_refused_and_never_followed(damage: str, tmp_path: Path) -> None:
    path = with_bytes(chunked(tmp_path / "a.h5"), *DAMAGE[damage])
    run = [sys.executable, "-m", "evergrad", "verify", str(path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    assert "cannot be read: " in done.stdout
    assert done.stdout.rstrip().endswith("failed: hdf5, 1 of 1 tensors wrong")
    with eg.open_checkpoint(path) as ck:
        with pytest.raises(DamagedFile, match=r"g: .* is damaged .expected .*, found ") as told:
            ck.read_bits("g")
        with pytest.raises(DamagedFile):
            ck.xor("g", [5], [1])
    assert "\n" not in str(told.value)


def test_two_chunks_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    path = chunked(tmp_path / "a.h5")
    with h5py.File(path) as file:
        place = file["g"].id.get_chunk_info(3).byte_offset
    with_bytes(path, (entry(4, 24), place.to_bytes(8, "little")))
    (row,) = eg.verify(path).tensors
    assert row.verdict is Check.FAILED
    assert "expected bytes of its own" in row.reason


def test_two_data_sets_with_the_same_chunk_are_not_both_sound(tmp_path: Path) -> None:
    path = chunked(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file.create_dataset("h", data=np.arange(100.0), chunks=(100,), compression="gzip", fletcher32=True)
        place = file["h"].id.get_chunk_info(0)
    changes = (entry(4, 24), place.byte_offset.to_bytes(8, "little")), (entry(4, 0), place.size.to_bytes(4, "little"))
    assert eg.verify(with_bytes(path, *changes)).verdict is Check.FAILED


def test_no_flipped_bit_of_a_chunk_index_is_called_ok_where_the_data_differ(tmp_path: Path) -> None:
    intact = chunked(tmp_path / "a.h5", chunks=(400,)).read_bytes()
    with eg.open_checkpoint(tmp_path / "a.h5") as ck:
        expected = ck.read_bits("g").tobytes()
        assert ck.checksum("g") is Check.OK
    start = intact.find(b"TREE\x01")
    (tmp_path / "intact").write_bytes(intact)
    (tmp_path / "expected").write_bytes(expected)
    done = subprocess.run(
        [sys.executable, "-c", FLIP, str(tmp_path), str(start), str(start + NODE + 3 * ENTRY + 24)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert int(done.stdout) > 400  # flips that were refused


FLIP = """
import sys
from pathlib import Path

import evergrad as eg

folder, start, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
intact, expected = (folder / "intact").read_bytes(), (folder / "expected").read_bytes()
path, refused = folder / "flipped.h5", 0
for bit in range(8 * start, 8 * stop):
    data = bytearray(intact)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with eg.open_checkpoint(path) as ck:
        check = ck.checksum("g")
        refused += check == "failed"
        if check == "ok":
            assert ck.read_bits("g").tobytes() == expected, (bit // 8 - start, bit % 8)
print(refused)
"""


def test_chunks_that_no_checksum_vouches_for_are_unknown_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.h5"
    options: dict[str, Any] = {"dtype": "f8", "chunks": (100,), "shuffle": True, "fletcher32": True}
    with h5py.File(path, "w") as file:
        file.create_dataset("none", (1000,), **options)
        file.create_dataset("partly", (1000,), compression="gzip", **options)[:250] = 0.5
        whole_numbers = {**options, "dtype": "i8"}
        _, raw = file.create_dataset("sound", data=np.arange(100), **whole_numbers).id.read_direct_chunk((0,))
        skips = file.create_dataset("skips", (1000,), **whole_numbers)
        for number in range(10):
            skips.id.write_direct_chunk((100 * number,), raw, int(number == 3))
        noise = np.random.default_rng(0).integers(0, 1 << 63, 1000)
        whole = file.create_dataset("incompressible", data=noise, chunks=(100,), compression="lzf", fletcher32=True)
        assert whole.id.get_chunk_info(0).filter_mask
    rows = {row.name: row for row in eg.verify(path).tensors}
    assert rows["incompressible"].verdict is Check.OK
    expected = {
        "none": "10 of 10 chunks are not in the file",
        "partly": "7 of 10 chunks are not in the file",
        "skips": "1 of 10 chunks skip a filter",
    }
    for name, words in expected.items():
        assert rows[name].verdict is Check.UNKNOWN, name
        assert words in rows[name].doubt
    assert main(["verify", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "unknown: partly (7 of 10 chunks are not in the file; the checksums cannot tell" in shown
    assert "3 with checksums for a part only" in shown
    with eg.open_checkpoint(path) as ck:
        ck.xor("partly", range(0, 1000, 100), [1] * 10)
        assert ck.checksum("partly") is Check.OK  # all chunks are there now


@pytest.mark.parametrize(
    "kind",
    [{}, {"libver": "latest"}, {"libver": ("earliest", "v108")}, {"libver": "v110"}, {"userblock_size": 1024}],
    ids=["old", "latest", "v108", "v110", "user-block"],
)
def test_sound_indexes_of_every_kind_pass(kind: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w", **kind) as file:
        deep = file.create_dataset("deep", data=random.standard_normal((300, 41)), chunks=(7, 5), **options)
        for number in range(9):
            deep.attrs[f"note{number}"] = "x" * 200
        file.create_dataset(
            "grows", data=random.standard_normal((9, 9)), chunks=(4, 4), maxshape=(None, None), **options
        )
        file.create_dataset("rows", data=random.standard_normal((9, 9)), chunks=(4, 4), maxshape=(None, 9), **options)
        file.create_dataset("one", data=random.standard_normal(100), chunks=(100,), **options)
        mixed = file.create_dataset("mixed", (900, 3), "f8", chunks=(7, 2), maxshape=(None, 3), **options)
        for row in random.permutation(900).tolist():
            mixed[row] = row / 900
        mixed.resize(600, 0)
    verification = eg.verify(tmp_path / "a.h5")
    assert verification.verdict is Check.OK, [row for row in verification.tensors if row.verdict is not Check.OK]


def test_a_tiny_file_cannot_claim_a_petabyte(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file.create_dataset("never", (1 << 47,), "f8", chunks=(1 << 10,))
        file.create_dataset("chunk", (8,), "f8", chunks=(1 << 28,), maxshape=(None,))
        file.create_dataset("contiguous", (1 << 40,), "f8")
        file["fine"] = np.arange(3.0)
    with eg.open_checkpoint(path) as ck:
        assert ck.tensors["never"].nbytes == 1 << 50
        for name in ("never", "chunk", "contiguous"):
            with pytest.raises(LimitExceeded, match="absurd"):
                ck.read_bits(name, 0, 4)
            with pytest.raises(LimitExceeded, match="absurd"):
                ck.xor(name, [0], [1])
        assert ck.read("fine").tolist() == [0, 1, 2]


def test_a_chunk_cannot_inflate_beyond_its_size(tmp_path: Path) -> None:
    stream, block = zlib.compressobj(1), bytes(1 << 24)
    bomb = b"".join([*(stream.compress(block) for _ in range(20)), stream.flush()])
    assert len(bomb) > 1 << 20
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("bomb", (1 << 18,), "f8", chunks=(1 << 18,), compression="gzip")
        data.id.write_direct_chunk((0,), bomb)
        noise = np.random.default_rng(0).random(1 << 18)
        file.create_dataset("fine", data=noise, chunks=(1 << 18,), compression="gzip", fletcher32=True)
        twice = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        twice.set_chunk((4,))
        twice.set_deflate(1)
        twice.set_deflate(1)
        h5py.h5d.create(file.id, b"twice", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((4,)), twice)
    with eg.open_checkpoint(path) as ck:
        for name in ("bomb", "twice"):
            with pytest.raises(LimitExceeded):
                ck.read_bits(name, 0, 1)
            with pytest.raises(LimitExceeded):
                ck.xor(name, [0], [1])
        assert ck.read("fine").numpy().tobytes() == noise.tobytes()


def test_groups_that_link_to_each_other_end(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        group = file
        for _ in range(18):
            below = group.create_group("a")
            group["b"] = below
            group = below
        group["w"] = np.zeros(1)
        file["a/a/up"] = file["a"]
    with pytest.raises(EvergradError, match=r"overlap|at most"), eg.open_checkpoint(path) as ck:
        ck.tensors.keys()
    with h5py.File(path := tmp_path / "deep.h5", "w") as file:
        file["/".join("a" * 130)] = np.zeros(1)
    with pytest.raises(LimitExceeded, match="128 deep"):
        eg.open_checkpoint(path)


@pytest.mark.parametrize("cut", [9, 100, 500, 1000, 2000, -1])
def test_a_truncated_file_is_one_line(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes((DATA / "tf_keras_full.h5").read_bytes()[:cut])
    with pytest.raises(DamagedFile) as caught:
        eg.open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["contiguous", "gzip"])
def test_a_read_only_file_is_read_and_not_altered(layout: str, unprivileged: Unprivileged) -> None:
    with h5py.File(path := unprivileged.folder / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(10.0), **LAYOUTS[layout])
    path.chmod(0o444)
    with unprivileged, eg.open_checkpoint(path) as ck:
        with pytest.raises(FileAccessError, match="cannot be altered"):
            ck.xor("x", [0], [1])
        assert ck.read("x")[3] == 3


def test_without_h5py_the_way_to_get_it_is_told(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['h5py'] = None\n"
        "import evergrad as eg\n"
        "for act in (lambda: eg.open_checkpoint(sys.argv[1]), lambda: eg.save_hdf5({}, 'x.h5')):\n"
        "    try: act()\n"
        "    except eg.EvergradError as error: assert 'pip install' in str(error) and '[hdf5]' in str(error), error\n"
        "    else: raise SystemExit('no error')\n"
    )
    path = str(DATA / "tf_keras_full.h5")
    subprocess.run([sys.executable, "-c", code, path], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_opening_another_format_does_not_import_h5py() -> None:
    code = "import sys, evergrad as eg; eg.open_checkpoint(sys.argv[1]).close(); assert 'h5py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(DATA / "lightning.ckpt")], check=True)


@pytest.mark.parametrize("count", [3_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_state_of_many_tensors_is_saved_and_served(count: int, tmp_path: Path) -> None:
    state = {f"layer{i // 50}.w{i % 50}": torch.tensor([float(i)]) for i in range(count)}
    with eg.open_checkpoint(eg.save_hdf5(state, tmp_path / "many.h5")) as ck:
        assert list(ck.tensors) == list(state)
        assert not ck.unkept
        for i in range(0, count, 997):
            assert ck.read(f"layer{i // 50}.w{i % 50}").item() == i
        ck.xor(f"layer{count // 50 - 1}.w49", [0], [1 << 31])
    with h5py.File(tmp_path / "many.h5") as file:
        assert file[f"layer{count // 50 - 1}/w49"][0] == 1 - count


def test_a_state_without_tensors_is_a_file_all_the_same(tmp_path: Path) -> None:
    state: dict[str, object] = {"layer0": {}}
    assert same(eg.load_hdf5(eg.save_hdf5(state, tmp_path / "none.h5")), state)


# States ------------------------------------------------------------------------------------------------------------


def test_a_model_and_its_optimizer_come_back_exactly(tmp_path: Path) -> None:
    state = training_state()
    path = eg.save_hdf5(state, tmp_path / "state.h5")
    loaded = eg.load_hdf5(path)
    assert same(loaded, state)
    assert loaded["model"]["0.weight"].data_ptr() == loaded["model"]["2.weight"].data_ptr()
    assert loaded["row"].data_ptr() == loaded["base"][2].data_ptr()
    assert loaded["transposed"].stride() == (1, 6)
    with eg.open_checkpoint(path) as ck:
        assert ck.format == "pytorch-h5"
        assert set(ck.tensors["model/0.weight"].shares) == {"model/2.weight"}
        assert ck.tensors["optimizer/state/0/exp_avg"].role is Role.OPTIMIZER


def test_a_viewer_sees_modules_as_groups_and_floats_as_floats(tmp_path: Path) -> None:
    state = {"model": OrderedDict({"layer1.0.conv1.weight": torch.randn(2, 3), "half": torch.ones(2).bfloat16()})}
    eg.save_hdf5(state, path := tmp_path / "state.h5")
    with h5py.File(path) as file:
        weight = file["model/layer1/0/conv1/weight"]
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight[()], state["model"]["layer1.0.conv1.weight"].numpy())
        assert file["model/half"].dtype == np.uint16
        assert file["model/half"].attrs["dtype"] == "bfloat16"


def test_every_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    state = every_dtype()
    assert same(eg.load_hdf5(eg.save_hdf5(state, tmp_path / "state.h5")), state)


@pytest.mark.parametrize(
    "state",
    [
        {},
        torch.arange(3.0),
        {"a": torch.ones(2), "a.b": torch.zeros(3), "a.b.c": torch.zeros(1)},
        {"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}},
        {"__evergrad__": {"index": torch.ones(1)}, "__evergrad__.skeleton": torch.ones(2)},
        {"": torch.ones(1), ".": torch.ones(2), "..": torch.ones(3), "a..b": torch.ones(4), "/": torch.ones(5)},
        {"_": torch.ones(1), "": {"": torch.ones(2)}},
        {"nul\0": torch.ones(1), "100%": torch.ones(2), "é∂": torch.ones(3), "\ud800": torch.ones(4)},
        {1: torch.ones(1), "1": torch.ones(2), None: 3, b"k": [torch.ones(1), (torch.ones(2),)]},
        {"long": "x" * 200_000, "n": 2**100, "nan": float("nan"), "array": np.arange(6).reshape(2, 3)},
    ],
    ids=str,
)
def test_awkward_names_and_values_come_back(state: object, tmp_path: Path) -> None:
    path = eg.save_hdf5(state, tmp_path / "state.h5")
    assert same(eg.load_hdf5(path), state)
    with eg.open_checkpoint(path) as ck:
        assert list(ck.tensors) == list(flatten(state).tensors)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states)
def test_any_state_comes_back(tmp_path: Path, state: object) -> None:
    assert same(eg.load_hdf5(eg.save_hdf5(state, tmp_path / "state.h5")), state)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = eg.save_hdf5({"a": torch.ones(3)}, tmp_path / "state.h5")
    with pytest.raises(EvergradError):
        eg.save_hdf5({"a": torch.ones(3), "b": object()}, path)
    assert same(eg.load_hdf5(path), {"a": torch.ones(3)})
    assert [child.name for child in tmp_path.iterdir()] == ["state.h5"]


def test_the_same_state_gives_the_same_file(tmp_path: Path) -> None:
    first, second = (eg.save_hdf5(training_state(), tmp_path / f"{name}.h5").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize("ending", ["h5", "hdf5"])
def test_converting_there_and_back_keeps_everything(ending: str, tmp_path: Path) -> None:
    torch.save(state := training_state(), tmp_path / "a.pt")
    eg.convert(tmp_path / "a.pt", tmp_path / f"b.{ending}")
    eg.convert(tmp_path / f"b.{ending}", tmp_path / "c.safetensors")
    eg.convert(tmp_path / "c.safetensors", tmp_path / "d.h5")
    eg.convert(tmp_path / "d.h5", tmp_path / "e.pt")
    assert same(torch.load(tmp_path / "e.pt", weights_only=True), state)
    assert eg.compare(tmp_path / "a.pt", tmp_path / "d.h5").equal


def with_attributes(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["a/w"] = np.arange(3.0)
        file["tied"] = file["a/w"]
        file["text"] = "left alone"
        file.attrs["fixed"] = np.bytes_("kept as metadata")
        file.attrs["text"] = "of varying length"
        file["a"].attrs["names"] = ["w"]
        file["a/w"].attrs["unit"] = 3
        file["text"].attrs["of"] = "what is lost anyway"
    return path


@pytest.mark.parametrize("ending", ["h5", "pt", "safetensors", "npz"])
def test_attributes_that_are_not_kept_are_named_as_losses(ending: str, tmp_path: Path) -> None:
    path, target = with_attributes(tmp_path / "a.h5"), tmp_path / f"b.{ending}"
    with eg.open_checkpoint(path) as ck:
        assert ck.unkept == dict.fromkeys(["/@text", "a@names", "a/w@unit"], "an HDF5 attribute")
        assert ck.metadata == {"fixed": "kept as metadata"}
        assert set(ck.others) == {"text"}
        told = losses(ck, target)
    for name in ck.unkept:
        assert any(name in loss for loss in told), (name, told)
    with pytest.raises(ConversionLoss, match="would lose"):
        eg.convert(path, target)
    assert not target.exists()
    eg.convert(path, target, tensors_only=True)
    with eg.open_checkpoint(target) as ck:  # torch gets one flat dict, in whose keys "/" is escaped
        assert {name.replace("%2F", "/") for name in ck.tensors} == {"a/w", "tied"}
        assert not ck.unkept


def test_attributes_stand_in_the_way_of_nothing_else(tmp_path: Path) -> None:
    path = with_attributes(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["text"]
    state = eg.load_hdf5(path)
    assert state["a"]["w"].tolist() == [0, 1, 2]
    assert eg.compare(path, path).equal


def test_a_thousand_attributes_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        for number in range(700):
            file.create_group(f"g{number}").attrs["x"] = number
            file[f"g{number}"].attrs["y"] = number
            file[f"g{number}/w"] = number
    with eg.open_checkpoint(path) as ck:
        assert len(ck.unkept) == 1001
        assert ck.unkept["…"] == "400 further HDF5 attributes"


def test_what_we_save_as_hdf5_has_nothing_that_is_not_kept(tmp_path: Path) -> None:
    path = eg.save_hdf5({"tied": (half := torch.ones(2).bfloat16()), "again": half}, tmp_path / "a.h5")
    with eg.open_checkpoint(path) as ck:
        assert not ck.unkept
    with h5py.File(path, "r+") as file:
        file["tied"].attrs["mine"] = 3
        file.attrs["note"] = np.bytes_("added by hand")
    with eg.open_checkpoint(path) as ck:
        assert set(ck.unkept) == {"/@note", "tied@mine"}


def test_notes_that_lie_are_refused(tmp_path: Path) -> None:
    path = eg.save_hdf5({"a": torch.ones(8)}, tmp_path / "state.h5")
    whole = path.read_bytes()
    for old, new in (
        (b'["a","float32"]', b'["b","float32"]'),
        (b'"float32"]', b'"float64"]'),
        (b'{"schema', b'["schema'),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(DamagedFile):
            eg.open_checkpoint(path)


def test_without_h5py_the_file_that_was_to_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    monkeypatch.setitem(sys.modules, "h5py", None)
    for write in (
        lambda: eg.convert(tmp_path / "a.pt", tmp_path / "b.h5"),
        lambda: eg.save_hdf5({"x": torch.ones(2)}, tmp_path / "b.h5"),
    ):
        with pytest.raises(
            UnsupportedContent, match=r"/b\.h5: cannot be written as HDF5: h5py is not installed\. pip "
        ):
            write()
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_an_empty_group_of_another_library_is_refused_by_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["w"] = np.zeros(3)
        file["full/w"] = np.zeros(3)
        file.create_group("empty")
        file.create_group("outer/inner")
    with eg.open_checkpoint(tmp_path / "a.h5") as ck:
        assert ck.unkept == dict.fromkeys(("empty", "outer/inner"), "an empty HDF5 group")
    with pytest.raises(ConversionLoss, match=r"empty \(an empty HDF5 group\); outer/inner"):
        eg.convert(tmp_path / "a.h5", tmp_path / "a.pt")
    eg.convert(tmp_path / "a.h5", tmp_path / "a.pt", tensors_only=True)
    eg.save_hdf5({"w": torch.ones(2), "empty": {}}, tmp_path / "own.h5")
    assert eg.compare(tmp_path / "own.h5", eg.convert(tmp_path / "own.h5", tmp_path / "own.pt")).equal
