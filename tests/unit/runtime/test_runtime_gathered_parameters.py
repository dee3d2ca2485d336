"""Gathered parameters are given back when nobody reads their memory any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msrun.runtime.execute.parameters import GatheredGroup
from msrun.runtime.execute.transfers import TensorFuture


class OnItsWay(TensorFuture):
    """A message that is read from a tensor's memory until somebody waits for it."""

    def __init__(self, source: Tensor) -> None:
        super().__init__(source)
        self.bytes_at_arrival: list[int] = []

    def wait(self) -> Tensor:
        self.bytes_at_arrival.append(self._value.untyped_storage().size())
        return self._value


def test_memory_is_kept_until_messages_that_are_read_from_it_have_arrived() -> None:
    leaf = torch.ones(6)
    nobody: Any = None
    gathered = GatheredGroup(nobody, {"weight": leaf})
    message = OnItsWay(leaf)
    gathered.lend(message)
    gathered.free()
    assert message.bytes_at_arrival == [24]
    assert leaf.untyped_storage().size() == 0
    gathered.free()
    assert message.bytes_at_arrival == [24]
