"""A tensor on its way: waited for once, looked around meanwhile, and described for whoever asks what is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msrun.runtime.execute import transfers as module
from msrun.runtime.execute.transfers import TensorFuture, Traffic


class Work:
    """A collective that comes to its end after so many waits that were too long."""

    def __init__(self, long_waits: int = 0, error: str = "") -> None:
        self._long_waits = long_waits
        self._error = error
        self.waits: list[Any] = []

    def is_completed(self) -> bool:
        return len(self.waits) > self._long_waits

    def wait(self, limit: Any = None) -> None:
        self.waits.append(limit)
        if len(self.waits) <= self._long_waits:
            raise RuntimeError("timed out")
        if self._error:
            raise RuntimeError(self._error)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called while a collective took long."""
    called: list[str] = []
    monkeypatch.setattr(module, "on_long_wait", [lambda: called.append("a"), lambda: called.append("b")])
    return called


def test_all_messages_are_waited_for_once_and_what_comes_of_them_is_made_once(looks: list[str]) -> None:
    works = [Work(), Work()]
    value = TensorFuture(torch.ones(2), works, lambda got: got + 1)  # type: ignore[arg-type]
    for _ in range(2):
        assert value.wait().tolist() == [2.0, 2.0]
    assert [work.waits for work in works] == [[module.LOOK_EVERY]] * 2
    assert looks == []


def test_while_a_message_takes_long_it_is_looked_around(looks: list[str]) -> None:
    work = Work(long_waits=2)
    TensorFuture(torch.ones(2), work).wait()  # type: ignore[arg-type]
    assert work.waits == [module.LOOK_EVERY] * 3
    assert looks == ["a", "b", "a", "b"]


def test_look_may_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise ValueError("rank 1 has gone")

    monkeypatch.setattr(module, "on_long_wait", [look])
    with pytest.raises(ValueError, match="rank 1 has gone"):
        TensorFuture(torch.ones(2), Work(long_waits=10**9)).wait()  # type: ignore[arg-type]


def test_message_that_has_failed_raises_what_it_failed_of(looks: list[str]) -> None:
    work = Work(error="connection closed by peer")
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        TensorFuture(torch.ones(2), work).wait()  # type: ignore[arg-type]
    assert work.waits == [module.LOOK_EVERY, None] and looks == []


def test_message_that_has_come_is_not_called_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting_in(describe: Any) -> Any:
        raise AssertionError(describe())

    monkeypatch.setattr(module, "waiting_in", waiting_in)
    work = Work(long_waits=-1)
    TensorFuture(torch.ones(2), work).wait()  # type: ignore[arg-type]
    assert work.waits == [None]
    for value, shape, words in (
        (torch.ones(2, 3), None, "a sum, result 2x3"),
        (torch.ones(6), (2, 3), "a sum, result 2x3"),
        (torch.tensor(1.0), None, "a sum, result scalar"),
    ):
        with pytest.raises(AssertionError, match=words):
            TensorFuture(value, Work(), name="a sum", shape=shape).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "is_number"), [(torch.tensor(1.0), True), (torch.tensor(1), False), (torch.ones(1), False)]
)
def test_one_floating_point_number_on_the_host_may_come_later(value: torch.Tensor, is_number: bool) -> None:
    assert TensorFuture(value).is_number_on_host is is_number


def test_messages_are_counted_with_their_bytes_until_they_are_counted_anew() -> None:
    traffic = Traffic()
    traffic.add("all_reduce", torch.ones(3))
    traffic.add("all_reduce", torch.ones(2, dtype=torch.float64))
    traffic.add("broadcast", torch.ones(()))
    assert traffic.calls == {"all_reduce": 2, "broadcast": 1}
    assert traffic.bytes == {"all_reduce": 28, "broadcast": 4}
    traffic.reset()
    assert not traffic.calls and not traffic.bytes


def test_only_what_others_send_or_is_made_later_is_a_message() -> None:
    here = TensorFuture(torch.ones(2))
    assert not here.is_message
    assert TensorFuture(torch.ones(2), Work()).is_message  # type: ignore[arg-type]
    assert TensorFuture(torch.ones(2), None, lambda got: got).is_message
