"""Settings of the published injector: what their names say is done, and what is wrong in them is one line."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
import yaml

from evergrad.errors import DamagedFile, EvergradError, FileAccessError, UnknownTensor, UsageError
from evergrad.injection import BitFlip, BitMask, InjectionLog, Scale, inject
from evergrad.injection.published_settings import PublishedSettings
from refusals import refusal

DATA = Path(__file__).parent.parent / "data"
ADAM = DATA / "chainer_adam_plain.h5"
CONVNET = DATA / "chainer_convnet_gzip.h5"

COUNT: dict[str, Any] = {
    "hdf5_file": str(CONVNET),
    "injection_type": "count",
    "injection_attempts": 20,
    "injection_probability": 1,
    "float_precision": 32,
    "allow_NaN_values": True,
    "use_random_locations": True,
}


def settings(**changes: Any) -> PublishedSettings:
    """Twenty faults anywhere in a real file, but for these changes; what is … is left out."""
    return PublishedSettings.from_mapping({key: value for key, value in {**COUNT, **changes}.items() if value != ...})


def injected(given: PublishedSettings, seed: int = 3) -> InjectionLog:
    """What would be done."""
    return inject(**{"seed": seed, **given.to_inject()}, dry_run=True)


def bits(log: InjectionLog) -> set[int]:
    """Every bit that was aimed at, by number."""
    return {bit for hit in log.faults() for bit in hit.bits}


def values(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an HDF5 file, by h5py alone."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = np.asarray(item[()])

    with h5py.File(path) as file:
        file.visititems(keep)
    return found


def toml(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


WRITERS = {".yaml": yaml.safe_dump, ".yml": json.dumps, ".toml": toml, ".json": json.dumps}


def written(folder: Path, text: str | bytes, ending: str = ".yaml") -> Path:
    path = folder / f"settings{ending}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Floats of three widths, integers, and an array of five dimensions."""
    path = tmp_path / "mixture.h5"
    rng = np.random.default_rng(5)
    with h5py.File(path, "w") as file:
        for kind in ("f2", "f4", "f8"):
            file[f"layers/{kind}/W"] = rng.normal(0, 0.1, (40, 5)).astype(kind)
            file[f"layers/{kind}/b"] = rng.normal(0, 0.1, 5).astype(kind)
        file["layers/steps"] = np.arange(10)
        file["video/kernel"] = rng.normal(0, 0.1, (2, 3, 4, 3, 2)).astype("f4")
    return path


# How many


def test_a_count_is_that_many_faults_and_they_are_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "bad.h5"
    log = inject(**settings(bit_mask="1").to_inject(), out=out)
    assert (log.attempts, log.injected, log.changed) == (20, 20, 20)
    before, after = values(CONVNET), values(out)
    last = {(hit.tensor, hit.position): hit.new_value for hit in log.faults()}
    differs = {
        (name, tuple(map(int, place)))
        for name in before
        for place in np.argwhere(
            before[name].view(f"u{before[name].itemsize}") != after[name].view(f"u{after[name].itemsize}")
        )
    }
    assert differs
    assert differs <= set(last)
    for (name, place), value in last.items():
        assert np.array_equal(after[name][place], np.float32(value), equal_nan=True)


@pytest.mark.parametrize(("percent", "faults"), [(100, 781), (50, 390), (0.5, 4), ("1e0", 8)])
def test_a_percentage_is_percent_of_the_elements_that_may_be_hit(percent: object, faults: int) -> None:
    log = injected(settings(injection_type="percentage", injection_attempts=percent))
    assert sum(array.size for array in values(CONVNET).values() if array.dtype == np.float32) == 781
    assert log.attempts == log.injected == faults


def test_a_percentage_is_of_the_chosen_locations_and_precision(mixture: Path) -> None:
    chosen = settings(
        hdf5_file=str(mixture),
        injection_type="percentage",
        injection_attempts=10,
        float_precision=64,
        use_random_locations=False,
        locations_to_corrupt=["/layers"],
    )
    assert injected(chosen).attempts == 20  # of 205 elements of float64: round(20.5)


def test_each_attempt_comes_about_with_the_probability() -> None:
    log = injected(settings(injection_attempts=2000, injection_probability="0.25"))
    assert log.attempts == 2000
    assert 400 < log.injected < 600
    assert injected(settings(injection_probability=0)).injected == 0
    assert injected(settings(injection_probability="1e-8")).attempts == 20


# What happens to bits


