"""Every slow test runs on one day of `MSRUN_SLOW_SHARE`; the others, and those that draw their cases, run every day."""

from __future__ import annotations

from slow_share import choose

SHARE = 4


class FakeTest:
    """A test with a name and markers."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid = nodeid
        self._markers = markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._markers else None


def test_slow_tests_take_turns_and_all_others_stay() -> None:
    slow = [FakeTest(f"test_a.py::test[{number}]", "slow") for number in range(400)]
    others = [FakeTest("test_b.py::test"), FakeTest("test_c.py::test", "slow", "random")]
    days = [choose([*slow, *others], SHARE, 20261123 + day) for day in range(SHARE)]  # type: ignore[list-item]
    assert all(set(others) <= day for day in days)
    turns = [sum(test in day for day in days) for test in slow]
    assert turns == [1] * len(slow)
    assert all(len(day) < 0.35 * len(slow) for day in days)
