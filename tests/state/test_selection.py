"""Tensors are chosen by name, by what lies below a name, by glob, regular expression, role, or a list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import UnknownTensor, UsageError
from evergrad.records import Role, TensorInfo
from evergrad.state import role_of, select

NAMES = [
    "model/conv1.weight",
    "model/layer1.0.conv1.weight",
    "model/layer1.0.bn1.running_mean",
    "model/layer10.0.weight",
    "model/fc.weight",
    "model/fc.bias",
    "optimizer/state/0/exp_avg",
    "optimizer/state/0/step",
    "a[0]*",
]
TENSORS = {name: TensorInfo(name, (2,), DType.FLOAT32, role_of(name), 8) for name in NAMES}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, NAMES),
        ("model/fc.weight", ["model/fc.weight"]),
        ("model/fc", ["model/fc.weight", "model/fc.bias"]),
        ("model/layer1", ["model/layer1.0.conv1.weight", "model/layer1.0.bn1.running_mean"]),
        ("optimizer/", ["optimizer/state/0/exp_avg", "optimizer/state/0/step"]),
        ("model/**.weight", [n for n in NAMES if n.startswith("model/") and n.endswith(".weight")]),
        ("model/*.bias", ["model/fc.bias"]),
        ("*/fc.*", ["model/fc.weight", "model/fc.bias"]),
        ("**/exp_avg", ["optimizer/state/0/exp_avg"]),
        ("optimizer/*", []),
        ("model/f?.bias", ["model/fc.bias"]),
        ("model/[ef]c.bias", ["model/fc.bias"]),
        ("model/[!e]c.bias", ["model/fc.bias"]),
        ("a[0]*", ["a[0]*"]),
        ("re:conv\\d", ["model/conv1.weight", "model/layer1.0.conv1.weight"]),
        (re.compile("bias$"), ["model/fc.bias"]),
        ("role:buffer", ["model/layer1.0.bn1.running_mean"]),
        (Role.OPTIMIZER, ["optimizer/state/0/exp_avg", "optimizer/state/0/step"]),
        (["model/fc.bias", "role:optimizer", "model/fc"], [*NAMES[4:8]]),
    ],
)
def test_where(where: object, expected: list[str]) -> None:
    if not expected:
        with pytest.raises(UnknownTensor):
            select(TENSORS, where)
    else:
        assert select(TENSORS, where) == expected


def test_a_name_that_matches_nothing_suggests_the_nearest() -> None:
    with pytest.raises(UnknownTensor, match=r"unknown tensor 'model/fc.wieght'. Did you mean 'model/fc.weight'"):
        select(TENSORS, "model/fc.wieght")
    with pytest.raises(UnknownTensor, match=r"Did you mean 'model/fc.weight'"):
        select(TENSORS, "fc.weight")


@pytest.mark.parametrize("where", [[], "re:(", "model/[z-a]*", "role:weights", "role:other", ["model/fc", "nope"]])
def test_what_makes_no_sense_is_refused_in_one_line(where: object) -> None:
    with pytest.raises(UsageError) as caught:
        select(TENSORS, where)
    assert "\n" not in str(caught.value)


ROLES = [
    ("fc.weight", "model"),
    ("state_dict/net.0.weight", "model"),
    ("model_state_dict/bn.running_var", "buffer"),
    ("bn1.num_batches_tracked", "buffer"),
    ("optimizer_states/0/state/3/exp_avg", "optimizer"),
    ("optimizer.pt/state/3/step", "optimizer"),
    ("state/0/momentum_buffer", "optimizer"),
    ("optimizer.state.0.exp_avg", "optimizer"),
    ("optimizer_weights/adam/sequential_conv_kernel_momentum", "optimizer"),
    ("conv1/W/m", "optimizer"),
    ("conv1/W", "model"),
    ("layers/conv2d/vars/0", "model"),
    ("optimizer/vars/3", "optimizer"),
    ("rng_state.pth/cpu", "other"),
    ("lr_schedulers/0/last", "other"),
    ("callbacks/ModelCheckpoint/best_model_score", "other"),
    ("_modules/fc/_parameters/weight", "model"),
    ("_modules/bn/_buffers/scale", "buffer"),
    ("config/class_weights", "other"),
    ("ema/blocks.0.weight", "model"),
    ("model.safetensors/transformer.h.0.ln_1.weight", "model"),
]


def test_roles_follow_the_names_that_frameworks_use() -> None:
    for path, role in ROLES:
        assert role_of(path).value == role, path


PROGRESS = ("best_val_loss", "val_loss", "valLoss", "bestLoss", "best", "best_acc1", "best_fitness", "top1_acc", "loss")
PROGRESS += ("perplexity", "train/loss", "metrics.val_loss", "lr", "learning_rate", "loss_scale", "iter_num", "wer")
LEARNT = ("logit_scale", "temperature", "alpha", "log_sigma", "model/loss", "module.score.weight", "gamma", "gloss")


@pytest.mark.parametrize("name", PROGRESS)
def test_a_number_that_tells_how_training_goes_is_no_parameter(name: str) -> None:
    assert role_of(name, rank=0) is Role.OTHER


@pytest.mark.parametrize("name", LEARNT)
def test_a_learnt_number_is_a_parameter(name: str) -> None:
    assert role_of(name, rank=0) is Role.MODEL


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("train_losses", "other"),
        ("val_acc", "other"),
        ("loss_weights", "model"),
        ("loss_fn.weight", "model"),
        ("blocks.0.att.time_decay", "model"),
        ("error_head.bias", "model"),
        ("loss.error", "model"),
        ("optimizer/state/0/exp_avg", "optimizer"),
    ],
)
def test_curves_are_told_by_their_last_word_and_parameters_stay_parameters(name: str, role: str) -> None:
    assert role_of(name, rank=1).value == role


@pytest.mark.parametrize("ending", [".pt", ".npz", ".safetensors"])
def test_no_fault_in_the_model_hits_the_best_loss(tmp_path: Path, ending: str) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "best_val_loss": torch.tensor(1.5)}, tmp_path / "a.pt")
    path = tmp_path / f"b{ending}"
    eg.convert(tmp_path / "a.pt", path)
    with eg.open_checkpoint(path) as ck:
        assert {name: info.role.value for name, info in ck.tensors.items()} == {
            "model/w": "model",
            "best_val_loss": "other",
        }
    log = eg.inject(path, eg.BitFlip(), count=2, where="role:model", seed=1, dry_run=True)
    assert {fault.tensor for fault in log.faults()} == {"model/w"}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("modle/**", "model/**"),
        ("modle/*.wieght", "model/*.weight"),
        ("**/exp_agv", "**/exp_avg"),
        ("optimiser/sate/*/step", "optimizer/state/*/step"),
        ("modle", "model"),
    ],
)
def test_a_pattern_that_finds_nothing_is_answered_by_the_nearest_one_that_does(asked: str, meant: str) -> None:
    with pytest.raises(UnknownTensor, match=re.escape(f"unknown tensor {asked!r}. Did you mean {meant!r}?")):
        select(TENSORS, asked)
    assert select(TENSORS, meant)


def test_a_pattern_like_no_name_gets_no_suggestion() -> None:
    with pytest.raises(UnknownTensor, match="There are 9, the first is"):
        select(TENSORS, "zzzz/**")