def test_a_bit_range_includes_both_ends_and_counts_from_the_sign() -> None:
    chosen = settings(injection_attempts=500, corruption_mode="bit_range", first_bit=0, last_bit=3)
    assert chosen.to_inject()["fault"] == BitFlip(range(4))
    log = injected(chosen)
    assert bits(log) == {0, 1, 2, 3}
    assert any(hit.bits == (0,) and hit.new_value == -hit.old_value for hit in log.faults())
    assert bits(injected(settings(first_bit=9, last_bit=9))) == {9}


def test_without_bits_every_bit_of_the_precision_may_flip(mixture: Path) -> None:
    for precision in (16, 32, 64):
        chosen = settings(hdf5_file=str(mixture), float_precision=precision, injection_attempts=1500)
        assert chosen.corruption_mode == "bit_range"
        assert bits(injected(chosen)) == set(range(precision))


def test_a_burst_flips_adjacent_bits_within_the_range_and_says_so() -> None:
    chosen = settings(first_bit=1, last_bit=8, burst=3, injection_attempts=200)
    log = injected(chosen)
    assert {hit.bits for hit in log.faults()} == {(bit, bit + 1, bit + 2) for bit in range(1, 7)}
    assert "adjacent" in chosen.notes[0]


def test_a_bit_mask_is_xored_whole_at_every_alignment() -> None:
    chosen = settings(corruption_mode="bit_mask", bit_mask="101101", injection_attempts=1000)
    assert chosen.to_inject()["fault"] == BitMask("101101")
    patterns = {hit.aim for hit in injected(chosen).faults()}
    assert patterns == {0b101101 << shift for shift in range(27)}
    for hit in injected(chosen).faults():
        assert hit.old ^ hit.new == hit.aim


def test_a_scaling_factor_multiplies() -> None:
    chosen = settings(scaling_factor="4500")
    assert chosen.corruption_mode == "scaling_factor"
    assert chosen.to_inject()["fault"] == Scale(4500.0)
    for hit in injected(chosen).faults():
        assert np.float32(hit.new_value) == np.float32(hit.old_value * 4500)


@pytest.mark.parametrize(
    ("first", "last", "flipped"), [(0, 2, {0, 1, 2}), (1, 3, {0, 1, 2, 3}), (9, 9, {0, 9}), (1, 1, {0, 1})]
)
def test_allowing_sign_changes_adds_the_sign(first: int, last: int, flipped: set[int]) -> None:
    log = injected(settings(first_bit=first, last_bit=last, allow_sign_change=True, injection_attempts=300))
    assert bits(log) == flipped


def test_without_nan_values_none_comes_about(mixture: Path) -> None:
    harsh = {"hdf5_file": str(mixture), "float_precision": 16, "first_bit": 1, "last_bit": 1, "injection_attempts": 200}
    assert injected(settings(**harsh)).nonfinite == 0  # small halves: bit 1 makes them large, not infinite
    harsh |= {"scaling_factor": 1e6, "first_bit": ..., "last_bit": ...}
    assert injected(settings(**harsh)).nonfinite > 0
    with pytest.raises(UsageError, match="leave a finite value"):
        injected(settings(**harsh, allow_NaN_values=False))
    chosen = settings(hdf5_file=str(ADAM), bit_mask="11111111", allow_NaN_values=False, injection_attempts=300)
    log = injected(chosen)
    assert log.injected == 300
    assert log.nonfinite == 0
    assert all(np.isfinite(hit.new_value) for hit in log.faults())


# Where


@pytest.mark.parametrize("precision", [16, 32, 64])
def test_a_precision_selects_the_floats_of_that_width(mixture: Path, precision: int) -> None:
    log = injected(settings(hdf5_file=str(mixture), float_precision=precision))
    assert {hit.dtype.value for hit in log.faults()} == {f"float{precision}"}
    assert log.injected == log.changed == 20
    assert any("layers/steps" in names for names in log.left_out.values())


def test_auto_takes_floats_of_every_width_and_no_integers(mixture: Path) -> None:
    log = injected(settings(hdf5_file=str(mixture), float_precision="auto", injection_attempts=300))
    assert {hit.dtype.value for hit in log.faults()} == {"float16", "float32", "float64"}
    assert settings(float_precision=...).float_precision == "auto"


def test_a_precision_that_the_data_does_not_have_is_refused_and_counts_nothing() -> None:
    with pytest.raises(UsageError, match="float32 is not float64"):
        injected(settings(float_precision=64))


