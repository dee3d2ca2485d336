"""What agents may say: every form is taken, another one is refused by its field, and any change is a new version."""

from __future__ import annotations

from typing import Any

import pytest
from failure_reports import failure_of

from msrun.cluster import protocol as module
from msrun.cluster.failure import FailureReport
from msrun.cluster.protocol import HostReport, ReachResult, check_said, protocol, read_moment
from msrun.planning.record_json import encode_record

REPORT = encode_record(FailureReport(failure_of(0)))
SAID: dict[str, dict[str, Any]] = {
    "checked": {"report": encode_record(HostReport())},
    "listening": {"port": 1, "error": ""},
    "reached": {"result": encode_record(ReachResult())},
    "event": {"moment": "note", "fields": {"text": "x"}},
    "failed": {"attempt": 0, "report": REPORT},
    "ended": {"attempt": 0, "can_continue": True, "come": [1], "has_begun": True, "report": None},
    "done": {"attempt": 0, "rank": 1, "has_come": True},
    "ready": {"attempt": 1, "clock_s": 1.5},
    "log": {"name": "worker_0.log", "attempt": None, "data": ""},
    "logs_end": {},
    "result": {"failure": None, "survivors": [4711]},
    "error": {"text": "no", "exit_code": 3},
    "fault": {"text": "no", "traceback": ""},
    "shown": {"data": ""},
    "taken": {"count": 1},
}


@pytest.mark.parametrize("kind", SAID)
def test_what_an_agent_says_is_taken_and_nothing_may_be_missing(kind: str) -> None:
    check_said({"type": kind, "seq": 7, **SAID[kind]})
    for name in SAID[kind].keys() - {"error"}:
        with pytest.raises(ValueError, match=name):
            check_said({"type": kind, **{key: value for key, value in SAID[kind].items() if key != name}})


@pytest.mark.parametrize(
    ("kind", "changes", "where"),
    [
        ("lost", {"reason": "x"}, "lost"),
        ("failed", {"report": {"failure": 7}}, r"\$\.report\.failure"),
        ("failed", {"attempt": True}, r"\$\.attempt"),
        ("result", {"survivors": ["1"]}, r"\$\.survivors"),
        ("ended", {"come": [1 << 50]}, r"\$\.come"),
        ("ready", {"clock_s": float("inf")}, r"\$\.clock_s"),
        ("checked", {"report": {"addresses": [{"address": "x", "interface": "", "prefix_bits": 0}]}}, r"\$\.report"),
    ],
)
def test_what_is_of_another_form_is_refused_by_its_field(kind: str, changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=where):
        check_said({"type": kind, **SAID.get(kind, {}), **changes})


def test_fields_that_do_not_belong_to_a_moment_are_left_out() -> None:
    assert read_moment("note", {"text": "x", "more": 1}) == {"text": "x"}
    with pytest.raises(ValueError, match="started: pid"):
        read_moment("started", {"global_rank": 0, "pid": "7"})


def test_version_changes_with_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    before = protocol()
    assert protocol() == before
    protocol.cache_clear()
    monkeypatch.setattr(module, "MOMENTS", {**module.MOMENTS, "new": {"text": str}})
    assert protocol() != before
    protocol.cache_clear()
