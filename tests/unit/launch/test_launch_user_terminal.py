"""The way out of a terminal that belongs to a rank."""

from __future__ import annotations

import pytest

from msrun.launch.terminal import WayOut


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("keys", "is_out"),
    [
        ([(0.0, b"\x1d\x1d\x1d")], True),
        ([(0.0, b"\x1d"), (0.5, b"\x1d"), (1.0, b"\x1d")], True),
        ([(0.0, b"\x1d"), (0.5, b"\x1d"), (1.1, b"\x1d")], False),
        ([(0.0, b"\x1d"), (0.9, b"\x1d"), (1.1, b"\x1d"), (1.2, b"\x1d")], True),
        ([(0.0, b"\x1d\x1da\x1d")], False),
        ([(0.0, b"\x03\x03\x03")], False),
    ],
)
def test_three_presses_within_a_second_are_the_way_out(keys: list[tuple[float, bytes]], is_out: bool) -> None:
    clock = Clock()
    way_out = WayOut(clock)
    found = False
    for clock.now, pressed in keys:
        found = way_out.is_in(pressed)
    assert found is is_out