def test_a_location_stands_for_everything_below_it() -> None:
    chosen = settings(
        hdf5_file=str(ADAM),
        use_random_locations=False,
        locations_to_corrupt=["/conv1", "bn1/gamma/", "/fc/b/m"],
        injection_attempts=300,
    )
    assert chosen.to_inject()["where"] == ["conv1", "bn1/gamma", "fc/b/m"]
    hit = {hit.tensor for hit in injected(chosen).faults()}
    assert hit == {"conv1/W/m", "conv1/W/v", "conv1/b/m", "conv1/b/v", "bn1/gamma/m", "bn1/gamma/v", "fc/b/m"}


def test_the_root_as_a_location_is_everything() -> None:
    chosen = settings(use_random_locations=False, locations_to_corrupt=["/"])
    assert chosen.to_inject()["where"] is None


def test_a_location_that_reads_like_a_pattern_is_a_name(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        for name in ("cells[0]/W", "cells0/W", "re:x/W", "rexx/W"):
            file[name] = np.ones((10, 10), "f4")
    chosen = settings(hdf5_file=str(path), use_random_locations=False, locations_to_corrupt=["/cells[0]", "/re:x"])
    assert {hit.tensor for hit in injected(chosen).faults()} == {"cells[0]/W", "re:x/W"}


def test_a_location_that_is_not_there_is_refused_with_the_nearest() -> None:
    chosen = settings(use_random_locations=False, locations_to_corrupt=["/conv1/V"])
    with pytest.raises(UnknownTensor, match=r"conv1/V.*conv1/W"):
        injected(chosen)


def test_random_locations_are_all_and_the_list_is_ignored() -> None:
    chosen = settings(locations_to_corrupt=["/no/such/place"], injection_attempts=400)
    log = injected(chosen)
    assert {hit.tensor for hit in log.faults()} == {name for name, a in values(CONVNET).items() if a.dtype == "f4"}
    assert chosen.notes == ("locations_to_corrupt is ignored: use_random_locations is true",)


def test_locations_are_drawn_alike_however_small_they_are() -> None:
    log = injected(settings(injection_attempts=4000))
    counts = [len(column) for column in log.columns]
    assert len(counts) == 8
    assert min(counts) > 400  # 500 each on average; fc/W holds 92 % of the elements


def test_arrays_of_five_dimensions_are_hit(mixture: Path, tmp_path: Path) -> None:
    chosen = settings(hdf5_file=str(mixture), use_random_locations=False, locations_to_corrupt=["/video"])
    log = inject(**chosen.to_inject(), out=tmp_path / "bad.h5")
    assert log.injected == log.changed == 20
    assert all(len(hit.position) == 5 for hit in log.faults())
    before, after = values(mixture)["video/kernel"], values(tmp_path / "bad.h5")["video/kernel"]
    assert np.count_nonzero(before.view("u4") != after.view("u4")) > 10


def test_the_file_may_be_of_any_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"fc.weight": np.ones((30, 30), np.float32)}, path)
    chosen = settings(hdf5_file=str(path), use_random_locations=False, locations_to_corrupt=["/fc"])
    assert inject(**chosen.to_inject(), in_place=True).injected == 20


# Files


def test_yaml_toml_and_json_give_the_same_log_for_the_same_seed(tmp_path: Path) -> None:
    table = COUNT | {"first_bit": 1, "last_bit": 8, "seed": 11, "use_random_locations": False}
    table |= {"locations_to_corrupt": ["/conv1", "/fc"]}
    logs = []
    for ending, write in WRITERS.items():
        given = PublishedSettings.load(written(tmp_path, write(table), ending))
        log = inject(**given.to_inject(), out=tmp_path / "bad.h5", log=tmp_path / f"log{ending}", overwrite=True)
        assert log.path is not None
        logs.append(log.path.read_bytes())
    assert len(set(logs)) == 1
    other = PublishedSettings.load(written(tmp_path, json.dumps(table | {"seed": 12}), ".json"))
    assert [*map(str, injected(other).faults())] != [*map(str, InjectionLog.load(tmp_path / "log.json").faults())]


