"""What msrun's own code gets wrong: written with its traceback, told once, and kept from the job where it may be."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from msrun.agent.observer import Observers, OwnFaults
from msrun.cluster.membership import Membership
from msrun.errors import ClusterError


class Faults(OwnFaults):
    def __init__(self, folder: Path, found_in: str | None = None) -> None:
        self.said: list[str] = []
        super().__init__(folder, self.said.append, found_in=str(folder) if found_in is None else found_in)
        self.log = folder / "scheduler.log"


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path)


def slip() -> None:
    raise KeyError("gone")


class Broken:
    tick_s: float | None = 1.0

    def note(self, kind: str, fields: Any) -> None:
        slip()

    def tick(self, membership: Membership) -> None:
        slip()


class Heard(Broken):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def note(self, kind: str, fields: Any) -> None:
        self.kinds.append(kind)

    def tick(self, membership: Membership) -> None:
        self.kinds.append("tick")


def test_observer_that_fails_is_told_of_once_and_the_others_hear_everything(faults: Faults) -> None:
    heard = Heard()
    observers = Observers([Broken(), heard], faults)
    for _ in range(3):
        observers.tell("running")
    observers.tick(Membership([0]))
    assert heard.kinds == ["running"] * 3 + ["tick"]
    assert faults.said == [
        "warning: msrun's own display (Broken) failed: KeyError: 'gone'; the job is not affected, traceback in "
        + str(faults.log)
    ]
    assert faults.log.read_text().count("Traceback") == 1


def test_another_kind_is_told_again(faults: Faults) -> None:
    for error in (ValueError("a"), ValueError("b"), TypeError("a")):
        with faults.kept_from_job("x"):
            raise error
    assert len(faults.said) == 2, "of one place, each kind"


def test_error_that_ends_the_job_names_msrun(faults: Faults) -> None:
    with pytest.raises(ClusterError) as raised, faults.named():
        slip()
    assert str(raised.value) == f"msrun itself failed: KeyError: 'gone'; traceback in {faults.log}; report it"
    assert "in slip" in faults.log.read_text()


def test_thread_that_ends_with_an_exception_is_named(faults: Faults) -> None:
    with faults:
        thread = threading.Thread(target=slip, name="msrun-hosts")
        thread.start()
        thread.join()
    assert len(faults.said) == 1 and "thread msrun-hosts failed: KeyError: 'gone'" in faults.said[0]
    assert "in slip" in faults.log.read_text()


def test_traceback_that_the_user_would_not_find_is_told_itself(tmp_path: Path) -> None:
    for faults in (Faults(tmp_path, found_in=""), Faults(tmp_path / "removed")):
        with faults.kept_from_job("x"):
            slip()
        assert "Traceback" in faults.said[0] and "in slip" in faults.said[0]
