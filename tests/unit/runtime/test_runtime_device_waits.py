"""What a device waits for has a name on msrun's board, while this process goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from msrun import contract
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.runtime import progress
from msrun.runtime.execute import device_waits

DEADLINE_S = 20.0


class Event:
    """What the device has passed or not."""

    is_passed = False

    def query(self) -> bool:
        return self.is_passed


@pytest.fixture
def waits_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """What the board says that rank 0 waits in."""
    board = ProgressBoard(tmp_path / "progress", 1)
    board.create()
    monkeypatch.setenv(contract.MSRUN_PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setattr(device_waits, "LONG_S", 0.05)
    monkeypatch.setattr(device_waits, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_record", None)
    progress.open_record(0)

    def name() -> str:
        found = board.read(0)
        return found.name if found.is_waiting else ""

    yield name
    board.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_collective_that_the_device_does_not_pass_is_named_until_it_does(waits_in: Callable[[], str]) -> None:
    first, second = Event(), Event()
    device_waits.watch("all_gather of 4 ranks", first)
    device_waits.watch("all_reduce of 2 ranks", second)
    until(lambda: waits_in() == "all_gather of 4 ranks, on the device")
    first.is_passed = True
    until(lambda: waits_in() == "all_reduce of 2 ranks, on the device")
    second.is_passed = True
    until(lambda: waits_in() == "")


def test_short_waits_of_the_device_are_not_mentioned(
    waits_in: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_waits, "LONG_S", DEADLINE_S)
    event = Event()
    device_waits.watch("all_gather of 4 ranks", event)
    with progress.waiting_in(lambda: "a wait of this process"):
        assert waits_in() == "a wait of this process"
    assert waits_in() == ""
    event.is_passed = True
    until(device_waits._waits.empty)
