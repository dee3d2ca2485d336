"""Which functions compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from msrun.runtime.parallel.compilation.function_key import FunctionKey

network = nn.Linear(2, 2)
factor = 1.0


def make(module: nn.Module, number: float = 1.0, default: int = 0) -> Callable[[Any], Any]:
    def forward(x: Any, extra: int = default) -> Any:
        return module(x) * number + extra

    return forward


def uses_globals(x: Any) -> Any:
    return network(x) * factor


def test_closure_made_anew_is_the_same_function() -> None:
    assert FunctionKey(make(network)) == FunctionKey(make(network))
    assert hash(FunctionKey(make(network))) == hash(FunctionKey(make(network)))


def test_other_module_number_or_default_makes_another_function() -> None:
    key = FunctionKey(make(network))
    assert key != FunctionKey(make(nn.Linear(2, 2)))
    assert key != FunctionKey(make(network, 2.0))
    assert key != FunctionKey(make(network, 1.0, 5))
    assert key != FunctionKey(make(network, number=True))


def test_global_number_that_changes_makes_another_function() -> None:
    global factor
    key = FunctionKey(uses_globals)
    assert key == FunctionKey(uses_globals)
    factor = 2.0
    assert key != FunctionKey(uses_globals)
    factor = 1.0
    assert key == FunctionKey(uses_globals)


def test_functions_that_it_calls_are_looked_into() -> None:
    def outer(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: inner(x)

    assert FunctionKey(outer(make(network))) == FunctionKey(outer(make(network)))
    assert FunctionKey(outer(make(network))) != FunctionKey(outer(make(network, 3.0)))
    assert FunctionKey(partial(make(network), extra=1)) == FunctionKey(partial(make(network), extra=1))
    assert FunctionKey(partial(make(network), extra=1)) != FunctionKey(partial(make(network), extra=2))


def test_tensors_are_told_apart_by_identity_and_kept_alive() -> None:
    def over(tensor: torch.Tensor) -> Callable[[], Any]:
        return lambda: network(tensor)

    one = torch.ones(2)
    assert FunctionKey(over(one)) == FunctionKey(over(one))
    keys = {FunctionKey(over(torch.ones(2))) for _ in range(50)}
    assert len(keys) == 50


def test_methods_of_one_object_are_one_function() -> None:
    class Trainer:
        def step(self, x: Any) -> Any:
            return network(x)

    trainer = Trainer()
    assert FunctionKey(trainer.step) == FunctionKey(trainer.step)
    assert FunctionKey(trainer.step) != FunctionKey(Trainer().step)
