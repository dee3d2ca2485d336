"""A world that tests can set, so that no process group is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from msrun.runtime import world


@pytest.fixture
def set_world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def set_to(rank: int, size: int) -> None:
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_group_size", size)):
            monkeypatch.setattr(world, name, lambda value=value: value)

    return set_to
