"""Choosing tensors by name: exact, everything below a name, glob, regular expression, role, or a list of these."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TypeAlias

from evergrad.dtypes import DType
from evergrad.errors import UnknownTensor, UsageError, nearest
from evergrad.records import Role, TensorInfo
from evergrad.state.paths import split
from evergrad.wording import did_you_mean

Where: TypeAlias = "str | re.Pattern[str] | Role | Iterable[str | re.Pattern[str] | Role] | None"


def select(tensors: Mapping[str, TensorInfo], where: Where = None) -> list[str]:
    """The names that `where` chooses, in file order, each once.

    | `where`                     | chooses                                                           |
    |-----------------------------|-------------------------------------------------------------------|
    | `None`                      | everything                                                        |
    | `"model/fc"`                | the tensor of that name, or all below it (`model/fc.weight`, `model/fc/…`) |
    | `"model/**.weight"`         | a glob: `*` and `?` stay within a segment, `**` crosses `/`       |
    | `"re:conv\\d+"`, `re.compile(…)` | names in which the expression is found                        |
    | `"role:optimizer"`, `Role.OPTIMIZER` | tensors of that role                                     |
    | a list                      | what any of its items chooses                                     |

    Raises `UnknownTensor`, with the nearest names, for an item that chooses nothing.
    """
    if where is None:
        return list(tensors)
    chosen: set[str] = set()
    for item in items_of_where(where):
        found = select_one(tensors, item)
        if not found:
            raise no_match_error(tensors, item)
        chosen.update(found)
    return [name for name in tensors if name in chosen]


def items_of_where(where: Where) -> list[str | re.Pattern[str] | Role]:
    """The items of a selection that is not None; `UsageError` if there is none."""
    items = [where] if isinstance(where, (str, re.Pattern)) else list(where or ())
    if not items:
        raise UsageError("an empty list selects no tensor: name at least one, or leave it out for all")
    return items


def select_one(tensors: Mapping[str, TensorInfo], item: str | re.Pattern[str] | Role) -> list[str]:
    """Return the names chosen by one item of a selection; an empty list if there are none."""
    if isinstance(item, Role):
        return [name for name, info in tensors.items() if info.role is item]
    if isinstance(item, re.Pattern):
        return [name for name in tensors if item.search(name)]
    if item in tensors:  # an exact name wins, even one with * or [ in it
        return [item]
    if item.startswith("role:"):
        return select_one(tensors, _role_item(item.removeprefix("role:")))
    if item.startswith("re:"):
        try:
            return select_one(tensors, re.compile(item.removeprefix("re:")))
        except re.error as error:
            raise UsageError(f"{item!r} is not a regular expression: {error}") from None
    if any(char in item for char in "*?["):
        try:
            matches = re.compile(_glob_to_regex(item)).fullmatch
        except re.error as error:
            raise UsageError(f"{item!r} is not a glob: {error}") from None
        return [name for name in tensors if matches(name)]
    below = item.rstrip("/")
    return [name for name in tensors if name.startswith((f"{below}/", f"{below}."))]


def _role_item(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise UsageError(f"unknown role {text!r}.{did_you_mean(text, [*Role])} Roles are {roles}.") from None


def no_match_error(tensors: Mapping[str, TensorInfo], item: str | re.Pattern[str] | Role) -> UsageError:
    """The error for an item that chooses nothing, with the nearest names."""
    if isinstance(item, Role) or (isinstance(item, str) and item.startswith("role:")):
        roles = sorted({info.role.value for info in tensors.values()})
        return UsageError(
            f"no tensor has the role {str(item).removeprefix('role:')!r}. Here: {', '.join(roles) or 'none'}."
        )
    if isinstance(item, re.Pattern) or item.startswith("re:"):
        text = item.pattern if isinstance(item, re.Pattern) else item.removeprefix("re:")
        return UnknownTensor(text, tensors, what="tensor by regular expression")
    is_glob = any(char in item for char in "*?[")
    return UnknownTensor(item, tensors, near="" if not is_glob and nearest(item, tensors) else _near(tensors, item))


def _near(tensors: Mapping[str, TensorInfo], item: str) -> str:
    """The pattern with each part that no name has replaced by the nearest one that some have, if that finds tensors."""
    for ends, cuts in (("/", r"(/)"), ("/.", r"([/.*?\[\]]+)")):  # whole segments first, then the words in them
        known = sorted({part for name in tensors for part in re.split(f"[{ends}]", name)} - {""})
        parts = re.split(cuts, item[:200])
        for place in range(0, len(parts), 2):
            if parts[place] and parts[place] not in known and not any(char in parts[place] for char in "*?["):
                parts[place] = next(iter(nearest(parts[place], known, count=1)), parts[place])
        found = "".join(parts)
        with suppress(UsageError):
            if found != item and select_one(tensors, found):
                return found
    return ""


def _glob_to_regex(pattern: str) -> str:
    """`**/` is any number of segments, `**` any characters, `*` and `?` anything but `/`."""
    out: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            out.append("(?:.*/)?")
            position += 3
        elif pattern.startswith("**", position):
            out.append(".*")
            position += 2
        elif pattern[position] == "*":
            out.append("[^/]*")
            position += 1
        elif pattern[position] == "?":
            out.append("[^/]")
            position += 1
        elif pattern[position] == "[" and (end := pattern.find("]", position + 2)) > 0:
            body = pattern[position + 1 : end].replace("\\", r"\\")
            out.append(f"[^{body[1:]}]" if body[0] in "!^" else f"[{body}]")
            position = end + 1
        else:
            out.append(re.escape(pattern[position]))
            position += 1
    return "".join(out)


# What a tensor is for, told from its path.
#
# A file does not say which tensors are buffers or optimizer state, so this goes by the names that PyTorch, Lightning,
# Transformers, DeepSpeed and Keras use. Where a live module or optimizer is at hand, `flatten` asks it instead and
# records the answer.

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
    return _path_role(parent, last, is_float, rank == 0)


@lru_cache(maxsize=4096)
def _top_level_role(end: str, is_float: bool, scalar: bool) -> Role | None:
    """The role of a tensor that no container holds, by the end of its name; None if a dot within may matter."""
    return None if _DOT_WITHIN.search(end) else _path_role("", end, is_float, scalar)


def _path_role(parent: str, last: str, is_float: bool, scalar: bool) -> Role:
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
