"""What an agent's part of a job tells the launcher, in order with the renaming of logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import small_plan

from msrun.cluster.membership import Membership
from msrun.launch.remote.agent import LauncherReport
from msrun.planning.record_json import encode_record


class Played:
    """A link and logs that note what they are called with."""

    names = ("worker_0.log",)

    def __init__(self) -> None:
        self.done: list[Any] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.done.append((kind, fields))

    def end_attempt(self) -> None:
        self.done.append("end of the attempt")

    def begin_attempt(self) -> None:
        self.done.append("begin of an attempt")

    def taken(self) -> list[Any]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def report(played: Played, tmp_path: Path) -> LauncherReport:
    plan = small_plan(tmp_path)
    made: Any = LauncherReport(played, plan, played)  # type: ignore[arg-type]
    [(kind, fields)] = played.taken()
    assert kind == "planned" and fields["host"] == encode_record(plan.hosts[0])
    assert (fields["notes"], fields["target"], fields["logs"]) == ([*plan.notes], "cpu", ("worker_0.log",))
    return made


def test_logs_of_an_attempt_end_before_the_restart_is_told_and_begin_with_its_first_worker(
    report: LauncherReport, played: Played
) -> None:
    report.note("started", {"global_rank": 0})
    assert played.taken() == [("event", {"moment": "started", "fields": {"global_rank": 0}})]
    report.note("restarting", {"attempt": 1})
    report.note("stopping", {})
    report.note("started", {"global_rank": 0})
    report.note("started", {"global_rank": 1})
    assert [entry if isinstance(entry, str) else entry[1]["moment"] for entry in played.taken()] == [
        "end of the attempt",
        "restarting",
        "stopping",
        "begin of an attempt",
        "started",
        "started",
    ]


def test_words_go_to_the_launcher_and_regular_looks_tell_nothing(report: LauncherReport, played: Played) -> None:
    report.say("a word")
    assert played.taken() == [("event", {"moment": "note", "fields": {"text": "a word"}})]
    report.tick(Membership(range(1)))
    report.finish(None, Membership(range(1)), 0)
    assert played.taken() == [] and report.observers == (report,)
