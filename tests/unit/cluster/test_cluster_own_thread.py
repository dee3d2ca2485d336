"""Threads of msrun: none ends unnoticed, and one that carries out the end of the job goes on after a fault."""

from __future__ import annotations

import pytest

from msrun.cluster import own_thread as module
from msrun.cluster.own_thread import OwnThread, describe_fault, print_fault, traceback_of


def test_owner_is_told_what_a_thread_raises() -> None:
    told = list[BaseException]()

    def work() -> None:
        raise SystemExit(3)

    thread = OwnThread("test", work, told.append)
    thread.start()
    thread.join(60)
    assert [type(error) for error in told] == [SystemExit] and thread.fault is told[0]


def test_thread_that_goes_on_works_again_and_tells_the_first_fault_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    told, faults = list[str](), [OSError("first"), OSError("second")]

    def work() -> None:
        if faults:
            raise faults.pop(0)

    thread = OwnThread("test", work, lambda error: told.append(str(error)), goes_on=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and told == ["first"] and not faults


def test_fault_is_one_line_under_the_name_of_msrun_and_its_traceback_can_be_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = OSError(5, "Input/output\nerror")
    error.add_note("while it read worker_0.log")
    assert describe_fault(error) == (
        "msrun itself failed: OSError: [Errno 5] Input/output error, while it read worker_0.log; its traceback is in "
        "scheduler.log"
    )
    assert describe_fault(KeyError()) == "msrun itself failed: KeyError; its traceback is in scheduler.log"
    print_fault(error)
    assert capsys.readouterr().err == traceback_of(error)
