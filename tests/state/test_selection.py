"""Tensors are chosen by name, by what lies below a name, by glob, regular expression, role, or a list."""

from __future__ import annotations

import re

import pytest

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


@pytest.mark.parametrize(
    ("path", "role"),
    [
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
    ],
)
def test_roles_follow_the_names_that_frameworks_use(path: str, role: str) -> None:
    assert role_of(path).value == role
