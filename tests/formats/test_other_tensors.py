"""Tensors that are not dense ones of a known type, NumPy arrays and objects: named, compared, or said not to be."""

from __future__ import annotations

import json
import struct
import subprocess
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import ConversionLoss, FileAccessError, UnknownTensor, UnsupportedContent, UsageError
from evergrad.formats import unread_tensors
from evergrad.records import Check
from programs import run_python

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def evergrad(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line as a user meets it."""
    return run_python("-m", "evergrad", *arguments)


def quantised(value: float, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor([[1.0, value], [0.0, 0.5]]), 0.1, 1, dtype)


def per_channel(value: float) -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.tensor([[1.0, value], [0.0, 0.5]]), scales, zeros, 0, torch.qint8)


def dense(value: float) -> torch.Tensor:
    return torch.tensor([[value, 0.0], [0.0, 3.0]])


OTHERS: dict[str, Callable[[float], Any]] = {
    "a quantised tensor (qint8)": quantised,
    "a quantised tensor (quint8)": lambda value: quantised(value, torch.quint8),
    "a quantised tensor (qint32)": lambda value: quantised(value, torch.qint32),
    "a quantised tensor (quint4x2)": lambda value: quantised(value / 2, torch.quint4x2),
    "a sparse tensor (COO)": lambda value: dense(value).to_sparse_coo(),
    "a sparse tensor (CSR)": lambda value: dense(value).to_sparse_csr(),
    "a sparse tensor (CSC)": lambda value: dense(value).to_sparse_csc(),
    "a sparse tensor (BSR)": lambda value: dense(value).to_sparse_bsr((1, 1)),
    "a nested tensor": lambda value: torch.nested.nested_tensor([torch.ones(2), torch.tensor([value])]),
    "a torch tensor of another kind (njt)": lambda value: torch.nested.nested_tensor(
        [torch.ones(2), torch.tensor([value])], layout=torch.jagged
    ),
    "a torch tensor with a lazy conjugate or negative bit": lambda value: torch.tensor([complex(value, 1)]).conj(),
    "a tensor of torch.float4_e2m1fn_x2": lambda value: torch.tensor([int(value)], dtype=torch.uint8).view(
        torch.float4_e2m1fn_x2
    ),
    "a storage (torch.storage.UntypedStorage)": lambda value: torch.tensor([value]).untyped_storage(),
}


def saved(path: Path, value: object, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": torch.ones(2), "odd": value}, path, **options)
    return path


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("what", OTHERS)
def test_tensors_of_other_kinds_are_compared_named_and_never_dropped_unasked(
    what: str, legacy: bool, tmp_path: Path
) -> None:
    options = {"_use_new_zipfile_serialization": not legacy}
    a, again, b = (
        saved(tmp_path / name, OTHERS[what](value), **options)
        for name, value in (("a.pt", 2.0), ("again.pt", 2.0), ("b.pt", 1.0))
    )
    assert eg.compare(a, again).verdict == "equal"
    assert eg.compare(a, b).verdict == "different"
    with eg.open_checkpoint(a) as ck:
        assert ck.others["odd"] == what
        assert not ck.unread
        assert any(name.startswith("odd/") for name in ck.tensors), "its bytes can be read and altered"
        assert "odd" in unread_tensors(ck)
    with pytest.raises(ConversionLoss, match="odd"):
        eg.convert(a, tmp_path / "x.safetensors")
    with pytest.raises(ConversionLoss, match=r"odd.*--skip-unread"):
        eg.convert(a, tmp_path / "x.safetensors", tensors_only=True)
    assert not (tmp_path / "x.safetensors").exists()
    eg.convert(a, tmp_path / "x.safetensors", tensors_only=True, skip_unread=True)
    assert eg.compare(a, tmp_path / "x.safetensors").verdict == "unknown"
    assert eg.verify(a).verdict is (Check.UNKNOWN if legacy else Check.OK)


def test_the_integers_of_a_quantised_tensor_are_those_of_torch_and_can_be_altered(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", quantised(2.0))
    with eg.open_checkpoint(path) as ck:
        assert torch.equal(ck.read("odd/int_repr"), quantised(2.0).int_repr())
    eg.inject(path, eg.BitFlip(bits="6"), where="odd/int_repr", count=1, seed=1, out=tmp_path / "bad.pt")
    comparison = eg.compare(path, tmp_path / "bad.pt")
    assert [tensor.name for tensor in comparison.different] == ["odd/int_repr"]
    loaded = torch.load(tmp_path / "bad.pt", weights_only=False)["odd"].int_repr()
    assert (loaded != quantised(2.0).int_repr()).sum() == 1


def test_a_quantised_model_that_differs_in_its_scale_alone_is_different(tmp_path: Path) -> None:
    one = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    two = torch._make_per_tensor_quantized_tensor(one.int_repr(), 0.2, 0)
    comparison = eg.compare(saved(tmp_path / "a.pt", one), saved(tmp_path / "b.pt", two))
    assert not comparison.different
    assert comparison.verdict == "different"
    assert comparison.values == ("odd/quantizer/0: 0.1 / 0.2",)


def test_the_verbs_tell_of_a_quantised_weight(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.pt", per_channel(2.0)), saved(tmp_path / "b.pt", per_channel(1.0))
    done = evergrad("diff", a, b)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "different: 1 of 4 tensors")
    assert json.loads(evergrad("diff", a, b, "--json").stdout)["verdict"] == "different"
    done = evergrad("convert", a, tmp_path / "c.safetensors", "--tensors-only")
    assert done.returncode == 2
    assert "odd (a quantised tensor (qint8)). Leave them out: skip_unread=True, or --skip-unread." in done.stderr
    done = evergrad("convert", a, tmp_path / "c.safetensors", "--tensors-only", "--skip-unread")
    assert done.returncode == 1
    assert "left out: odd (a quantised tensor (qint8))" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{tmp_path / 'c.safetensors'}: 1 tensor, 8 B; 3 parts of tensors")
    done = evergrad("convert", a, tmp_path / "d.safetensors", "--tensors-only", "--skip-unread", "--json")
    assert json.loads(done.stdout)["left_out"] == {"odd": "a quantised tensor (qint8)"}
    done = evergrad("diff", a, tmp_path / "c.safetensors")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "not compared: odd (a quantised tensor (qint8))",
        "unknown: 4 tensors are equal, 1 more could not be compared",
    ]
    assert "left alone: odd (a quantised tensor (qint8))" in evergrad("inspect", a).stdout


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_numpy_arrays_in_a_pickle_are_tensors_that_stay_as_they_are(
    protocol: int, legacy: bool, tmp_path: Path
) -> None:
    arrays = {
        "count": np.arange(10),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "scalar": np.array(0.5),
        "empty": np.zeros((0, 3)),
        "complex": np.array([1 + 2j]),
    }
    options = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": not legacy}
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(4), "best": np.float64(0.5), "arrays": arrays}, path, **options)
    with eg.open_checkpoint(path) as ck:
        assert not ck.others
        for name, array in arrays.items():
            info = ck.tensors[f"arrays/{name}"]
            assert (info.shape, info.dtype.value, bool(info.read_only)) == (array.shape, array.dtype.name, True)
            np.testing.assert_array_equal(ck.read(info.name).numpy(), array)
        with pytest.raises(
            UnsupportedContent, match="a NumPy array inside the pickle, which cannot be altered in place"
        ):
            ck.xor("arrays/count", [0], [1])
        state = ck.state()
    with pytest.raises(FileAccessError, match="is closed"):
        ck.read("arrays/count")
    for name, array in arrays.items():
        assert type(state["arrays"][name]) is np.ndarray
        assert state["arrays"][name].dtype == array.dtype
        np.testing.assert_array_equal(state["arrays"][name], array)
    arrays["count"] = np.arange(10) * 2
    torch.save({"w": torch.ones(4), "best": np.float64(0.5), "arrays": arrays}, tmp_path / "b.pt", **options)
    comparison = eg.compare(path, tmp_path / "b.pt")
    assert [(tensor.name, tensor.changed) for tensor in comparison.different] == [("arrays/count", 9)]
    eg.convert(path, tmp_path / "a.safetensors")
    eg.convert(tmp_path / "a.safetensors", tmp_path / "c.pt")
    again = torch.load(tmp_path / "c.pt", weights_only=False)
    assert type(again["arrays"]["count"]) is np.ndarray
    assert eg.compare(path, tmp_path / "c.pt").equal


def test_faults_pass_over_numpy_arrays_and_say_so(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", np.ones(1000))
    eg.inject(path, eg.BitFlip(), count=2, seed=1, out=tmp_path / "bad.pt")
    assert [tensor.name for tensor in eg.compare(path, tmp_path / "bad.pt").different] == ["w"]
    with pytest.raises(UsageError, match="a NumPy array inside the pickle, which cannot be altered in place: 'odd'"):
        eg.inject(path, eg.BitFlip(), where="odd", count=1, seed=1, out=tmp_path / "worse.pt")
    assert not (tmp_path / "worse.pt").exists()
    done = evergrad("inspect", path)
    assert "cannot be altered in place: odd (a NumPy array inside the pickle)" in done.stdout
    rows = json.loads(evergrad("inspect", path, "--json").stdout)["tensors"]
    assert [row.get("read_only") for row in rows] == [None, "a NumPy array inside the pickle"]


def test_an_array_that_the_pickle_names_twice_is_one(tmp_path: Path) -> None:
    array = np.arange(3)
    torch.save({"a": array, "b": array, "c": array.copy()}, tmp_path / "a.pt")
    with eg.open_checkpoint(tmp_path / "a.pt") as ck:
        assert ck.tensors["a"].shares == ("b",)
        assert not ck.tensors["c"].shares


ODD_ARRAYS: dict[str, Callable[[int], Any]] = {
    "dates": lambda n: np.array([f"2020-01-0{n}"], "datetime64[D]"),
    "records": lambda n: np.array([(n, 2.0)], [("a", "i4"), ("b", "f4")]),
    "objects": lambda n: np.array([n, "x", None], object),
    "texts": lambda n: np.array([str(n)]),
    "big-endian": lambda n: np.array([n], ">f4"),
    "masked": lambda n: np.ma.array([n, 2], mask=[False, True]),
    "date": lambda n: np.datetime64(f"2020-01-0{n}"),
    "dtype": lambda n: np.dtype(f"i{n}"),
    "generator": np.random.default_rng,
}


@pytest.mark.parametrize("kind", ODD_ARRAYS)
def test_odd_numpy_values_are_compared_and_do_not_make_the_file_unreadable(kind: str, tmp_path: Path) -> None:
    a, again, b = (
        saved(tmp_path / name, ODD_ARRAYS[kind](number)) for name, number in (("a.pt", 4), ("again.pt", 4), ("b.pt", 8))
    )
    assert eg.compare(a, again).verdict == "equal"
    assert eg.compare(a, b).verdict == "different"


def test_values_under_names_that_look_alike_are_all_compared(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pt", {1: "x", "1": "y", "a/b": 1, "a": {"b": 2}})
    b = saved(tmp_path / "b.pt", {1: "other", "1": "y", "a/b": 3, "a": {"b": 2}})
    assert len(eg.compare(a, b).values) == 2


def test_safetensors_of_a_type_that_is_not_served_are_compared_by_their_bytes(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}).encode()
    for name, fill in (("a", 0), ("again", 0), ("b", 1)):
        data = struct.pack("<Q", len(header)) + header + bytes([fill]) * 8
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    a, again, b = (tmp_path / f"{name}.safetensors" for name in ("a", "again", "b"))
    assert eg.compare(a, again).verdict == "equal"
    assert eg.compare(a, b).verdict == "different"
    done = evergrad("verify", a)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        1,
        "not verified: w (a tensor of F4, which is not served)",
    )
    with pytest.raises(ConversionLoss, match="w "):
        eg.convert(a, tmp_path / "x.pt", tensors_only=True)


def test_object_arrays_of_an_npz_are_compared_by_their_bytes_and_checked_by_their_crc(tmp_path: Path) -> None:
    for name, value in (("a", "x"), ("again", "x"), ("b", "y")):
        np.savez(tmp_path / f"{name}.npz", w=np.ones(20), odd=np.array([value, None], object), text=np.array([value]))
    assert eg.compare(tmp_path / "a.npz", tmp_path / "again.npz").verdict == "equal"
    different = eg.compare(tmp_path / "a.npz", tmp_path / "b.npz")
    assert different.verdict == "different"
    assert len(different.values) == 2
    assert eg.verify(tmp_path / "a.npz").verdict is Check.OK


def test_hdf5_data_sets_that_are_not_read_make_the_verdict_unknown(tmp_path: Path) -> None:
    for name, text in (("a", "x"), ("b", "y")):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["w"] = np.ones(20)
            file["text"] = text
            file["pairs"] = np.array([(1, 2.0)], [("x", "i4"), ("y", "f8")])
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    comparison = eg.compare(a, b)
    assert comparison.verdict == "unknown"
    assert not comparison.equal
    assert comparison.uncompared == {"pairs": "a data set of records", "text": "a data set of strings"}
    assert eg.compare(a, b, where="w").equal
    assert eg.compare(a, b, where="pairs").uncompared == {"pairs": "a data set of records"}
    with pytest.raises(UnknownTensor):
        eg.compare(a, b, where="nothing")
    done = evergrad("diff", a, b)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "unknown: 1 tensors are equal, 2 more could not be compared"
    report = eg.verify(a)
    assert report.verdict is Check.UNKNOWN
    assert set(report.unverified) == {"pairs", "text"}
    assert json.loads(evergrad("verify", a, "--json").stdout)["unverified"]["text"] == "a data set of strings"
    with pytest.raises(ConversionLoss, match="pairs"):
        eg.convert(a, tmp_path / "x.npz", tensors_only=True)
    eg.convert(a, tmp_path / "x.npz", tensors_only=True, skip_unread=True)


def test_nothing_is_called_equal_where_no_array_can_be_read(data: Path) -> None:
    comparison = eg.compare(data / "orbax", data / "orbax")
    assert (comparison.verdict, len(comparison.uncompared)) == ("unknown", 6)
    done = evergrad("diff", data / "orbax", data / "orbax")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "unknown: 6 could not be compared")


def test_strings_of_a_tensorflow_checkpoint_are_compared_and_checked(tmp_path: Path, data: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in (data / "tf_types").iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    assert eg.compare(tmp_path / "a", tmp_path / "b").equal
    (holder,) = (file for file in (tmp_path / "b").iterdir() if b"leftalone" in file.read_bytes())
    holder.write_bytes(holder.read_bytes().replace(b"leftalone", b"leftalonf"))
    comparison = eg.compare(tmp_path / "a", tmp_path / "b")
    assert comparison.verdict == "different"
    assert comparison.values == ("text: a tensor of strings / other bytes",)
    assert eg.verify(tmp_path / "a").others == {"text": Check.OK}
    report = eg.verify(tmp_path / "b")
    assert report.others == {"text": Check.FAILED}
    assert (
        "failed: text, which is listed and not read: its checksum does not hold"
        in evergrad("verify", tmp_path / "b").stdout
    )


def test_objects_of_a_dcp_folder_are_compared_by_their_bytes(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for name, text in (("a", "x"), ("again", "x"), ("b", "y")):
        dcp.save({"w": torch.ones(2), "note": text}, checkpoint_id=tmp_path / name, no_dist=True)
    assert eg.compare(tmp_path / "a", tmp_path / "again").verdict == "equal"
    different = eg.compare(tmp_path / "a", tmp_path / "b")
    assert (different.verdict, different.values) == (
        "different",
        ("note: an object saved by torch.save / other bytes",),
    )


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_attributes_of_a_tensor_are_named_and_compared(legacy: bool, tmp_path: Path) -> None:
    def parameter(name: str, **attributes: object) -> Path:
        tensor = torch.nn.Parameter(torch.ones(2))
        tensor.__dict__.update(attributes)
        return saved(tmp_path / f"{name}.pt", tensor, _use_new_zipfile_serialization=not legacy)

    plain, a, again, b = parameter("plain"), parameter("a", tag=1), parameter("again", tag=1), parameter("b", tag=2)
    assert eg.compare(a, again).verdict == "equal"
    assert eg.compare(a, b).values == ("odd@attributes: tag / other bytes",)
    assert eg.compare(a, plain).verdict == "unknown"
    with eg.open_checkpoint(a) as ck, eg.open_checkpoint(plain) as other:
        assert ck.others == {"odd@attributes": "tag"}
        assert not other.others
        assert torch.equal(ck.state()["odd"], torch.ones(2)), "the tensor is there all the same"
    with pytest.raises(ConversionLoss, match=r"odd@attributes \(tag\)"):
        eg.convert(a, tmp_path / "x.safetensors")
    eg.convert(a, tmp_path / "x.safetensors", tensors_only=True)
    inner = parameter("inner", scale=torch.ones(3))
    assert eg.compare(inner, inner).uncompared == {"odd@attributes": "scale"}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("array", [False, True], ids=["tensor", "array"])
def test_a_tensor_in_an_attribute_is_not_left_out_with_the_values(array: bool, legacy: bool, tmp_path: Path) -> None:
    def parameter(name: str, held: object) -> Path:
        tensor = torch.nn.Parameter(torch.ones(2))
        tensor.__dict__.update(held=held)
        return saved(tmp_path / f"{name}.pt", tensor, _use_new_zipfile_serialization=not legacy)

    def inner(value: float) -> object:
        return {"deep": [np.full(3, value) if array else torch.full((3,), value)]}

    a, b, plain = parameter("a", inner(1)), parameter("b", inner(2)), parameter("plain", {"deep": [1]})
    comparison = eg.compare(a, b, tensors_only=True)
    assert (comparison.verdict, comparison.uncompared) == ("unknown", {"odd@attributes": "held"})
    assert evergrad("diff", a, b, "--tensors-only").returncode == 1
    assert eg.compare(plain, plain, tensors_only=True).equal
    with eg.open_checkpoint(a) as ck:
        assert torch.equal(ck.state()["odd"], torch.ones(2)), "the tensor is there all the same"
    with pytest.raises(ConversionLoss, match=r"odd@attributes \(held\).*--skip-unread"):
        eg.convert(a, tmp_path / "x.safetensors", tensors_only=True)
    eg.convert(plain, tmp_path / "plain.safetensors", tensors_only=True)
    done = evergrad("convert", a, tmp_path / "x.safetensors", "--tensors-only", "--skip-unread")
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "left out: odd@attributes (held)")


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_layout_and_a_matrix_are_named_and_not_turned_into_something_else(legacy: bool, tmp_path: Path) -> None:
    options = {"_use_new_zipfile_serialization": not legacy}
    layout = saved(tmp_path / "layout.pt", torch.sparse_csr, **options)
    matrix, other, array = (
        saved(tmp_path / f"{name}.pt", value, **options)
        for name, value in (
            ("matrix", np.matrix([[1.0, 2.0]])),
            ("other", np.matrix([[1.0, 3.0]])),
            ("array", np.array([[1.0, 2.0]])),
        )
    )
    with eg.open_checkpoint(layout) as ck:
        assert ck.others == {"odd": "torch.layout"}
    with pytest.raises(ConversionLoss, match=r"would lose odd \(torch.layout\)"):
        eg.convert(layout, tmp_path / "x.pt")
    assert eg.compare(layout, saved(tmp_path / "strided.pt", torch.strided, **options)).values == (
        'odd/name: "torch.sparse_csr" / "torch.strided"',
    )
    with eg.open_checkpoint(matrix) as ck:
        assert ck.others == {"odd": "a NumPy matrix"}
        assert ck.read("odd/data").tolist() == [[1.0, 2.0]]
        assert not ck.unread
    for suffix in ("pt", "safetensors", "npz"):
        with pytest.raises(ConversionLoss, match=r"odd \(a NumPy matrix\)"):
            eg.convert(matrix, tmp_path / f"x.{suffix}")
        with pytest.raises(ConversionLoss, match=r"odd \(a NumPy matrix\).*--skip-unread"):
            eg.convert(matrix, tmp_path / f"x.{suffix}", tensors_only=True)
    assert eg.compare(matrix, matrix).verdict == "equal"
    assert eg.compare(matrix, other).verdict == "different"
    assert eg.compare(matrix, array).verdict == "different"


def test_empty_containers_are_named_when_only_tensors_are_kept(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": {}, "y": {"z": []}}, tmp_path / "a.pt")
    done = evergrad("convert", tmp_path / "a.pt", tmp_path / "a.npz", "--tensors-only")
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == ["left out: x (an empty dict)", "left out: y/z (an empty list)"]


def test_a_tensor_of_another_kind_under_a_key_with_a_slash_belongs_to_its_parts(tmp_path: Path) -> None:
    torch.save({"a/b": quantised(2.0), "w": torch.ones(2)}, tmp_path / "a.pt")
    with eg.open_checkpoint(tmp_path / "a.pt") as ck:
        assert dict(ck.others) == {"a%2Fb": "a quantised tensor (qint8)"}
    done = evergrad("convert", tmp_path / "a.pt", tmp_path / "a.npz", "--tensors-only", "--skip-unread")
    assert "1 part of tensors that are left out" in done.stdout


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("holder", ["tensor", "dict"])
def test_tensors_in_attributes_are_not_called_ok(holder: str, legacy: bool, tmp_path: Path) -> None:
    odd: Any = torch.ones(3) if holder == "tensor" else OrderedDict(inner=torch.ones(3))
    odd.held = torch.tensor([1.0, float("nan")])
    path = saved(tmp_path / "state.pt", odd, _use_new_zipfile_serialization=not legacy)
    report = eg.verify(path)
    expected = {"tensor": ("odd@attributes", "held"), "dict": ("odd", "collections.OrderedDict with attributes")}
    name, what = expected[holder]
    assert (report.verdict, report.unverified) == (Check.UNKNOWN, {name: what})
    done = evergrad("verify", path)
    assert done.returncode == 1
    assert f"not verified: {name} ({what})" in done.stdout.splitlines()


def test_attributes_that_are_plain_values_are_covered_by_the_checksum_of_the_pickle(tmp_path: Path) -> None:
    odd = torch.ones(3)
    odd.tag = "frozen"  # type: ignore[attr-defined]
    report = eg.verify(saved(tmp_path / "state.pt", odd))
    assert (report.verdict, report.others) == (Check.OK, {"odd@attributes": Check.OK})


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_on_the_meta_device_are_neither_ok_nor_equal(legacy: bool, tmp_path: Path) -> None:
    what = "a tensor on the meta device, which has no values"
    options = {"_use_new_zipfile_serialization": not legacy}
    path = saved(tmp_path / "a.pt", torch.empty(3, device="meta"), **options)
    report = eg.verify(path)
    assert (report.verdict, report.unverified) == (Check.UNKNOWN, {"odd": what})
    assert evergrad("verify", path).returncode == 1
    comparison = eg.compare(path, path)
    assert (comparison.verdict, comparison.uncompared) == ("unknown", {"odd": what})
    longer = saved(tmp_path / "b.pt", torch.empty(4, device="meta"), **options)
    assert eg.compare(path, longer).verdict == "different"
