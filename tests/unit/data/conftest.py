"""A world that tests can set, so that no process group is needed."""

import pytest

from msrun.runtime import world


@pytest.fixture
def set_world(monkeypatch):
    def set_to(rank, size):
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_group_size", size)):
            monkeypatch.setattr(world, name, lambda value=value: value)

    return set_to