def test_settings_as_the_study_wrote_them_are_taken(tmp_path: Path) -> None:
    text = f"""
    # hdf5_file: "/home/somebody/else.h5"
    hdf5_file: "{CONVNET}"
    injection_probability: 1 # 1e-8
    injection_type: "count" #"percentage"
    injection_tries: 3
    log_file_path: "/home/somebody/log-"
    float_precision: 32
    #first_bit: 2
    #burst: 1
    scaling_factor: 4
    #bit_mask: "101101"
    allow_sign_change: True
    allow_NaN_values: False
    #injection_sequence_path: "/home/somebody/injectionSequence.json"
    save_injection_sequence: False
    use_random_locations: True
    locations_to_corrupt:
      - "/predictor/conv1/"
    """
    given = PublishedSettings.load(written(tmp_path, text))
    assert given.injection_attempts == 3
    assert given.notes == (
        "log_file_path is ignored: the log is kept beside the result",
        "locations_to_corrupt is ignored: use_random_locations is true",
        "allow_sign_change is ignored: corruption_mode is scaling_factor",
    )
    assert injected(given).injected == 3


def test_yaml_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    table = {key: value for key, value in COUNT.items() if key != "injection_probability"}
    path = written(tmp_path, yaml.safe_dump(table) + 'injection_probability: 1e-8\nfirst_bit: "1"\nlast_bit: 8.0\n')
    assert isinstance(yaml.safe_load(path.read_text())["injection_probability"], str)
    given = PublishedSettings.load(path)
    assert (given.injection_probability, given.first_bit, given.last_bit) == (1e-8, 1, 8)


@pytest.mark.parametrize("text", ["101101", "10", "'0101'", '"1"', "1" * 32])
def test_a_mask_is_taken_as_it_was_written(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, yaml.safe_dump(COUNT) + f"bit_mask: {text}\n")
    assert PublishedSettings.load(path).bit_mask == text.strip("'\"")


@pytest.mark.parametrize("text", ["010", "0101", "01", "1", "0", "0b11", "1012", "true", "1.5", "[1]", "1" * 33])
def test_a_mask_that_may_not_be_what_was_written_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, yaml.safe_dump(COUNT) + f"bit_mask: {text}\n")
    with pytest.raises(UsageError, match=r"bit_mask: expected .*(in quotes|32 bits)"):
        PublishedSettings.load(path)


