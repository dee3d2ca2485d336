"""Logins that fail: how often each is tried, and what is said of it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from msrun.launch.transport.ssh import dialer as module
from msrun.launch.transport.ssh.dialer import Dialer
from msrun.launch.transport.ssh.target import SshFault, SshTarget

TARGET = SshTarget("h1", "10.0.0.7", "me")


class Login:
    """Fails as it is told; after the last fault it lets in."""

    def __init__(self, *faults: SshFault) -> None:
        self._faults = list(faults)
        self.tries = 0

    def run(self, target: SshTarget, stream: Any, deadline: float) -> Any:
        self.tries += 1
        if self._faults:
            raise self._faults.pop(0) if len(self._faults) > 1 else self._faults[0]
        return object()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_tcp", lambda *_: SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LAST_PAUSE_S", 0.02)
    monkeypatch.setattr(module, "end_transport", lambda *_: None)


def fault_of(login: Login, within_s: float) -> str:
    dialer = Dialer(login)  # type: ignore[arg-type]
    try:
        with pytest.raises(SshFault) as raised:
            dialer.connect(TARGET, time.monotonic() + within_s)
    finally:
        dialer.close()
    return raised.value.text


def test_server_that_always_hangs_up_is_named_with_the_number_of_tries() -> None:
    login = Login(SshFault("hung up", is_temporary=True))
    assert fault_of(login, 0.3) == f"hung up (in {login.tries} tries)"
    assert login.tries > 1


def test_single_try_is_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 60.0)
    login = Login(SshFault("hung up", is_temporary=True))
    assert fault_of(login, 0.3) == "hung up (in 1 try)"


def test_fault_that_stays_is_not_tried_again() -> None:
    login = Login(SshFault("hung up", is_temporary=True), SshFault("no key fits"))
    assert fault_of(login, 60.0) == "no key fits"
    assert login.tries == 2


def test_time_that_runs_out_in_another_try_tells_what_went_wrong_before() -> None:
    login = Login(SshFault("hung up", is_temporary=True), SshFault("no login in time", is_late=True))
    assert fault_of(login, 60.0) == "hung up (in 2 tries)"
    assert fault_of(Login(SshFault("no login in time", is_late=True)), 60.0) == "no login in time"
