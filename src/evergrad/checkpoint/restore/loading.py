"""Putting a verified shard into a live state, in place.

`prepare` compares the two and touches nothing; `Loading.apply` then fills, sets and calls.

| in the live state          | what happens to it                                                                |
|----------------------------|-----------------------------------------------------------------------------------|
| tensor, array              | filled in place                                                                   |
| module                     | parameters and buffers are filled in place                                        |
| module with a say in it    | `load_state_dict` with new tensors: it has an override, hooks or extra state      |
| optimizer                  | `load_state_dict` with its own tensors filled, or new ones if it has none yet     |
| other with `load_state_dict` | that is called with new tensors, and judges for itself                          |
| anything else: a value     | replaced in the dict or list that holds it; in a tuple, by a new tuple            |

Tensors, arrays and objects have to be the same on both sides. Values follow the checkpoint:

- A container that holds nothing but values, on both sides, is one value: it gets the checkpoint's content and
  keeps its identity. What it had gathered since (a history, metrics by step) is gone, as a rollback wants it.
- In a dict that also holds tensors or objects, and in the outermost one, a single value that only the checkpoint has
  is added; a value that only the live dict has is a mismatch, and so is a container that only the checkpoint
  has: it may be the state of an object that was forgotten.
"""

from __future__ import annotations

from evergrad.checkpoint.restore.filling import Source, fill
from evergrad.checkpoint.restore.load_plan import LoadPlan, Mismatch
from evergrad.checkpoint.restore.pairing import pair
from evergrad.dtypes import DType
from evergrad.errors import StateError, nearest
from evergrad.records import TensorInfo
from evergrad.state import Where, select
from evergrad.state.selection import tensor_info


class Loading:
    """What will be done to a state; made by `prepare`, while nothing has been touched yet."""

    skipped: tuple[str, ...]
    """With `strict=False`, what is left as it is, one line each."""

    def __init__(self, source: Source, plan: LoadPlan, skipped: tuple[str, ...]) -> None:
        self._source = source
        self._plan = plan
        self.skipped = skipped

    def apply(self) -> None:
        """Load: first tensors, then values, and last, in the order of the state, the objects that load themselves.

        Only the code of those objects can fail here; the `StateError` names the object, and the rest is loaded.
        """
        fill(self._source, self._plan.fills)
        for setting in self._plan.settings:
            setting()
        for call in self._plan.calls:
            call.run(self._source)


def prepare(state: object, source: Source, *, strict: bool = True, where: Where | None = None) -> Loading:
    """Find out how to load a shard into a live state, and everything that does not fit, before touching it.

    Raises `StateError` for the first of the mismatches: a path that only one side has, another shape, dtype or
    kind. With `strict=False`, what fits is loaded and the rest is listed in `skipped`.

    With `where` (as in `select`), only the tensors it chooses are loaded, and only they have to fit. An object that
    loads itself is loaded, with its values, if all of its tensors are chosen, and is a mismatch if only some are (a
    module can be loaded in part). Objects without tensors and values in containers are left alone.
    """
    plan = pair(state, source, strict=strict)
    if where is not None:
        plan.restrict(frozenset(select(_selectable(source, plan), where)))
    plan.settle_shared_memory(source)
    if not plan.mismatches:
        return Loading(source, plan, ())
    if strict:
        raise StateError(_message(plan.mismatches, source))
    skipped = tuple(str(mismatch) for mismatch in plan.mismatches)
    plan.drop_mismatches()
    return Loading(source, plan, skipped)


def _selectable(source: Source, plan: LoadPlan) -> dict[str, TensorInfo]:
    """What `where` can choose from: also what only the live state has, to be missed if it is chosen."""
    roles, found = source.skeleton.roles, dict(source.shapes)
    for mismatch in plan.mismatches:
        for path in sorted(mismatch.tensors):
            found.setdefault(path, (DType.FLOAT32, (0,)))
    return {path: tensor_info(path, shape, dtype, roles) for path, (dtype, shape) in found.items()}


def _message(mismatches: list[Mismatch], source: Source) -> str:
    first = mismatches[0]
    line = str(first)
    if first.missing:
        # A misspelt name is missing on one side and unexpected on the other.
        known = [mismatch.path for mismatch in mismatches if mismatch.unexpected]
        if close := nearest(first.path, known) or nearest(first.path, source.shapes):
            line += ". Did you mean " + " or ".join(repr(name) for name in close) + "?"
    if len(mismatches) > 1:
        line += f" (and {len(mismatches) - 1} more)"
    return f"{line}{'' if line.endswith('?') else '.'} strict=False loads what fits"
