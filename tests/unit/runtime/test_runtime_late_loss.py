"""A loss whose number comes later, and the future behind it."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime.execute import transfers as module
from msrun.runtime.execute.transfers import TensorFuture
from msrun.runtime.parallel.border import LateLoss
from msrun.runtime.tensors.plain_tensors import watch_constructors


class Source:
    """Makes losses of a weight; notes in which order the value and the gradient are asked for."""

    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)
        self.events: list[str] = []

    def loss(self) -> Tensor:
        result: Tensor = _Sum.apply(self, self.weight)
        assert isinstance(result, LateLoss)
        return result

    def arrive(self) -> Tensor:
        self.events.append("value")
        return self.weight.detach().sum().detach().requires_grad_()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Source, weight: Tensor) -> Tensor:
        ctx.source = source
        return LateLoss.of(source.arrive, weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        ctx.source.events.append("gradient")
        return None, gradients[0].expand(3)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def seen_in_inference_mode(loss: Tensor) -> float:
    with torch.inference_mode():
        return loss.item()


def saved_and_read(loss: Tensor) -> float:
    file = io.BytesIO()
    torch.save(loss.detach(), file)
    file.seek(0)
    return float(torch.load(file))


def added_up(loss: Tensor) -> float:
    total = torch.zeros(())
    with torch.no_grad():
        total += loss
    return float(total)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "text": lambda loss: float(f"{loss:.1f}"),
    "repr": lambda loss: 3.0 if repr(loss).startswith("tensor(3., grad_fn=") else repr(loss),
    "data": lambda loss: float(loss.data),
    "list": lambda loss: torch.stack([torch.zeros(()), loss]).tolist()[1],
    "arithmetic": lambda loss: (loss * 2 / 2).item(),
    "sum": lambda loss: (sum([loss, loss]) / 2).item(),
    "in place": added_up,
    "comparison": lambda loss: 3.0 if loss > 2.5 else 0.0,
    "operator": lambda loss: torch.ops.aten.mul.Scalar(loss, 1.0).item(),
    "inference mode": seen_in_inference_mode,
    "numpy": lambda loss: float(np.asarray(loss.detach())),
    "dlpack": lambda loss: float(torch.from_dlpack(loss.detach())),
    "tolist": lambda loss: loss.tolist(),
    "copy": lambda loss: float(copy.copy(loss.detach())),
    "pickle": lambda loss: float(pickle.loads(pickle.dumps(loss.detach()))),
    "torch.save": saved_and_read,
    "function of the user": lambda loss: _Twice.apply(loss).item() / 2,
    "after backward": lambda loss: (loss.backward(), loss.item())[1],
    "tensor": lambda loss: (watch_constructors(), float(torch.tensor(loss)))[1],
    "as_tensor": lambda loss: (watch_constructors(), float(torch.as_tensor(loss.detach(), dtype=torch.float64)))[1],
    "memory": lambda loss: ctypes.c_float.from_address(loss.data_ptr()).value,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_gets_the_value_and_from_then_on_a_plain_tensor(look: Callable[[Tensor], Any]) -> None:
    source = Source()
    loss = source.loss()
    assert look(loss) == 3.0
    assert type(loss) is Tensor
    assert source.events.count("value") == 1
    assert loss.item() == 3.0 and loss.requires_grad and loss.dim() == 0


def backward(source: Source, loss: Tensor) -> Tensor | None:
    loss.backward()
    return source.weight.grad


@pytest.mark.parametrize(
    ("differentiate", "gradient", "events"),
    [
        (backward, 1.0, ["gradient", "value"]),
        (lambda source, loss: torch.autograd.grad(loss, [source.weight])[0], 1.0, ["gradient", "value"]),
        (lambda source, loss: backward(source, loss**2), 6.0, ["value", "gradient"]),
        (lambda source, loss: torch.autograd.grad(loss, [source.weight], loss)[0], 3.0, ["value", "gradient"]),
    ],
    ids=["backward", "grad", "of the value", "its own gradient"],
)
def test_gradients_do_not_wait_for_the_value_unless_they_need_it(
    differentiate: Callable[[Source, Tensor], Tensor], gradient: float, events: list[str]
) -> None:
    source = Source()
    loss = source.loss()
    assert source.events == [], "nobody has looked"
    assert differentiate(source, loss).tolist() == [gradient] * 3
    assert source.events == events
    assert loss.item() == 3.0


def test_one_gradient_of_two_losses_waits_for_neither_first() -> None:
    one, other = Source(), Source()
    losses = [one.loss(), other.loss()]
    torch.autograd.grad(losses, [one.weight, other.weight])
    assert one.events == other.events == ["gradient", "value"]
    assert [loss.item() for loss in losses] == [3.0, 3.0]


def test_errors_reach_whoever_looks_and_leave_no_number_behind() -> None:
    def arrive() -> Tensor:
        raise ParallelError("rank 1 has gone")

    loss = LateLoss.of(arrive, torch.float32)
    with pytest.raises(ParallelError, match="rank 1 has gone"):
        loss.item()
    assert torch.isnan(loss)
    loss = Source().loss()
    with pytest.raises(RuntimeError, match="shape"):
        loss.backward(torch.ones(2))
    assert loss.item() == 3.0, "a backward pass that failed takes no value away"


class Work:
    """A collective that comes to its end after so many waits that were too long."""

    def __init__(self, long_waits: int = 0, error: str = "") -> None:
        self._long_waits = long_waits
        self._error = error
        self.waits: list[Any] = []

    def is_completed(self) -> bool:
        return len(self.waits) > self._long_waits

    def wait(self, limit: Any = None) -> None:
        self.waits.append(limit)
        if len(self.waits) <= self._long_waits:
            raise RuntimeError("timed out")
        if self._error:
            raise RuntimeError(self._error)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called while a collective took long."""
    called: list[str] = []
    monkeypatch.setattr(module, "on_long_wait", [lambda: called.append("a"), lambda: called.append("b")])
    return called


def test_while_a_message_takes_long_it_is_looked_around(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(long_waits=2)
    TensorFuture(torch.ones(2), work).wait()  # type: ignore[arg-type]
    assert work.waits == [module.LOOK_EVERY] * 3
    assert looks == ["a", "b", "a", "b"]
    looks.clear()
    work = Work(error="connection closed by peer")
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        TensorFuture(torch.ones(2), work).wait()  # type: ignore[arg-type]
    assert work.waits == [module.LOOK_EVERY, None] and looks == []

    def look() -> None:
        raise ValueError("rank 1 has gone")

    monkeypatch.setattr(module, "on_long_wait", [look])
    with pytest.raises(ValueError, match="rank 1 has gone"):
        TensorFuture(torch.ones(2), Work(long_waits=10**9)).wait()  # type: ignore[arg-type]
