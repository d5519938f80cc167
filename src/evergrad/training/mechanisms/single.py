"""One process: the mechanism that the others are compared with.

Parameters lie one after the other in one flat tensor, of which the model's own are views, and so do buffers and
optimizer state of each element type. So taking up a checkpoint is a few copies, and looking at the whole state after
each step a few passes over memory, however many tensors there are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from evergrad.errors import UsageError
from evergrad.state import escape
from evergrad.training.mechanisms.session import Evaluation, Session, TrainingSnapshot
from evergrad.training.settings import Training
from evergrad.training.workloads.workload import Workload
from evergrad.wording import short_repr

_EVALUATED_AT_ONCE = 1024
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class SingleSession(Session):
    """A warm training in this process; the others are the same with more around it."""

    rank, ranks = 0, 1

    def __init__(self, training: Training, workload: Workload) -> None:
        self.epoch = 0
        self._training, self._workload = training, workload
        self._device, self._dtype = _device(training.device), _DTYPES[training.precision]
        data = workload.data
        self._train_x, self._test_x = self._to_device(data.train_x), self._to_device(data.test_x)
        self._train_y, self._test_y = data.train_y.to(self._device), data.test_y.to(self._device)
        self._batch = min(training.batch_size, len(self._train_x) // self.ranks * self.ranks)
        if not self._batch:
            raise UsageError(
                f"samples: expected one for each of {self.ranks} ranks at least, found {len(self._train_x)}"
            )
        # A last batch that is smaller is left out: one sample alone has no batch statistics.
        self.steps_per_epoch = len(self._train_x) // self._batch
        self._order: tuple[int, Tensor] | None = None
        with deterministic(self._device), torch.random.fork_rng(devices=_devices(self._device)):
            torch.manual_seed(_derived_seed(training.seed, "model"))
            made: object = workload.model()
        if not isinstance(made, nn.Module):
            raise UsageError(f"workload {training.name}: expected model() to make a module, found {short_repr(made)}")
        self._model = made.to(self._device, self._dtype).train()
        self._parameters = _flatten_into_views(list(self._model.parameters()))
        self._optimizer = (workload.optimizer or _optimizer(training))(self._model.parameters())
        rest = [*self._model.buffers(), *self._initialised_optimizer_state()]
        kinds = dict.fromkeys(one.dtype for one in rest)
        self._flat = [
            self._parameters,
            *(_flatten_into_views([one for one in rest if one.dtype == kind]) for kind in kinds),
        ]
        self._state = self._named()
        self.module = self._model
        self.optimizer = self._optimizer

    def state(self) -> Mapping[str, Tensor]:
        """Parameters and buffers as `model/…`, the optimizer's as `optimizer/state/<parameter>/…`."""
        return self._state

    def parameters(self) -> Mapping[str, int]:
        """Tied ones have one number."""
        numbers = {id(one): number for number, one in enumerate(self._model.parameters())}
        named = self._model.named_parameters(remove_duplicate=False)
        return {f"model/{escape(name)}": numbers[id(one)] for name, one in named}

    def snapshot(self) -> TrainingSnapshot:
        """A copy in memory of its own; what shares memory here shares it there."""
        copies: dict[tuple[int, torch.Size], Tensor] = {}
        found = {}
        for name, tensor in self._state.items():
            place = (tensor.data_ptr(), tensor.shape)
            if place not in copies or not tensor.numel():
                copies[place] = tensor.detach().clone()
            found[name] = copies[place]
        return TrainingSnapshot(self.epoch, found)

    def restore(self, snapshot: TrainingSnapshot) -> None:
        """Copy what the snapshot holds into the live tensors."""
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(snapshot.tensors[name])
        self.epoch = snapshot.epoch

    def make_reset(self) -> Callable[[], None]:
        """In flat copies."""
        kept, epoch = [tensor.clone() for tensor in self._flat], self.epoch

        def take_up() -> None:
            with torch.no_grad():
                for live, tensor in zip(self._flat, kept, strict=True):
                    live.copy_(tensor)
            self.epoch = epoch

        return take_up

    def step(self, number: int) -> Tensor:
        """Forward, backward, update; what is random in it depends on the seed, the epoch and the number alone."""
        with deterministic(self._device):
            loss = self._gradients(number)
            self._optimizer.step()
        if number + 1 == self.steps_per_epoch:
            self.epoch += 1
        return loss

    def _gradients(self, number: int) -> Tensor:
        """Of this rank's share of a batch."""
        share = self._batch // self.ranks
        first = number * self._batch + self.rank * share
        chosen = self._epoch_order()[first : first + share]
        among = (self.rank,) if self.ranks > 1 else ()
        self._seed(_derived_seed(self._training.seed, "step", self.epoch, number, *among))
        outputs = self.module(self._train_x[chosen])
        loss: Tensor = self._workload.loss(outputs, self._train_y[chosen])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def weights(self) -> Tensor:
        """All parameters, flat."""
        return self._parameters

    def magnitude(self) -> Tensor:
        """Of parameters, buffers and optimizer state."""
        floats = [flat for flat in self._flat if flat.numel() and flat.is_floating_point()]
        ends = [end.double() for flat in floats for end in torch.aminmax(flat)]
        return torch.stack(ends).abs().amax()

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """In evaluation mode, all test samples."""
        self._model.eval()
        self._seed(_derived_seed(self._training.seed, "evaluation", self.epoch))
        try:
            with deterministic(self._device):
                outputs = torch.cat([self._model(part) for part in torch.split(self._test_x, _EVALUATED_AT_ONCE)])
        finally:
            self._model.train()
        metric = float(self._workload.metric(outputs.double(), self._test_y))
        return Evaluation(metric, self._workload.predict(outputs).cpu(), float(outputs.abs().amax()))

    def _seed(self, seed: int) -> None:
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # a tenth of a millisecond less than torch.manual_seed
        else:
            torch.manual_seed(seed)

    def _to_device(self, samples: Tensor) -> Tensor:
        return samples.to(self._device, self._dtype if samples.is_floating_point() else samples.dtype)

    def _epoch_order(self) -> Tensor:
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(_derived_seed(self._training.seed, "order", self.epoch))
            order = torch.randperm(len(self._train_x), generator=generator)
            self._order = self.epoch, order.to(self._device)
        return self._order[1]

    def _initialised_optimizer_state(self) -> list[Tensor]:
        """Let the optimizer make its state, all zeros, before the first step."""
        before = self._parameters.clone()
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._parameters.copy_(before)
        found: list[Tensor] = []
        for parameter in self._model.parameters():
            for name, value in self._optimizer.state[parameter].items():
                if not isinstance(value, Tensor):
                    kind = type(self._optimizer).__name__
                    raise UsageError(
                        f"optimizer {kind}: keeps {name!r} as {type(value).__name__}, expected a tensor. "
                        "Choose an optimizer of torch.optim, or keep its state in tensors."
                    )
                found.append(value.zero_())
        return found

    def _named(self) -> dict[str, Tensor]:
        """Everything that a step may change; buffers that no checkpoint keeps, too, or they would leak into trials."""
        named = {f"model/{escape(name)}": one.data for name, one in self._model.state_dict(keep_vars=True).items()}
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            named.setdefault(f"model/{escape(name)}", buffer.data)
        for index, parameter in enumerate(self._model.parameters()):
            for slot, value in self._optimizer.state[parameter].items():
                named[f"optimizer/state/{index}/{slot}"] = value
        return named