def test_settings_are_frozen_and_stay_what_they_are_when_one_is_replaced() -> None:
    given = settings(first_bit="1", last_bit="8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.seed = 3  # type: ignore[misc]
    assert dataclasses.replace(given, seed=None) == given
    assert dataclasses.replace(given, hdf5_file="other.h5").to_inject()["path"] == "other.h5"


def test_without_a_seed_the_injector_has_its_own_and_never_the_clock() -> None:
    assert "seed" not in settings().to_inject()
    assert settings(seed=5).to_inject()["seed"] == 5
    logs = [inject(**settings().to_inject(), dry_run=True) for _ in range(2)]
    assert [*map(str, logs[0].faults())] == [*map(str, logs[1].faults())]


# What is wrong


WRONG_VALUES: list[tuple[dict[Any, Any], str]] = [
    ({"injection_atempts": 3}, "unknown setting 'injection_atempts'. Did you mean 'injection_attempts'"),
    ({"colour": 3}, "unknown setting 'colour'. Known: hdf5_file, injection_type"),
    ({7: 3}, "unknown setting 7. Known: "),
    ({"injection_tries": 3}, "injection_attempts is given twice, also as injection_tries: choose one"),
    ({"injection_attempts": ...}, "injection_attempts is missing: expected a number"),
    ({"injection_attempts": None}, "injection_attempts is missing: expected a number"),
    ({"injection_type": ...}, "injection_type is missing: expected count or percentage"),
    ({"hdf5_file": ...}, "hdf5_file is missing: expected the path of a checkpoint"),
    ({"hdf5_file": ["a"]}, "hdf5_file: expected the path of a checkpoint, found a list"),
    ({"injection_type": "percent"}, "injection_type: expected count or percentage, found 'percent'"),
    ({"injection_attempts": 0}, "injection_attempts: expected a whole number from 1 on, found 0"),
    ({"injection_attempts": -3}, "injection_attempts: expected a whole number from 1 on, found -3"),
    ({"injection_attempts": 2.5}, "injection_attempts: expected a whole number from 1 on, found 2.5"),
    (
        {"injection_attempts": "many"},
        "injection_attempts: expected a number, of faults or of percent, found 'many'",
    ),
    ({"injection_attempts": True}, "injection_attempts: expected a number, of faults or of percent, found True"),
    ({"injection_attempts": 10**5000}, "of percent, found a huge number"),
    (
        {"injection_type": "percentage", "injection_attempts": 101},
        "injection_attempts: expected percent, above 0 and up to 100, found 101",
    ),
    (
        {"injection_type": "percentage", "injection_attempts": 0},
        "injection_attempts: expected percent, above 0 and up to 100, found 0",
    ),
    ({"injection_probability": 1.5}, "injection_probability: expected a number from 0 to 1, found 1.5"),
    ({"injection_probability": "nan"}, "injection_probability: expected a number from 0 to 1, found 'nan'"),
    ({"float_precision": 8}, "float_precision: expected 16, 32, 64 or auto, found 8"),
    ({"float_precision": {"a": 1}}, "float_precision: expected 16, 32, 64 or auto, found a table"),
    ({"corruption_mode": "flip"}, "corruption_mode: expected bit_mask, bit_range or scaling_factor, found 'flip'"),
    (
        {"bit_mask": "101", "scaling_factor": 2},
        "corruption_mode: expected one kind of corruption, found bit_mask and scaling_factor",
    ),
    (
        {"bit_mask": "101", "first_bit": 1, "last_bit": 3},
        "corruption_mode: expected one kind of corruption, found bit_mask and bit_range",
    ),
    (
        {"corruption_mode": "bit_range", "scaling_factor": 2},
        "corruption_mode: expected one kind of corruption, found bit_range and scaling_factor",
    ),
    ({"corruption_mode": "bit_mask"}, "bit_mask is missing: expected up to 64 zeros and ones"),
    ({"corruption_mode": "scaling_factor"}, "scaling_factor is missing: expected a finite number"),
    ({"first_bit": 5, "last_bit": 3}, "first_bit: expected at most last_bit, which is 3, found 5"),
    ({"first_bit": 0, "last_bit": 32}, "last_bit: expected a bit below 32, as float_precision is 32, found 32"),
    ({"first_bit": 0, "last_bit": 64}, "last_bit: expected a bit from 0 (the sign) to 63, found 64"),
    ({"first_bit": -1, "last_bit": 3}, "first_bit: expected a bit from 0 (the sign) to 63, found -1"),
    ({"first_bit": 1.5, "last_bit": 3}, "first_bit: expected a bit from 0 (the sign) to 63, found 1.5"),
    ({"first_bit": 1}, "last_bit is missing: expected first_bit and last_bit, or neither"),
    ({"last_bit": 1}, "first_bit is missing: expected first_bit and last_bit, or neither"),
    ({"bit_mask": "1" * 17, "float_precision": 16}, "bit_mask: expected at most the 16 bits of float_precision"),
    ({"bit_mask": "000"}, "with at least one 1, found '000'"),
    ({"bit_mask": ""}, "with at least one 1, found ''"),
    ({"bit_mask": "10a"}, "with at least one 1, found '10a'"),
    ({"scaling_factor": float("inf")}, "scaling_factor: expected a finite number, found inf"),
    ({"scaling_factor": 10**400}, "scaling_factor: expected a finite number, found a huge number"),
    ({"burst": 0}, "burst: expected a number of bits from 1 to 64, found 0"),
    ({"burst": 4, "first_bit": 1, "last_bit": 3}, "burst: expected at most 3, the bits of the range, found 4"),
    ({"burst": 2, "bit_mask": "101"}, "burst: expected at most 1, as corruption_mode is bit_mask, found 2"),
    ({"allow_NaN_values": "False"}, "allow_NaN_values: expected true or false, found 'False'"),
    ({"use_random_locations": 1}, "use_random_locations: expected true or false, found 1"),
    (
        {"allow_sign_change": True, "first_bit": 4, "last_bit": 6},
        "allow_sign_change: expected false, first_bit 0 or 1, or a single bit, found the sign and bits 4 to 6",
    ),
    ({"use_random_locations": False}, "locations_to_corrupt is missing: expected a list of names"),
    ({"use_random_locations": ...}, "or use_random_locations: true"),
    ({"locations_to_corrupt": "/conv1"}, "locations_to_corrupt: expected a list of names"),
    ({"locations_to_corrupt": ["/conv1", 3]}, "locations_to_corrupt: expected a list of names"),
    ({"locations_to_corrupt": [""]}, "locations_to_corrupt: expected a list of names"),
    ({"log_file_path": 3}, "log_file_path: expected a path, found 3"),
    ({"save_injection_sequence": True}, "save_injection_sequence is not served: "),
    ({"injection_sequence_path": "s.json"}, "evergrad replay repeats it"),
    ({"seed": -1}, "seed: expected a whole number from 0 to 2**128 − 1, found -1"),
    ({"seed": 1 << 128}, "seed: expected a whole number from 0 to 2**128 − 1, found a huge number"),
]


def test_a_wrong_value_is_one_line_with_the_setting_and_what_was_expected() -> None:
    for changes, line in WRONG_VALUES:
        settings = {key: value for key, value in {**COUNT, **changes}.items() if value != ...}
        said = refusal(partial(PublishedSettings.from_mapping, settings))
        assert line in said, f"expected {line!r}, found {said!r}"
        assert "\n" not in said, said


@pytest.mark.parametrize("ending", WRITERS)
def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, WRITERS[ending](COUNT | {"injection_typ": "count"}), ending)
    with pytest.raises(UsageError, match=r"settings\.\w+: unknown setting 'injection_typ'. Did you mean 'injection_t"):
        PublishedSettings.load(path)


