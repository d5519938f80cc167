"""A shard is an ordinary safetensors file, and its header is rendered once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

import evergrad as eg
from evergrad.checkpoint.shard_layout import ALIGNMENT, SHARD_KEY, HeaderRenderer, TensorSpec, escaped, parse_header
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, StateError
from evergrad.formats.safetensors import MAX_HEADER_BYTES, SKELETON_KEY
from evergrad.state import Skeleton

RECORD: dict[str, Any] = {
    "step": 120,
    "attempt": 2,
    "rank": 3,
    "world_size": 8,
    "meta": {"note": 'a "quoted" — note\n'},
}


def spec(path: str, dtype: DType, *shape: int) -> TensorSpec:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return TensorSpec(path, dtype, shape, nbytes)


SPECS = [
    spec("bytes", DType.UINT8, 3),
    spec("w", DType.FLOAT32, 2, 2),
    spec("empty", DType.FLOAT64, 0, 5),
    spec("wide", DType.COMPLEX128, 2),
    spec('odd "name" é', DType.BFLOAT16),
    spec("scale", DType.FLOAT8_E8M0FNU, 2, 2),
    spec("half", DType.COMPLEX32, 2),
]


def skeleton_of(specs: list[TensorSpec], *more: str) -> Skeleton:
    names = [*(spec.path for spec in specs), *more]
    return Skeleton({"dict": [[name, {"tensor": name}] for name in names]})


def shard(specs: list[TensorSpec] = SPECS, aliases: dict[str, str] | None = None) -> tuple[bytes, HeaderRenderer]:
    """A shard whose tensors are zeros."""
    text = skeleton_of(specs, *(aliases or {})).dumps()
    header = HeaderRenderer(specs, aliases or {}, [text], [], RECORD)
    head = header.render([], RECORD)
    assert head is not None
    return head + bytes(header.layout.size - header.layout.data_start), header


def altered(change: Any) -> bytes:
    """A shard with one thing in its header changed."""
    data, header = shard(aliases={"tied": "w"})
    start = header.layout.data_start
    table = json.loads(data[8:start])
    change(table)
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data[start:]


def test_what_is_rendered_is_parsed_back() -> None:
    data, header = shard(aliases={"tied": "w"})
    parsed = parse_header(data)
    assert parsed.layout == header.layout
    assert parsed.shard == RECORD
    assert parsed.skeleton == skeleton_of(SPECS, "tied")
    assert parsed.layout.size == len(data)


def test_tensors_follow_each_other_aligned_and_without_gaps() -> None:
    layout = shard()[1].layout
    end = layout.data_start
    for entry in layout.entries:
        assert entry.offset == end
        assert entry.offset % entry.dtype.itemsize == 0
        end += entry.nbytes
    assert (layout.data_start % ALIGNMENT, layout.size) == (0, end)
    sizes = [entry.dtype.itemsize for entry in layout.entries]
    assert sizes == sorted(sizes, reverse=True)


def test_alike_tensors_lie_side_by_side() -> None:
    specs = [spec(f"{n}", DType.FLOAT32, 4 if n % 2 else 2) for n in range(10)]
    shapes = [entry.shape for entry in shard(specs)[1].layout.entries]
    assert shapes == sorted(shapes)


def test_our_own_reader_and_the_formats_library_open_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(shard(aliases={"tied": "w"})[0])
    with eg.open_checkpoint(path) as ck:
        assert set(ck.tensors) == {*(spec.path for spec in SPECS), "tied"}
        assert {s.path: (s.dtype, s.shape) for s in SPECS}.items() <= {
            name: (info.dtype, info.shape) for name, info in ck.tensors.items()
        }.items()
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {spec.path for spec in SPECS}
        assert json.loads(file.metadata()[SHARD_KEY]) == RECORD


def test_a_text_may_be_escaped_piece_by_piece() -> None:
    text = json.dumps({"a": 'q"\\/é\n\u2028', "😀": [1, None]})
    for cut in range(len(text)):
        assert escaped(text[:cut]) + escaped(text[cut:]) == escaped(text)


def test_values_may_grow_a_little_and_the_tensors_stay_where_they_are() -> None:
    header = HeaderRenderer([], {}, ['{"schema_version":1,"root":', "}"], [b"1"], RECORD)
    assert len(header.render([b"1" * 256], RECORD) or b"") == header.layout.data_start
    assert header.render([b"1" * header.layout.data_start], RECORD) is None


def test_a_long_record_is_given_room(tmp_path: Path) -> None:
    long = {"meta": "x" * 100_000}
    assert HeaderRenderer([], {}, ['{"schema_version":1,"root":null}'], [], long).render([], long) is not None


def test_a_header_that_no_reader_would_take_is_refused() -> None:
    with pytest.raises(StateError, match="long lists of numbers"):
        HeaderRenderer([], {}, ["x" * MAX_HEADER_BYTES], [], {})


def test_the_name_that_the_format_keeps_for_itself_is_refused() -> None:
    with pytest.raises(StateError, match="__metadata__"):
        shard([spec("__metadata__", DType.UINT8, 1)])


def test_a_longer_buffer_is_a_shard_and_something_behind_it() -> None:
    data, header = shard()
    assert parse_header(data + bytes(100)).layout == header.layout


def test_every_cut_is_noticed() -> None:
    data, header = shard()
    for length in [*range(16), header.layout.data_start - 1, header.layout.data_start, len(data) - 1]:
        with pytest.raises(DamagedFile, match=r"here\.safetensors"):
            parse_header(data[:length], "here.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("__metadata__"),
        lambda table: table.pop("w"),
        lambda table: table["__metadata__"].pop(SHARD_KEY),
        lambda table: table["__metadata__"].pop(SKELETON_KEY),
        lambda table: table["__metadata__"].update({SHARD_KEY: "3"}),
        lambda table: table["__metadata__"].update({SKELETON_KEY: "{}"}),
        lambda table: table["__metadata__"].update({"evergrad.dtypes": "[]"}),
        lambda table: table["__metadata__"].update({"evergrad.dtypes": '{"half":["nonsense",[2]]}'}),
        lambda table: table["__metadata__"].update({"evergrad.aliases": "[]"}),
        lambda table: table["__metadata__"].update({"evergrad.aliases": '{"tied":"nobody"}'}),
        lambda table: table["__metadata__"].update({"evergrad.aliases": '{"w":"bytes"}'}),
        lambda table: table["w"].update(dtype="F33"),
        lambda table: table["w"].update(dtype=[]),
        lambda table: table["w"].update(shape=[2, 3]),
        lambda table: table["w"].update(shape=[-2, -2]),
        lambda table: table["w"].update(shape=[2.0, 2]),
        lambda table: table["w"].update(shape=None),
        lambda table: table["w"].update(data_offsets=[0, 16]),
        lambda table: table["w"].update(data_offsets=[32.0, 48.0]),
        lambda table: table["w"].update(data_offsets=["a", "b"]),
        lambda table: table.update(w=3),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_in_one_line(change: Any) -> None:
    with pytest.raises(DamagedFile) as caught:
        parse_header(altered(change))
    assert "\n" not in str(caught.value)


def test_reading_a_header_needs_no_torch() -> None:
    check = "import sys, evergrad.checkpoint.shard_layout\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