def _flatten_into_views(tensors: Sequence[Tensor]) -> Tensor:
    """A flat tensor of all of these, which are of one type; they become views of it."""
    flat = torch.cat([one.detach().reshape(-1) for one in tensors]) if tensors else torch.empty(0)
    at = 0
    for one in tensors:
        one.data = flat[at : at + one.numel()].view(one.shape)
        at += one.numel()
    return flat


def _optimizer(training: Training) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    # torch's fused SGD on the CPU leaves 16-bit parameters nearly where they are.
    fused = training.device != "cpu" or training.precision in ("float32", "float64")

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if training.optimizer == "adam":
            eps = 1e-4 if training.precision == "float16" else 1e-8  # float16 has no 1e-8: it would divide by zero
            return torch.optim.Adam(parameters, lr=training.learning_rate, eps=eps, fused=fused, foreach=not fused)
        return torch.optim.SGD(parameters, lr=training.learning_rate, momentum=0.9, fused=fused, foreach=not fused)

    return make


def _derived_seed(seed: int, *what: str | int) -> int:
    """A seed of its own for everything that is random."""
    text = "|".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _device(name: str) -> torch.device:
    """A device that is there; `UsageError` if it is not."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device: expected cpu, cuda or cuda:1, found {short_repr(name)}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected cpu, cuda or cuda:1, found {short_repr(name)}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name}: torch finds {torch.cuda.device_count()} CUDA devices here. Choose cpu.")
    return device


def _devices(device: torch.device) -> list[int]:
    if device.type == "cpu":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Only what gives the same bits each time. On the CPU, with a fixed number of threads, everything here does."""
    if device.type == "cpu":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
