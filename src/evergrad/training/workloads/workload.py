"""A workload: model, data and metric. A few lines of Python make one of your own.

    import torch
    from evergrad.training import Dataset, Workload

    def mine():                                       # a plan says  workload = "mine.py:mine"
        x, y = torch.randn(600, 20), torch.randint(0, 2, (600,))
        data = Dataset("noise", x[:500], y[:500], x[500:], y[500:], chance=0.5)
        return Workload(model=lambda: torch.nn.Linear(20, 2), data=data)

Rules. `model` is called with the generator already seeded, and gives the same bits each time. Data are whole tensors in
memory, never altered. `loss`, `metric` and `predict` are functions of outputs and targets alone.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evergrad.errors import UsageError
from evergrad.training.settings import Direction, Training, direction_by_name
from evergrad.wording import checked_choice, did_you_mean, short_repr

MakeOptimizer: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples to learn from and samples to judge by."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    chance: float | None = None
    """The metric of one who guesses; None: unknown, and then no training ends at chance level."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What tables say of it: where it is from, how large."""


def top1(outputs: Tensor) -> Tensor:
    """The class that each output favours; NaN favours none, -1."""
    best: Tensor = outputs.argmax(-1)
    return torch.where(outputs.isnan().any(-1), torch.full_like(best, -1), best)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The part of the targets that the outputs favour."""
    return (top1(outputs) == targets).double().mean()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes, or of the next token at every place."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, on what, and how it is judged."""

    model: Callable[[], nn.Module]
    data: Dataset
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    metric: Callable[[Tensor, Tensor], Tensor] = accuracy
    direction: str = ""
    """The metric's direction, `higher_is_better` or `lower_is_better`. Empty: by the function's name (`loss`: lower);
    a name that says nothing is higher."""
    predict: Callable[[Tensor], Tensor] = top1
    """What is compared, sample by sample, with what the golden run's model said."""
    optimizer: MakeOptimizer | None = None
    """None: as the plan says."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What tables say of the model: its width, and what differs from the published one."""

    @property
    def judged_by(self) -> Direction:
        """The metric's direction, as given or by the function's name."""
        return Direction(self.direction) if self.direction else direction_by_name(getattr(self.metric, "__name__", ""))


# Workloads of users: a function in a file or a module, found by name and called.
#
# What goes wrong in a user's code is told in one line, with the line of theirs where it happened.


def load_user_workload(training: Training) -> Workload:
    """What the function named by `training.workload` gives; it takes nothing, or the training."""
    spelled = training.workload
    place, colon, name = spelled.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise UsageError(f"workload: expected file.py:function or package.module:function, found {short_repr(spelled)}")
    path = Path(training.base, Path(place).expanduser()) if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UsageError(f"workload {spelled}: no file {path.absolute()}")
    with _folder_known(path):
        with _user_errors(spelled, path):
            module = importlib.import_module(place) if path is None else _loaded(path)
        function = getattr(module, name, None)
        if not callable(function):
            functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
            raise UsageError(f"workload {spelled}: no function {name!r} in {place}.{did_you_mean(name, functions)}")
        arguments = _arguments(spelled, function, training)
        with _user_errors(spelled, path):
            made = function(*arguments)
    return _checked(spelled, made)


@contextmanager
def _folder_known(path: Path | None) -> Iterator[None]:
    """A file may import those beside it, as a script may; last in line, so that it hides nothing."""
    folder = "" if path is None else str(path.absolute().parent)
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.reverse()
            sys.path.remove(folder)
            sys.path.reverse()


@contextmanager
def _user_errors(spelled: str, path: Path | None) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        where = _where(error, path)
        what = str(error).strip().split("\n", maxsplit=1)[0]
        raise UsageError(f"workload {spelled}: {where}{type(error).__name__}{f': {what}' if what else ''}") from error


def _where(error: BaseException, path: Path | None) -> str:
    """The last line of the user's own file on the way to the error; without a file, of the last code at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame[0] != __file__ and not frame[0].startswith("<frozen")]
    mine = [frame for frame in frames if path is not None and frame[0] == str(path.absolute())]
    if not (mine or frames):
        return ""
    file, line = (mine or frames)[-1]
    return f"{file}:{line}: "


def _loaded(path: Path) -> ModuleType:
    whole = str(path.absolute())
    # A name of its own: nobody else's module is replaced, whatever the file is called.
    name = f"_evergrad_workload_{hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()}"
    spec = spec_from_file_location(name, whole)
    assert spec is not None
    assert spec.loader is not None, "a .py file has a loader"
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _arguments(spelled: str, function: Any, training: Training) -> tuple[Training, ...]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ()
    for arguments in ((training,), ()) if "training" in signature.parameters else ((), (training,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise UsageError(f"workload {spelled}: expected a function of nothing or of the training, found {signature}")


def _checked(spelled: str, made: object) -> Workload:
    if not isinstance(made, Workload):
        raise UsageError(f"workload {spelled}: expected an evergrad.training.Workload, found {short_repr(made)}")
    if not callable(made.model):
        raise UsageError(
            f"workload {spelled}: model: expected a function that makes one, found {short_repr(made.model)}"
        )
    if made.direction:
        try:
            checked_choice("direction", made.direction, [*Direction])
        except UsageError as error:
            raise UsageError(f"workload {spelled}: {error}") from None
    data: object = made.data
    if not isinstance(data, Dataset):
        raise UsageError(f"workload {spelled}: data: expected an evergrad.training.Dataset, found {short_repr(data)}")
    for part in ("train", "test"):
        lengths = []
        for name in (f"{part}_x", f"{part}_y"):
            tensor = getattr(data, name)
            if not isinstance(tensor, Tensor) or not tensor.dim() or not len(tensor):
                raise UsageError(
                    f"workload {spelled}: {name}: expected a tensor of samples, found {short_repr(tensor)}"
                )
            lengths.append(len(tensor))
        if lengths[0] != lengths[1]:
            raise UsageError(f"workload {spelled}: {part}: expected as many targets as samples, found {lengths}")
    return made
