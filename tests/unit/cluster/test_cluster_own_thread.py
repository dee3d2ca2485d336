"""Threads of msrun and messages between them: none ends unnoticed, and none is lost."""

from __future__ import annotations

import selectors
from collections.abc import Iterator

import pytest

from msrun.cluster import own_thread
from msrun.cluster.own_thread import Inbox, OwnThread, describe_fault, print_fault, traceback_of


def test_owner_is_told_what_a_thread_raises() -> None:
    told = list[BaseException]()

    def work() -> None:
        raise SystemExit(3)

    thread = OwnThread("test", work, told.append)
    thread.start()
    thread.join(60)
    assert [type(error) for error in told] == [SystemExit] and thread.fault is told[0]


def test_thread_that_goes_on_works_again_and_tells_the_first_fault_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_thread, "PAUSE_S", 0.0)
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


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    found = Inbox()
    yield found
    found.close()


def test_reader_is_woken_as_long_as_there_are_messages(inbox: Inbox) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        for _ in range(2):
            assert not selector.select(0)
            for _ in range(2):
                inbox.post({})
            assert selector.select(0) and selector.select(0)
            assert len(inbox.take()) == 2
