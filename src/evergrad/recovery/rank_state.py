"""What a process trains: its model, its optimizers, and whatever else a joiner or a rollback must bring along."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.recovery.job_checkpoints import one_or_numbered
from evergrad.recovery.local_state import Snapshot, is_scaler
from evergrad.recovery.optimizer_overlap import OptimizerOverlap, refuse_overlap
from evergrad.state import flatten, unflatten

# The optimizers of a job: found before the script hands them over, given their state, stepped by a scaler if any.
#
# A script shows its optimizers in its first `job.step`. That is too late for a process that joins, or that restores a
# checkpoint: by then the script has set hyper-parameters for the step (`group["lr"] = …`), and loading the state
# would undo that. So a process looks for optimizers of the wrapped model's parameters when it arrives, and loads
# their state before the script's code runs. One that is not found so (because it is made later, or because two fit)
# is loaded in `job.step`, and what the script has changed in it since then is kept.

_Hyper = dict[str, Any]
"""A parameter group without its parameters."""


class Optimizers:
    """The optimizers of this process.

    One that is overlapped with backward is known from `job.wrap` on, and has done its work when `job.step` is called.
    """

    def __init__(self) -> None:
        self.known: tuple[Optimizer, ...] = ()
        self.overlap: OptimizerOverlap | None = None
        self._found: list[Optimizer] = []
        """The optimizers that were found when this process arrived."""
        self._is_assumed = False
        """True if `known` was found rather than given to `job.step`."""
        self._owed: list[Any] = []
        self._before: dict[int, list[_Hyper]] = {}
        """The hyper-parameters of those that were found, when a state was owed to them; by the identity of groups."""
        self._noted: list[tuple[dict[str, Any], _Hyper]] = []

    def discover(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for the optimizers of these parameters."""
        self._found = find_optimizers(parameters)

    def adopt(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Take the optimizers that the script gives to `job.step`, and load what they are owed."""
        if self.known and self.known != optimizers:
            if self.overlap is not None:
                raise UsageError(
                    f"job.step: with overlap=True there is one optimizer, that of job.wrap; found {len(optimizers)}, "
                    "or another one. Put all parameters into its groups, or leave overlap=True out"
                )
            if not self._is_assumed:
                raise UsageError("job.step: other optimizers than before. Give it all of them, each time")
            if [id(one.param_groups) for one in self.known] != [id(one.param_groups) for one in optimizers]:
                self._owed = self.states()  # those that were found are not the ones that are used
            self.known = ()
        if not self.known and (greedy := next((one for one in optimizers if _needs_closure(one)), None)):
            raise UsageError(
                f"job.step: {type(greedy).__qualname__} evaluates the model as often as it likes within a step, which "
                "cannot be taken back when a rank is lost. Use an optimizer that steps without a closure"
            )
        self.known, self._is_assumed = optimizers, False
        self._pay()

    def load_states(self, states: Iterable[Any]) -> None:
        """Load these states: at once if the optimizers are known or can be found, else when they are met."""
        self._owed = list(states)
        if not self.known:
            self._before = {id(one.param_groups): [_hyper(group) for group in one.param_groups] for one in self._found}
            self.known = _matched(self._owed, self._found)
            self._is_assumed = bool(self.known)
        if self.known:
            self._before = {}
            self._pay(keep_changes=False)

    @property
    def has_pending_states(self) -> bool:
        """True if a state waits for optimizers that have not been met."""
        return bool(self._owed)

    def states(self) -> list[Any]:
        """The states that a joiner gets: those of the optimizers, or those that they are still owed."""
        return self._owed or [one.state_dict() for one in self.known]

    def groups(self) -> list[Mapping[str, Any]]:
        """The parameter groups that a step would be made with: those of the optimizers, or those they are owed."""
        if self._owed:
            return [group for state in self._owed for group in state["param_groups"]]
        return [group for one in self.known for group in one.param_groups]

    def note_hyper_parameters(self) -> None:
        """Copy the hyper-parameters at the beginning of a step."""
        groups = [group for one in self.known or self._found for group in one.param_groups]
        self._noted = [(group, _hyper(group)) for group in groups]

    def put_back_hyper_parameters(self) -> None:
        """Undo what the script has changed since then: the step is done again."""
        for group, noted in self._noted:
            for key in [key for key in group if key != "params" and key not in noted]:
                del group[key]
            for key, value in noted.items():
                now = group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == value.shape:
                    with torch.no_grad():
                        now.copy_(value)  # the same tensor: a captured graph may read it
                else:
                    group[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def apply(self, tracked: Mapping[str, Any], factor: float) -> bool:
        """Step them all, at this share of their learning rate; False if a scaler found gradients that overflowed."""
        if self.overlap is not None:
            refuse_overlap(self.overlap.optimizer, tracked=tracked)
            self.overlap.finish()
            return True
        groups = [group for optimizer in self.known for group in optimizer.param_groups] if factor != 1 else []
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        scaler = next((thing for thing in tracked.values() if is_scaler(thing) and thing.is_enabled()), None)
        was_applied = True
        for optimizer in self.known:
            if scaler is None:
                optimizer.step()
                continue
            scaler.step(optimizer)
            found = scaler._found_inf_per_device(optimizer) if hasattr(scaler, "_found_inf_per_device") else {}
            was_applied &= not any(bool(value.item()) for value in found.values())
        if scaler is not None:
            scaler.update()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return was_applied

    def _pay(self, *, keep_changes: bool = True) -> None:
        optimizers, owed, self._owed = self.known, self._owed, []
        if owed and len(owed) != len(optimizers):
            raise UsageError(f"job.step: {len(optimizers)} optimizers, and the job has states of {len(owed)}")
        for optimizer, state in zip(optimizers, owed, strict=False):
            changed = self._changed(optimizer) if keep_changes else []
            optimizer.load_state_dict(state)
            for group, values in zip(optimizer.param_groups, changed, strict=False):
                group.update(values)

    def _changed(self, optimizer: Optimizer) -> list[_Hyper]:
        """The hyper-parameters that the script has set since this process arrived, by group.

        Of an optimizer that was made since then, those that are not its defaults.
        """
        before = self._before.get(id(optimizer.param_groups), [])
        found = []
        for number, group in enumerate(optimizer.param_groups):
            was = before[number] if number < len(before) else optimizer.defaults
            hyper = _hyper(group)
            found.append({key: value for key, value in hyper.items() if key in was and not _equal(value, was[key])})
        return found


def find_optimizers(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """All optimizers of this process that update any of these parameters, each once."""
    wanted = {id(parameter) for parameter in parameters}
    if not wanted:
        return []
    kinds: dict[type, bool] = {}
    found: dict[int, Optimizer] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which would ask proxies for their class
        if kind not in kinds:
            kinds[kind] = issubclass(kind, Optimizer)
        if not kinds[kind]:
            continue
        groups = getattr(thing, "param_groups", None)
        if not isinstance(groups, list):  # not initialised yet, or not any more
            continue
        # One that wraps another one shares its groups: the inner one is loaded, whichever is found first.
        if any(id(parameter) in wanted for group in groups for parameter in group["params"]):
            found.setdefault(id(groups), thing)
    return list(found.values())


def _matched(states: Sequence[Any], optimizers: Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """The optimizer that each state belongs to; nothing if that is not certain for every one of them."""
    chosen = []
    for state in states:
        fitting = [one for one in optimizers if _has_groups_of(state, one)]
        if len(fitting) > 1:
            fitting = [one for one in fitting if _has_shapes_of(state, one)]
        if len(fitting) != 1:
            return ()
        chosen += fitting
    return tuple(chosen) if len({id(one) for one in chosen}) == len(states) else ()


def _has_groups_of(state: Any, optimizer: Optimizer) -> bool:
    """True if a state has this optimizer's hyper-parameters, and as many parameters in each group."""
    saved, groups = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return False
    # Only the optimizer's own: a scheduler adds others (initial_lr).
    return all(
        optimizer.defaults.keys() & group.keys() <= found.keys() for group, found in zip(groups, saved, strict=True)
    )


def _has_shapes_of(state: Any, optimizer: Optimizer) -> bool:
    """True if the entries of a state have the shapes of this optimizer's parameters."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {number: parameter.shape for number, parameter in zip(numbers, parameters, strict=True)}
    return all(
        value.shape == shapes.get(number)
        for number, entry in state["state"].items()
        for value in (entry.values() if isinstance(entry, Mapping) else ())
        if isinstance(value, torch.Tensor) and value.dim()
    )


def _hyper(group: Mapping[str, Any]) -> _Hyper:
    """A copy of a group's hyper-parameters."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class _Held:
    """A copy of everything: what only this rank has, what all ranks have, and the optimizers' states."""

    own: Snapshot
    shared: Snapshot
    optimizers: list[Any]


@dataclass(slots=True)
class RankState:
    """The same on all ranks, but for buffers."""

    model: nn.Module | None = None
    optimizers: Optimizers = field(default_factory=Optimizers)
    tracked: dict[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    """What a step can change before it is applied, as it was at its beginning; None where nothing is ever redone."""
    _held: _Held | None = None

    def state(self) -> dict[str, Any]:
        """What a joiner gets of it."""
        return {
            "model": self._tensors(),
            "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
            "optimizers": self.optimizers.states(),
        }

    def load_state_of(self, state: Any) -> None:
        """Be what another rank has sent; `UsageError` if this process has built another model."""
        given: dict[str, torch.Tensor] = state["model"]
        mine = self._tensors()
        for name in dict.fromkeys([*given, *mine]):
            here, there = (f"shape {list(each[name].shape)}" if name in each else "missing" for each in (mine, given))
            if here != there:
                raise UsageError(
                    f"job.wrap: this process has built another model than the rank whose state it takes: {name} is "
                    f"{there} there and {here} here. Build the same model in every process"
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(given[name])
        for name, thing in self.tracked.items():
            if name in state["tracked"]:
                thing.load_state_dict(state["tracked"][name])
        self.optimizers.load_states(state["optimizers"])

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by their paths in a saved state."""
        known = self.optimizers.known
        rank_state: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        return flatten(rank_state | ({"optimizer": one_or_numbered(known)} if known else {})).tensors

    def discover_optimizers(self) -> None:
        """Find the optimizers of the model, before the script hands them over."""
        self.optimizers.discover(self.model.parameters() if self.model is not None else ())

    def hold_copy(self) -> None:
        """Copy everything, so that `put_in_place` undoes whatever the script does until then. Twice is fine."""
        if self._held is None:
            local_state = Snapshot(list(self.model.buffers()) if self.model is not None else [], device="cpu")
            shared = Snapshot(list(self.model.parameters()) if self.model is not None else [], device="cpu")
            local_state.capture({})
            shared.capture(self.tracked)
            # On the CPU: there may be no room for all of it a second time on a device.
            self._held = _Held(local_state, shared, [_on_cpu(state) for state in self.optimizers.states()])

    @property
    def has_copy(self) -> bool:
        """True if there is a copy that `put_in_place` would take."""
        return self._held is not None

    def restore_copy(self, *, local_state: bool = True) -> None:
        """Make everything what it was when `hold` was called, if it was; without `own` not generators and buffers."""
        if self._held is None:
            return
        self._held.shared.restore(self.tracked, randomness=False)
        self.optimizers.load_states(copy.deepcopy(self._held.optimizers))
        if local_state:
            self._held.own.restore({})

    def drop_copy(self) -> None:
        """Drop the copy that `hold` has made."""
        self._held = None

    def begin_step(self) -> None:
        """Note what a redo of the step that begins now puts back."""
        if self.snapshot is not None:
            self.snapshot.capture(self.tracked)
            self.optimizers.note_hyper_parameters()

    def undo_step(self) -> None:
        """Undo everything that the step under way has changed."""
        assert self.snapshot is not None, "nothing is ever redone here"
        self.snapshot.restore(self.tracked)
        self.optimizers.put_back_hyper_parameters()
        for optimizer in self.optimizers.known:
            optimizer.zero_grad(set_to_none=True)

    @property
    def scale(self) -> float | None:
        """By what a tracked gradient scaler has multiplied the gradients; None if there is none."""
        scaler = next((thing for thing in self.tracked.values() if is_scaler(thing) and thing.is_enabled()), None)
        return None if scaler is None else float(scaler.get_scale())

    def _tensors(self) -> dict[str, torch.Tensor]:
        if self.model is None:
            return {}
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


def _on_cpu(state: Any) -> Any:
    """A copy of an optimizer's state with its tensors on the CPU; `load_state_dict` moves them to their parameters."""
    flat = flatten(state)
    return unflatten({path: tensor.detach().cpu().clone() for path, tensor in flat.tensors.items()}, flat.skeleton)
