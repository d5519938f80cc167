"""Damage is found, and sound checkpoints pass: bits flipped at rest, NaN, values that no training makes."""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import evergrad as eg
from evergrad.formats.verify import Verification
from evergrad.records import Check


def weights(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    """Values as layers have them."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(shape or (40, 50), generator=generator) * 0.05).to(dtype)


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    """A file without checksums."""
    path = folder / "state.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


def flip_at_rest(path: Path, needle: bytes, bit: int = 0) -> None:
    """One bit of the file, where these bytes are; the container learns nothing of it."""
    data = bytearray(path.read_bytes())
    place = data.index(needle)
    data[place + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip(path: Path, name: str, index: int, bit: int) -> Verification:
    """One bit of one element, checksums kept right, and what `verify` says then; undone afterwards."""
    with eg.open_checkpoint(path) as ck:
        ck.xor(name, [index], [1 << bit])
    report = eg.verify(path)
    with eg.open_checkpoint(path) as ck:
        ck.xor(name, [index], [1 << bit])
    return report


def test_one_bit_flipped_at_rest_breaks_the_checksum_of_its_tensor_only(tmp_path: Path) -> None:
    state = {"a": weights(), "b": torch.full((300,), 0.25)}
    torch.save(state, tmp_path / "state.pt")
    np.savez(tmp_path / "state.npz", **{key: value.numpy() for key, value in state.items()})
    for path in (tmp_path / "state.pt", tmp_path / "state.npz"):
        assert eg.verify(path).verdict is Check.OK
        flip_at_rest(path, state["a"].numpy().tobytes(), bit=5)
        report = eg.verify(path)
        assert [row.name for row in report.wrong] == ["a"]
        assert (report["a"].checksum, report["a"].values) == (Check.FAILED, Check.OK)
        assert report["a"].reason == "the checksum does not hold"
        assert report["b"].verdict is Check.OK
        assert report.verdict is Check.FAILED


def test_one_bit_flipped_in_compressed_data_is_found_and_hides_no_other_tensor(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    arrays = {"a": weights().numpy(), "b": weights().numpy() * 3}
    np.savez_compressed(path, **arrays)
    with zipfile.ZipFile(path) as archive:
        start = archive.infolist()[0].header_offset
        size = archive.infolist()[0].compress_size
    clean = path.read_bytes()
    assert eg.verify(path).verdict is Check.OK
    for place in range(start + 400, start + size, size // 7):
        damaged = bytearray(clean)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        report = eg.verify(path)
        assert [row.name for row in report.wrong] == ["a"], place
        assert report["b"].verdict is Check.OK


def test_a_damaged_pickle_is_a_part_of_the_container(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"a": weights(), "learning_rate": 0.1234}, path)
    flip_at_rest(path, b"learning_rate", bit=1)
    report = eg.verify(path)
    assert not report.wrong
    assert [part for part, check in report.container.items() if check is Check.FAILED] == ["state/data.pkl"]
    assert report.verdict is Check.FAILED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_a_value_that_is_no_number_is_found_where_it_is(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = weights(dtype)
    tensor[7, 9] = value
    report = eg.verify(saved(tmp_path, weight=tensor, sound=weights(dtype)))
    row = report["weight"]
    assert [wrong.name for wrong in report.wrong] == ["weight"]
    assert (row.verdict, row.nonfinite, row.outliers) == (Check.FAILED, 1, 0)
    assert row.worst is not None
    assert row.worst.index == (7, 9)
    assert row.reason.startswith("[7,9] = ")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_fp8_has_its_own_nan(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    torch.save({"w": torch.ones(32).to(dtype)}, tmp_path / "clean.pt")
    assert eg.verify(tmp_path / "clean.pt").verdict is Check.OK
    bits = torch.ones(32).to(dtype).view(torch.uint8)
    bits[5] = 0x80 if name.endswith("fnuz") else 0xFF
    torch.save({"w": bits.view(dtype)}, tmp_path / "nan.pt")
    row = eg.verify(tmp_path / "nan.pt")["w"]
    assert (row.values, row.nonfinite) == (Check.FAILED, 1)


@pytest.mark.parametrize(
    ("dtype", "bit"),
    [
        (torch.float64, 62),
        (torch.float32, 30),
        (torch.bfloat16, 14),
        (torch.float16, 14),
        (torch.float8_e5m2, 6),
    ],
)
def test_the_top_exponent_bit_is_found_without_a_checksum(dtype: torch.dtype, bit: int, tmp_path: Path) -> None:
    tensor = weights(dtype)
    tensor[3, 4] = 0.0625
    path = saved(tmp_path, weight=tensor)
    assert eg.verify(path).verdict is Check.UNKNOWN
    row = flip(path, "weight", 3 * 50 + 4, bit)["weight"]
    assert row.wrong
    assert (row.outliers, row.nonfinite, row.checksum) == (1, 0, Check.UNKNOWN)
    assert row.worst is not None
    assert row.worst.index == (3, 4)
    assert "beyond all others" in row.reason


def test_what_looks_like_one_kind_of_tensor_or_another_is_found(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    exponents = torch.empty(500).uniform_(-100, 6, generator=generator)
    tensors = {
        "bias": weights(torch.float32, 10),
        "bn.running_var": torch.rand(32, generator=generator) * 40,
        "state/0/exp_avg": weights(torch.float32, 500) * 2**-20,
        "state/0/exp_avg_sq": 2**exponents,
        "embedding.weight": torch.cat([torch.zeros(400, 8), weights(torch.float32, 20, 8)]),
    }
    path = saved(tmp_path, **tensors)
    assert not eg.verify(path).wrong
    for name, tensor in tensors.items():
        sizes = tensor.flatten().abs()
        index = int(sizes.eq(sizes[(sizes > 0) & (sizes < 1)].median()).nonzero()[0])
        row = flip(path, name, index, 30)[name]
        assert row.wrong, name
        assert row.worst is not None
        assert np.ravel_multi_index(row.worst.index, tensor.shape) == index


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_value_among_many_is_found_wherever_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    spread = torch.cat([torch.zeros(200_000), weights(dtype, 200_000).float()]).to(dtype)
    for index in (0, 199_999, 200_000, 399_999):
        tensor = spread.clone()
        tensor[index] = 3e4 if dtype is torch.float16 else 1e15
        row = eg.verify(saved(tmp_path, weight=tensor))["weight"]
        assert (row.verdict, row.outliers) == (Check.DEGRADED, 1), index
        assert row.worst is not None
        assert row.worst.index == (index,)


def test_a_zero_that_became_two_is_found_where_all_else_is_zero_or_small(tmp_path: Path) -> None:
    pruned = weights(torch.float32, 300_000)
    pruned[pruned.abs() < 0.05] = 0
    pruned[299_999] = 0
    moment = torch.cat([torch.zeros(100), weights(torch.float32, 100) ** 2])
    path = saved(tmp_path, **{"zeros": torch.zeros(100), "weight": pruned, "state/0/exp_avg_sq": moment})
    assert not eg.verify(path).wrong
    row = flip(path, "zeros", 17, 30)["zeros"]
    assert (row.verdict, row.reason) == (Check.DEGRADED, "[17] = 2: all others are 0")
    row = flip(path, "weight", 299_999, 30)["weight"]
    assert (row.verdict, row.outliers) == (Check.DEGRADED, 1)
    assert row.reason == "[299999] = 2: exactly what a flipped bit makes of a 0, and all others are below 2^-2"
    assert flip(path, "state/0/exp_avg_sq", 3, 30)["state/0/exp_avg_sq"].verdict is Check.DEGRADED


def test_an_exact_two_that_somebody_may_have_written_passes(tmp_path: Path) -> None:
    small, zeros = weights(torch.float32, 100), torch.zeros(100)
    tensors = {
        "of.about.its.size": torch.cat([zeros, small, torch.tensor([2.0, 0.7])]),
        "twice": torch.cat([zeros, small, torch.tensor([2.0, 2.0])]),
        "no.zero": torch.cat([small, torch.tensor([2.0])]),
        "not.exact": torch.cat([zeros, small, torch.tensor([2.000001])]),
        "sharpen.kernel": torch.tensor([[0, -0.25, 0], [-0.25, 2, -0.25], [0, -0.25, 0]]),
        "of.few.bits": torch.cat([zeros, small, torch.tensor([2.0])]).bfloat16(),
    }
    assert [f"{row.name} {row.reason}" for row in eg.verify(saved(tmp_path, **tensors)).wrong] == []


@pytest.mark.parametrize(
    ("name", "fill", "dtype", "count", "wrong"),
    [
        ("w", 0.1, torch.float32, 63, False),
        ("w", 0.1, torch.float32, 64, True),
        ("w", 0.1, torch.float64, 64, True),
        ("w", 0.1, torch.bfloat16, 64, False),
        ("w", 0.1, torch.float16, 64, False),
        ("w", 0.0, torch.float32, 63, False),
        *(("w", 0.0, dtype, 64, True) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)),
        ("train_losses", 0.0, torch.float32, 64, False),
    ],
)
def test_an_exact_two_is_judged_in_tensors_of_64_elements_and_more(
    name: str, fill: float, dtype: torch.dtype, count: int, wrong: bool, tmp_path: Path
) -> None:
    tensor = torch.full((count,), fill)
    tensor[:2] = torch.tensor([0.0, 2.0])
    path = saved(tmp_path, **{name: tensor.to(dtype)})
    assert [row.verdict for row in eg.verify(path).wrong] == [Check.DEGRADED] * wrong


@pytest.mark.parametrize(
    ("tensor", "wrong"),
    [
        (torch.tensor(1000.0), False),
        (torch.tensor(12345), False),
        (torch.tensor(0.0), False),
        (torch.tensor(1000.0625), True),
        (torch.tensor(-3.0), True),
        (torch.tensor(2**62 + 3), True),
        (torch.tensor(-(2**63) + 7), True),
        (torch.tensor(math.nan), True),
    ],
)
def test_a_counter_has_to_be_a_whole_number(tensor: torch.Tensor, wrong: bool, tmp_path: Path) -> None:
    torch.save({"optimizer": {"state": {0: {"step": tensor}}}, "bn.num_batches_tracked": tensor}, tmp_path / "c.pt")
    assert [row.wrong for row in eg.verify(tmp_path / "c.pt").tensors] == [wrong, wrong]


def test_what_training_makes_on_purpose_passes(tmp_path: Path) -> None:
    mask = torch.triu(torch.full((16, 16), -math.inf), diagonal=1)
    generator = torch.Generator().manual_seed(3)
    state = {
        "model": {
            "zeros": torch.zeros(1000),
            "ones": torch.ones(64),
            "constant": torch.full((64,), 3e4),
            "one.value": torch.tensor([5e9]),
            "one_hot": torch.eye(40)[0],
            "attn_mask": mask,
            "attn_mask_finite": torch.triu(torch.full((16, 16), torch.finfo(torch.float32).min), diagonal=1),
            "dead.weight": torch.cat([torch.full((60,), 1e-38), torch.tensor([0.5, 0.25, 1.5, 40.0])]),
            "dead.running_var": torch.cat([torch.full((30,), 1e-40), torch.tensor([900.0, 2.0])]),
            "rows": torch.cat([torch.zeros(900, 4), torch.randn(3, 4, generator=generator)]),
            "heavy": torch.exp(3 * torch.randn(5000, generator=generator)),
            "half": (torch.exp(1.5 * torch.randn(5000, generator=generator))).half(),
            "ids": torch.tensor([2**62, 5, -1]),
            "empty": torch.empty(0, 3),
        },
        "rng": torch.get_rng_state(),
        "bytes": torch.randint(256, (4096,), dtype=torch.uint8, generator=generator),
        "callbacks": {"best_score": torch.tensor(math.inf)},
    }
    torch.save(state, tmp_path / "state.pt")
    report = eg.verify(tmp_path / "state.pt")
    assert [f"{row.name} {row.reason}" for row in report.wrong] == []
    assert report.verdict is Check.OK
    assert report["rng"].values is Check.UNKNOWN
    assert report["model/one.value"].reason == "too few values to stand apart from"


@cache
def trained(kind: str) -> dict[str, object]:
    """A tiny model that has learnt something, with its optimizer."""
    torch.manual_seed(0)
    network: nn.Module
    if kind == "cnn":
        network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        x = torch.randn(256, 1, 8, 8)
        y = (x[:, 0, :, :4].mean((1, 2)) > x[:, 0, :, 4:].mean((1, 2))).long()
    else:
        network = nn.Sequential(nn.Embedding(500, 16), nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 2))
        x = torch.randint(60, (256, 3))
        y = (x.sum(1) > 90).long()
    parameters = network.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, 0.1, momentum=0.9) if kind == "cnn" else torch.optim.Adam(parameters, 1e-2)
    )
    for _ in range(150):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(network(x), y))
        optimizer.step()
    assert (network.eval()(x).argmax(1) == y).float().mean() > 0.85
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["cnn", "embedding"])
def test_a_trained_model_raises_no_alarm(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = dict(trained(kind))
    weights_ = state["model"]
    assert isinstance(weights_, dict)
    state["model"] = {key: w.to(dtype) if w.is_floating_point() else w for key, w in weights_.items()}
    torch.save(state, tmp_path / "state.pt")
    report = eg.verify(tmp_path / "state.pt")
    assert [f"{row.name} {row.reason}" for row in report.wrong] == []
    assert report.verdict is Check.OK


def test_a_selection_and_an_open_checkpoint_will_do(tmp_path: Path) -> None:
    bad = weights()
    bad[0, 0] = math.nan
    path = saved(tmp_path, good=weights(), bad=bad)
    seen: list[tuple[int, int]] = []
    assert not eg.verify(path, where="good").wrong
    with eg.open_checkpoint(path) as ck:
        assert len(eg.verify(ck, progress=lambda done, total: seen.append((done, total))).wrong) == 1
        ck.read_bits("good")
    assert seen[-1] == (16_000, 16_000)
    with pytest.raises(eg.EvergradError, match="Did you mean 'good'"):
        eg.verify(path, where="goood")


def test_real_files_of_other_frameworks_pass(data: Path) -> None:
    for path in ("lightning.ckpt", "trainer/checkpoint-4", "sharded", "whole_module.pt", "cuda.pt"):
        report = eg.verify(data / path)
        assert [f"{row.name} {row.reason}" for row in report.wrong] == [], path


def test_a_large_tensor_is_verified_in_little_memory(tmp_path: Path, limited: Callable[..., str]) -> None:
    path = tmp_path / "big.npy"
    array = np.lib.format.open_memmap(path, "w+", np.float32, (1 << 28,))
    array[1 << 27] = 1e30
    array.flush()
    del array
    assert path.stat().st_blocks * 512 < 64 << 20
    code = """
    import evergrad as eg
    print(eg.verify(sys.argv[1])["."].reason)
    """
    assert limited(code, path, memory=600 << 20) == f"[{1 << 27}] = 1e+30: all others are 0\n"


def test_one_bit_flipped_at_rest_under_fletcher32_is_found(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    values = weights().numpy()
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file.create_dataset("guarded", data=values, chunks=values.shape, fletcher32=True)
        file.create_dataset("other", data=values * 2, chunks=values.shape, fletcher32=True)
    assert eg.verify(path).verdict is Check.OK
    flip_at_rest(path, values[7].tobytes())
    found = eg.verify(path)
    assert found["guarded"].checksum is Check.FAILED
    assert found["other"].verdict is Check.OK


@pytest.mark.parametrize("chunks", [None, (10, 10)])
def test_an_exponent_flip_in_plain_hdf5_is_found(chunks: tuple[int, int] | None, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", data=weights().numpy(), chunks=chunks)
    assert not eg.verify(path).wrong
    assert flip(path, "w", 123, 30)["w"].verdict is Check.FAILED
    assert not eg.verify(path).wrong


def test_one_bit_flipped_at_rest_in_a_tensorflow_checkpoint_is_found(tmp_path: Path, data: Path) -> None:
    shutil.copytree(data / "tf_ckpt", folder := tmp_path / "ckpt")
    assert not eg.verify(folder).wrong
    with eg.open_checkpoint(folder) as ck:
        name = max(ck.tensors, key=lambda name: ck.tensors[name].nbytes)
        needle = ck.read(name).numpy().tobytes()
    flip_at_rest(next(folder.glob("*.data-*")), needle, bit=3)
    found = eg.verify(folder)
    assert [tensor.name for tensor in found.wrong] == [name]
    assert found[name].checksum is Check.FAILED


def normal(*shape: int, mean: float = 0.0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator) * spread + mean


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("optimizer/state/0/exp_avg_sq", normal(64, mean=2.5e19, spread=1e18)),
        ("optimizer/state/0/exp_avg_sq", normal(4, 16, mean=3e30, spread=1e29)),
        ("optimizer/state/0/exp_avg_sq", torch.exp(normal(500, spread=4)) * 2.5e19),
        ("optimizer/state/0/exp_avg_sq", torch.tensor([2.5e19, 3e19, 1e19])),
        ("optimizer/state/0/exp_avg_sq", torch.tensor(2.5e19)),
        ("optimizer/state/0/exp_avg_sq", torch.full((64,), 2.5e19)),
        ("model/bn.running_var", normal(32, mean=2e30, spread=3e29)),  # inputs in kilograms of stars
        ("model/scaler.scale", torch.tensor([1e-3, 1.0, 1e5, 6e21])),
        ("model/weight", (normal(200, mean=1e22, spread=1e21)).bfloat16()),
        ("model/double", normal(100, mean=1e25, spread=1e24).double()),
    ],
)
def test_large_values_are_no_outliers_where_all_of_the_tensor_is_large(
    name: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    row = eg.verify(saved(tmp_path, **{name: tensor}))[name]
    assert not row.wrong, row.reason


@pytest.mark.parametrize("numel", [1, 2, 3, 8, 9, 64])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_a_flipped_top_bit_is_found_in_a_tensor_of_any_size(numel: int, scale: float, tmp_path: Path) -> None:
    path = saved(tmp_path, bias=torch.linspace(0.3, 0.9, numel) * scale)
    row = flip(path, "bias", numel - 1, 30)["bias"]
    assert row.verdict is Check.FAILED
    assert row.worst is not None
    assert row.worst.index == (numel - 1,)


def test_a_flipped_top_bit_is_found_among_large_values_of_its_own_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path, **{"state/0/exp_avg_sq": torch.cat([torch.full((1,), 1e-6), normal(63, mean=1e7)])})
    row = flip(path, "state/0/exp_avg_sq", 0, 30)["state/0/exp_avg_sq"]
    assert (row.verdict, row.outliers) == (Check.FAILED, 1)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_many_flipped_top_bits_are_found_and_counted(share: float, tmp_path: Path) -> None:
    tensor = weights(torch.float32, 1000).abs() + 1e-3
    flipped = int(share * 1000)
    tensor.view(torch.int32)[:flipped] ^= 1 << 30
    row = eg.verify(saved(tmp_path, weight=tensor))["weight"]
    assert (row.verdict, row.outliers) == (Check.FAILED, flipped)


def test_ranges_of_observers_that_have_seen_no_value_pass(tmp_path: Path) -> None:
    from torch.ao.quantization import fake_quantize, observer

    observers = nn.ModuleDict(
        {
            "plain": observer.MinMaxObserver(),
            "moving": observer.MovingAverageMinMaxObserver(),
            "channel": observer.PerChannelMinMaxObserver(),
            "histogram": observer.HistogramObserver(),
            "fake": fake_quantize.FakeQuantize(),
        }
    )
    torch.save({"model": observers.state_dict(), "alone": observer.MinMaxObserver().state_dict()}, tmp_path / "a.pt")
    torch.save(observers.state_dict(), tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        report = eg.verify(tmp_path / name)
        assert report.verdict is Check.OK, report.wrong


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("obs.min_val", [-math.inf]),
        ("obs.max_val", [math.inf]),
        ("obs.min_val", [math.nan]),
        ("obs.max_val", [math.nan]),
        ("obs.min_val", [0.5, math.inf]),
        ("obs.max_val", [-math.inf, math.inf]),
        ("obs.min_value", [math.inf]),
        ("optimizer/state/0/min_val", [math.inf]),
    ],
)
def test_other_values_of_a_range_that_are_no_numbers_are_found(name: str, values: list[float], tmp_path: Path) -> None:
    assert eg.verify(saved(tmp_path, **{name: torch.tensor(values)})).verdict is Check.FAILED


@pytest.mark.parametrize(
    ("name", "verdict"), [("optimizer/state/0/exp_avg_sq", Check.UNKNOWN), ("exp_avg_sq", Check.FAILED)]
)
def test_a_large_second_moment_of_one_element_is_sound_below_an_optimizer(
    name: str, verdict: Check, tmp_path: Path
) -> None:
    assert eg.verify(saved(tmp_path, **{name: torch.tensor([2.5e19])})).verdict is verdict
