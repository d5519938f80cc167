"""Choosing tensors by name: exact, everything below a name, glob, regular expression, role, or a list of these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypeAlias

from evergrad.errors import UnknownTensor, UsageError, nearest
from evergrad.records import Role, TensorInfo
from evergrad.wording import meant

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
            raise nothing(tensors, item)
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
        return select_one(tensors, _role(item.removeprefix("role:")))
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


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise UsageError(f"unknown role {text!r}.{meant(text, [*Role])} Roles are {roles}.") from None


def nothing(tensors: Mapping[str, TensorInfo], item: str | re.Pattern[str] | Role) -> UsageError:
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