@pytest.mark.parametrize(
    "value",
    [
        '!!python/object/apply:os.system ["touch {0}"]',
        '!!python/object/new:os.system ["touch {0}"]',
        "!!python/name:os.system",
        '!!python/object/apply:subprocess.check_call [["touch", "{0}"]]',
    ],
)
def test_a_hostile_yaml_file_is_refused_and_not_executed(tmp_path: Path, value: str) -> None:
    made = tmp_path / "made"
    path = written(tmp_path, f"hdf5_file: {value.format(made)}\n")
    with pytest.raises(DamagedFile, match=r"is not YAML, line 1: .*python/"):
        PublishedSettings.load(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (".yaml", "hdf5_file: [a"),
        (".yaml", "a: 1\n---\nb: 2\n"),
        (".yaml", "seed: !!int ''"),
        (".yaml", "seed: !!bool x"),
        (".yaml", "seed: !!timestamp x"),
        (".yaml", "seed: 2001-99-99"),
        (".yaml", "- a\n- b\n"),
        (".yaml", ""),
        (".yaml", "just words"),
        (".yaml", b"\xff\xfe\x00"),
        (".yaml", "a: \x07"),
        (".yaml", "[" * 100_000),
        (".yaml", "- " * 5_000),
        (".yaml", "seed: " + "1:1" * 200_000),
        (".yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"),
        (".yaml", "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n"),
        (".toml", "hdf5_file = "),
        (".toml", b"\xff"),
        (".toml", "a = " + "[" * 100_000),
        (".json", "{"),
        (".json", "[1]"),
        (".json", "[" * 100_000),
        (".json", '{"seed": ' + "9" * 5000 + "}"),
    ],
)
def test_a_file_that_holds_no_settings_is_one_line(tmp_path: Path, ending: str, text: str | bytes) -> None:
    path = written(tmp_path, text, ending)
    with pytest.raises(DamagedFile, match=r"settings\.\w+: (is not|is no|holds no)") as caught:
        PublishedSettings.load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 600


@pytest.mark.parametrize("ending", WRITERS)
def test_a_file_too_large_for_settings_is_refused(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, WRITERS[ending](COUNT) + " \n" * (1 << 19), ending)
    with pytest.raises(UsageError, match="at most 1,048,576 bytes"):
        PublishedSettings.load(path)


def test_a_file_that_is_not_there_or_of_another_kind_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match=r"none\.yaml: cannot be read: no such file"):
        PublishedSettings.load(tmp_path / "none.yaml")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(FileAccessError, match="is a directory"):
        PublishedSettings.load(tmp_path / "folder.json")
    with pytest.raises(UsageError, match=r"expected settings that end in \.yaml, .*found '\.ini'"):
        PublishedSettings.load(written(tmp_path, "", ".ini"))


def test_without_pyyaml_yaml_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"pip install .*\[yaml\]"):
        PublishedSettings.load(written(tmp_path, json.dumps(COUNT)))
    assert PublishedSettings.load(written(tmp_path, json.dumps(COUNT), ".json")) == settings()


def test_whatever_is_wrong_with_a_setting_it_is_an_evergrad_error() -> None:
    odd = [
        None,
        True,
        -1,
        0,
        1,
        2.5,
        float("nan"),
        10**5000,
        "",
        "x",
        "\0",
        [],
        [[]],
        {},
        {"a": {}},
        {1},
        b"x",
        object(),
    ]
    for field in dataclasses.fields(PublishedSettings):
        for value in odd:
            try:
                settings(**{field.name: value}).to_inject()
            except EvergradError as error:
                assert len(str(error)) <= 600
