"""Workloads of users: a function in a file or a module, found by name and called.

What goes wrong in a user's code is told in one line, with the line of theirs where it happened.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from evergrad.errors import UsageError
from evergrad.training.direction import Direction
from evergrad.training.settings import Training
from evergrad.training.workloads.contract import Dataset, Workload
from evergrad.wording import checked_choice, meant, shown


def own_workload(training: Training) -> Workload:
    """What the function named by `training.workload` gives; it takes nothing, or the training."""
    spelled = training.workload
    place, colon, name = spelled.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise UsageError(f"workload: expected file.py:function or package.module:function, found {shown(spelled)}")
    path = Path(training.base, Path(place).expanduser()) if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UsageError(f"workload {spelled}: no file {path.absolute()}")
    with _folder_known(path):
        with _told(spelled, path):
            module = importlib.import_module(place) if path is None else _loaded(path)
        function = getattr(module, name, None)
        if not callable(function):
            functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
            raise UsageError(f"workload {spelled}: no function {name!r} in {place}.{meant(name, functions)}")
        arguments = _arguments(spelled, function, training)
        with _told(spelled, path):
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
def _told(spelled: str, path: Path | None) -> Iterator[None]:
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
        raise UsageError(f"workload {spelled}: expected an evergrad.training.Workload, found {shown(made)}")
    if not callable(made.model):
        raise UsageError(f"workload {spelled}: model: expected a function that makes one, found {shown(made.model)}")
    if made.direction:
        try:
            checked_choice("direction", made.direction, [*Direction])
        except UsageError as error:
            raise UsageError(f"workload {spelled}: {error}") from None
    data: object = made.data
    if not isinstance(data, Dataset):
        raise UsageError(f"workload {spelled}: data: expected an evergrad.training.Dataset, found {shown(data)}")
    for part in ("train", "test"):
        lengths = []
        for name in (f"{part}_x", f"{part}_y"):
            tensor = getattr(data, name)
            if not isinstance(tensor, Tensor) or not tensor.dim() or not len(tensor):
                raise UsageError(f"workload {spelled}: {name}: expected a tensor of samples, found {shown(tensor)}")
            lengths.append(len(tensor))
        if lengths[0] != lengths[1]:
            raise UsageError(f"workload {spelled}: {part}: expected as many targets as samples, found {lengths}")
    return made
