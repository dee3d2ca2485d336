"""A world that tests can set, so that no process group is needed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch


class FakeWorld(ModuleType):
    """Stands in for the module that knows the ranks; `rank` None is a process that did not call init."""

    def __init__(self) -> None:
        super().__init__("msrun.runtime.world")
        self.rank: int | None = None
        self.size = 1

    def is_initialized(self) -> bool:
        return self.rank is not None

    def get_rank(self) -> int | None:
        return self.rank

    def get_group_size(self) -> int:
        return self.size

    def device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def fake_world():
    with pytest.MonkeyPatch.context() as patch:
        world = FakeWorld()
        patch.setitem(sys.modules, "msrun.runtime.world", world)
        yield world


@pytest.fixture
def set_world(fake_world):
    def set_to(rank: int, size: int) -> None:
        fake_world.rank, fake_world.size = rank, size

    yield set_to
    fake_world.rank, fake_world.size = None, 1
