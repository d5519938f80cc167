"""What every checkpoint format promises, as a test suite that pytest runs over any of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar
from unittest import SkipTest

import numpy as np
import torch

from evergrad.errors import EvergradError, UnknownTensor, UsageError
from evergrad.formats import Checkpoint, open_checkpoint
from evergrad.formats.byte_source import NeedsRewrite, record_dry_run
from evergrad.formats.checkpoint import Bits
from evergrad.injection import BitFlip, inject, undo


class FormatContract:
    """Subclass it, say how to make a file of the format with its own library, and let pytest collect it.

    `make` writes a file or folder with at least one tensor of eight elements or more, and returns its path and
    what it holds (no tensor that overlaps itself, as expanded ones do). `load`, if given, reads a file with the
    format's own library, so that what we changed is checked by a reader that is not ours.
    """

    format: ClassVar[str]
    byte_exact: ClassVar[bool] = True
    """Whether altering twice gives the same file, byte for byte; not so where data is compressed."""

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        """Write a checkpoint into the folder; its path, and the tensors by name."""
        raise TypeError(f"{type(self).__name__} must say how to make a {self.format} checkpoint")

    def load(self, path: Path) -> Mapping[str, torch.Tensor] | None:
        """The tensors by name, read by the format's own library; None if there is none."""
        return None

    def _made(self, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        """`make`, with copies: some libraries hand out tensors that are the file itself."""
        path, tensors = self.make(folder)
        return path, {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def test_it_is_recognised_by_content_and_not_by_name(self, tmp_path: Path) -> None:
        path, _ = self._made(tmp_path)
        if path.is_file() and not path.name.endswith(".index.json"):
            path = path.rename(path.with_name("renamed.xyz"))
        with open_checkpoint(path) as ck:
            assert ck.format == self.format

    def test_every_tensor_is_listed_with_its_shape_dtype_and_size(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        with open_checkpoint(path) as ck:
            assert set(ck.tensors) == set(expected)
            for name, tensor in expected.items():
                info = ck.tensors[name]
                assert info.name == name
                assert info.shape == tuple(tensor.shape), name
                assert info.dtype.torch == tensor.dtype, name
                assert info.nbytes == tensor.numel() * tensor.element_size(), name
                assert info.numel == tensor.numel(), name

    def test_every_tensor_is_read_bit_for_bit(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        with open_checkpoint(path) as ck:
            for name, tensor in expected.items():
                read = ck.read(name)
                assert read.dtype == tensor.dtype
                assert read.shape == tensor.shape, name
                assert raw_bytes(read) == raw_bytes(tensor), name

    def test_a_range_of_elements_is_the_same_part_of_the_whole(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        name = _largest(expected)
        with open_checkpoint(path) as ck:
            whole, count = ck.read_bits(name), ck.tensors[name].numel
            np.testing.assert_array_equal(ck.read_bits(name, 2, count - 1), whole[2 : count - 1])
            assert len(ck.read_bits(name, 3, 3)) == 0

    def test_single_elements_are_the_same_as_in_the_whole(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        name = _largest(expected)
        with open_checkpoint(path) as ck:
            whole, last = ck.read_bits(name), ck.tensors[name].numel - 1
            indices = [last, 0, 3, 3, last // 2]
            np.testing.assert_array_equal(ck.bits_at(name, indices), whole[indices])
            assert len(ck.bits_at(name, [])) == 0
            _refused(UsageError, lambda: ck.bits_at(name, [last + 1]))

    def test_a_rehearsed_change_is_the_one_that_happens_and_changes_nothing_before(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        name = _largest(expected)
        before = _bytes_of(path)
        with record_dry_run() as noted, open_checkpoint(path) as ck:
            try:
                ck.xor(name, *_change(ck, name))
            except NeedsRewrite:
                noted.files.clear()
        assert _bytes_of(path) == before
        wanted = {file: bytearray(data) for file, data in before.items()}
        for file, changes in noted.files.items():
            data = np.frombuffer(wanted[str(file)], np.uint8)
            for addresses, rows in changes.xors:
                np.bitwise_xor.at(data, addresses[:, None] + np.arange(rows.shape[1]), rows)
            for offset, value in changes.writes.items():
                data[offset : offset + len(value)] = np.frombuffer(value, np.uint8)
        with open_checkpoint(path) as ck:
            ck.xor(name, *_change(ck, name))
        if noted.files:
            assert _bytes_of(path) == wanted

    def test_an_injection_is_undone_byte_for_byte(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        before = _bytes_of(path)
        log = inject(path, BitFlip(), count=3, where=_largest(expected), in_place=True, log=tmp_path / "log.jsonl")
        assert _bytes_of(path) != before
        undo(log)
        assert _bytes_of(path) == before

    def test_xor_changes_exactly_those_bits_and_returns_the_old_ones(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        with open_checkpoint(path) as ck:
            fixed = {name for name, info in ck.tensors.items() if info.read_only}
        filled = [name for name, tensor in expected.items() if tensor.numel() and name not in fixed]
        for name in filled[:: 1 + len(filled) // 30]:
            with open_checkpoint(path) as ck:
                before = {other: ck.read_bits(other) for other in ck.tensors}
                indices, patterns = _change(ck, name)
                old = ck.xor(name, indices, patterns)
                shares = {name, *ck.tensors[name].shares}
            np.testing.assert_array_equal(old, before[name][indices])
            with open_checkpoint(path) as ck:
                wanted = before[name].copy()
                np.bitwise_xor.at(wanted, indices, patterns)
                np.testing.assert_array_equal(ck.read_bits(name), wanted)
                for other in set(ck.tensors) - shares:
                    np.testing.assert_array_equal(ck.read_bits(other), before[other], other)
                ck.xor(name, indices, patterns)

    def test_its_own_library_reads_the_change(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        if self.load(path) is None:
            raise SkipTest(f"{type(self).__name__} has no `load`: no other reader has seen what was changed")
        name = _largest(expected)
        with open_checkpoint(path) as ck:
            indices, patterns = _change(ck, name)
            ck.xor(name, indices, patterns)
            ours = {other: ck.read(other) for other in ck.tensors}
        loaded = self.load(path)
        assert loaded is not None
        for other, tensor in loaded.items():
            assert raw_bytes(tensor) == raw_bytes(ours[other]), other
        assert raw_bytes(loaded[name]) != raw_bytes(expected[name])

    def test_xor_twice_is_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        before = _bytes_of(path)
        name = _largest(expected)
        for _ in range(2):
            with open_checkpoint(path) as ck:
                ck.xor(name, *_change(ck, name))
        with open_checkpoint(path) as ck:
            assert raw_bytes(ck.read(name)) == raw_bytes(expected[name])
        if self.byte_exact:
            assert _bytes_of(path) == before

    def test_an_index_given_twice_counts_twice(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        name = _largest(expected)
        with open_checkpoint(path) as ck:
            _, pattern = _change(ck, name)
            before = ck.read_bits(name)
            old = ck.xor(name, [1, 1], np.stack([pattern[0], pattern[0]]))
            np.testing.assert_array_equal(old, before[[1, 1]])
            np.testing.assert_array_equal(ck.read_bits(name), before)

    def test_reading_changes_nothing(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        before = _bytes_of(path)
        with open_checkpoint(path) as ck:
            for name in expected:
                ck.read(name)
            ck.xor(_largest(expected), [], [])
        assert _bytes_of(path) == before

    def test_wrong_arguments_are_refused_and_nothing_changes(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        before = _bytes_of(path)
        name = _largest(expected)
        with open_checkpoint(path) as ck:
            count, bits = ck.tensors[name].numel, ck.tensors[name].dtype.bits
            one = np.ones((1, 2) if ck.tensors[name].dtype.parts == 2 else 1, bits)
            _refused(UnknownTensor, lambda: ck.read("no such tensor"))
            _refused(UnknownTensor, lambda: ck.xor("no such tensor", [0], one))
            _refused(UsageError, lambda: ck.xor(name, [count], one))
            _refused(UsageError, lambda: ck.xor(name, [-1], one))
            _refused(UsageError, lambda: ck.xor(name, [0.5], one))
            _refused(UsageError, lambda: ck.xor(name, [0, 1], one))
            _refused(UsageError, lambda: ck.xor(name, [0], one.astype(np.float64)))
            _refused(UsageError, lambda: ck.read_bits(name, 0, count + 1))
        assert _bytes_of(path) == before

    def test_closing_twice_is_fine_and_nothing_is_read_or_altered_after_it(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        before = _bytes_of(path)
        name = _largest(expected)
        for reads in (False, True):  # what has been read may still be at hand
            ck = open_checkpoint(path)
            change = _change(ck, name)
            if reads:
                ck.read(name)
            ck.close()
            ck.close()
            _refused_once_closed(ck, name, change)
        assert _bytes_of(path) == before

    def test_what_was_altered_is_kept_and_nothing_more_is_taken_once_closed(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        name = _largest(expected)
        with open_checkpoint(path) as ck:
            change = _change(ck, name)
            ck.xor(name, *change)
            changed = ck.read_bits(name)
        _refused_once_closed(ck, name, change)
        with open_checkpoint(path) as ck:
            np.testing.assert_array_equal(ck.read_bits(name), changed)

    def test_a_truncated_file_is_refused_or_read_right(self, tmp_path: Path) -> None:
        path, expected = self._made(tmp_path)
        for file in _files(path):
            whole = file.read_bytes()
            for part in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1):
                file.write_bytes(whole[:part])
                try:
                    with open_checkpoint(path) as ck:
                        for name in ck.tensors:
                            assert raw_bytes(ck.read(name)) == raw_bytes(expected[name])
                except EvergradError as error:
                    assert "\n" not in str(error)
            file.write_bytes(whole)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in C order, as bytes; equal for NaNs of the same bits."""
    if not tensor.numel():
        return b""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _largest(tensors: Mapping[str, torch.Tensor]) -> str:
    return max(tensors, key=lambda name: tensors[name].numel())


def _change(ck: Checkpoint, name: str) -> tuple[list[int], Bits]:
    """The top bit of the first element and the lowest of the last, in an order that is not ascending."""
    dtype, count = ck.tensors[name].dtype, ck.tensors[name].numel
    indices = [count - 1, 0] if count > 1 else [0]
    patterns = np.zeros((len(indices), dtype.parts), dtype.bits)
    patterns[0, 0] = 1
    patterns[-1, -1] |= dtype.bits.type(1 << (8 * dtype.layout.part_bytes - 1))
    return indices, patterns if dtype.parts > 1 else patterns[:, 0]


def _files(path: Path) -> list[Path]:
    return sorted(child for child in path.rglob("*") if child.is_file()) if path.is_dir() else [path]


def _bytes_of(path: Path) -> dict[str, bytes]:
    """Every file of the checkpoint; one that is named by its index is more than that file."""
    files = _files(path)
    if not path.is_dir():
        with open_checkpoint(path) as ck:
            files = sorted({*files, *(file for file in ck.files() if file.is_file())})
    return {str(file): file.read_bytes() for file in files}


def _refused_once_closed(ck: Checkpoint, name: str, change: tuple[list[int], Bits]) -> None:
    _refused(EvergradError, lambda: ck.read(name))
    _refused(EvergradError, lambda: ck.read_bits(name, 1, 2))
    _refused(EvergradError, lambda: ck.xor(name, *change))
    ck.close()


def _refused(kind: type[EvergradError], action: object) -> None:
    assert callable(action)
    try:
        action()
    except kind as error:
        assert "\n" not in str(error), "an error is one line"
        return
    raise AssertionError(f"expected {kind.__name__}")
