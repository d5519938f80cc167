"""What a tensor is for, told from its path.

A file does not say which tensors are buffers or optimizer state, so this goes by the names that PyTorch,
Lightning, Transformers, DeepSpeed and Keras use. Where a live module or optimizer is at hand, `flatten` asks
it instead and records the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from evergrad.dtypes import DType
from evergrad.records import Role, TensorInfo
from evergrad.state.paths import split

_OPTIMIZER_KEY = re.compile(
    r"(^|_)optim(izer)?s?(_weights|_states?)?(_dict)?s?(\.(pt|bin|pth))?$|optim_states\.pt$", re.I
)
_OPTIMIZER_SLOT = re.compile(
    r"^(exp_avg(_sq|_diff)?|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta|"
    r"prev(_grad)?|step_size|sum|ax|mu|eta|step|row_var|col_var|variance|prev_grad|prev_loss|d|t|al|ro)$"
)
_OPTIMIZER_PARENT = re.compile(r"(^|/)state/[^/]+$")
_DOTTED_OPTIMIZER = re.compile(r"(^|[/.])optim(izer)?s?\.(state|param_groups)\.")  # as DCP flattens it
_CHAINER_SLOT = re.compile(r"(^|/)(W|b|gamma|beta)/[mvthsg]$")  # Adam's and others', below each parameter
_MODEL_KEY = re.compile(
    r"(^|_)(model|module|net|network|generator|discriminator|encoder|decoder|backbone|params|weights)"
    r"(_state)?(_dict)?(\.(safetensors|bin|pt|pth))?$|^state_dict$|^model_weights$",
    re.I,
)
_OTHER_KEY = re.compile(
    r"(^|_)(rng|scheduler|schedulers|lr_schedulers?|scaler|callbacks|loops|epoch|step|iteration|args|hparams|"
    r"hyper_parameters|sampler|dataloader|metrics?|history)(_states?)?(_dict)?(_\d+)?(\.(pt|pth|bin))?$",
    re.I,
)
# Measures and progress of a training, which scripts keep beside the model: best_val_loss, top1_acc, lr.
_MEASURES = frozenset({
    "loss", "losses", "acc", "acc1", "acc5", "accuracy", "accuracies", "err", "error", "errors", "perplexity",
    "ppl", "nll", "mse", "rmse", "mae", "auc", "auroc", "f1", "bleu", "psnr", "ssim", "iou", "miou", "wer", "cer",
    "best", "epoch", "epochs", "iter", "iters", "iteration", "lr", "seed", "elapsed",
})  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
_PARAMETER = re.compile(r"\.|^(weight|bias|kernel|gamma|beta|embeddings?|scale|W|b)(:0)?$")
_BUFFER = re.compile(
    r"(^|[./])(running_mean|running_var|num_batches_tracked|moving_mean|moving_variance|position_ids|inv_freq|"
    r"masked_bias|attn\.bias_mask|avg_mean|avg_var)$"
)
_DOT_WITHIN = re.compile(r"\.(pt|pth|bin|bias_mask)$", re.I)


def role_of(path: str, *, is_float: bool = True, rank: int = 1) -> Role:
    """The role of the tensor at a path.

    >>> role_of("optimizer/state/0/exp_avg").value, role_of("bn.running_mean").value, role_of("fc.weight").value
    ('optimizer', 'buffer', 'model')
    """
    parent, _, last = path.rpartition("/")
    if not parent and "optim" not in last:
        # A plain state dict, perhaps of many layers: the last part of a dotted name says as much as the whole of it.
        told = _top_level_role(last[last.rfind(".") :] if "." in last else last, is_float, rank == 0)
        if told is not None:
            return told
    return _role(parent, last, is_float, rank == 0)


@lru_cache(maxsize=4096)
def _top_level_role(end: str, is_float: bool, scalar: bool) -> Role | None:
    """The role of a tensor that no container holds, by the end of its name; None if a dot within may matter."""
    return None if _DOT_WITHIN.search(end) else _role("", end, is_float, scalar)


def _role(parent: str, last: str, is_float: bool, scalar: bool) -> Role:
    container = _container_role(parent) if parent else None
    if container in (Role.OPTIMIZER, Role.OTHER):
        return container
    # A bare optimizer.state_dict(): state/<parameter>/<slot>.
    if parent and _OPTIMIZER_SLOT.match(last) and _OPTIMIZER_PARENT.search(parent):
        return Role.OPTIMIZER
    if parent and _CHAINER_SLOT.search(f"{parent}/{last}"):
        return Role.OPTIMIZER
    if "optim" in last and _DOTTED_OPTIMIZER.search(last):
        return Role.OPTIMIZER
    if _BUFFER.search(last) or parent.endswith("_buffers"):
        return Role.BUFFER
    if container is Role.MODEL:
        return Role.MODEL
    if _OTHER_KEY.search(last) or (scalar and not is_float) or _is_measure(last, scalar):
        return Role.OTHER
    # A plain state dict has one level; in a container that says nothing, a name like layer1.0.weight still tells.
    return Role.MODEL if not parent or _PARAMETER.search(last) else Role.OTHER


def _is_measure(name: str, scalar: bool) -> bool:
    """True if a name outside of any model says a measure: a number by any of its words, a curve by its last one."""
    *above, last = name.split(".")
    words = [word.lower() for word in _WORD.findall(last)]
    if scalar:
        return words == ["learning", "rate"] or not _MEASURES.isdisjoint(words)
    return not above and bool(words) and words[-1] in _MEASURES


def tensor_info(path: str, shape: tuple[int, ...], dtype: DType, roles: Mapping[str, Role] | None = None) -> TensorInfo:
    """What a tensor is, with the role that is known of it or else the one that its path tells."""
    role = (roles or {}).get(path) or role_of(path, is_float=dtype.is_float, rank=len(shape))
    return TensorInfo(path, shape, dtype, role, math.prod(shape) * dtype.itemsize)


@lru_cache(maxsize=4096)
def _container_role(parent: str) -> Role | None:
    """What the keys above a tensor say, if they say anything."""
    keys = split(parent)
    if any(_OPTIMIZER_KEY.search(key) for key in keys):
        return Role.OPTIMIZER
    if any(_OTHER_KEY.search(key) for key in keys):
        return Role.OTHER
    if "_parameters" in keys or keys[-1] == "vars" or any(_MODEL_KEY.search(key) for key in keys):
        return Role.MODEL
    return None
