"""One failure out of the results of many hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from msrun.errors import ClusterError, Interrupted
from msrun.launch.failure import JobFailure, WorkerFailure
from msrun.launch.fleet.outcome import combine_failures, hide_secrets, read_failure
from msrun.planning.record_json import encode_record

WORKER = WorkerFailure(3, 1, "node 1 (h1, 10.0.0.2)", 77, 7, None, "", 1.5, "/tmp/spool/worker_3.log", ["last words"])
REASON = "rank 3 on node 1 (h1, 10.0.0.2) failed first: exit code 7, after 1.5 s"


def other(rank: int) -> dict[str, int | str]:
    return {"global_rank": rank, "state": "stopped by msrun", "doing": ""}


AT_ITS_HOST = JobFailure("j", 7, REASON, WORKER, [], [other(2)], [])
ELSEWHERE = JobFailure("j", 7, REASON, WORKER, [], [other(0), other(1)], [{"attempt": 0, "reason": "x"}])
LOST = ClusterError("h1: gone")


def test_job_that_ended_well_everywhere_has_no_failure() -> None:
    assert combine_failures("j", {0: None, 1: None}, None) is None


def test_others_of_all_hosts_are_told_of_once() -> None:
    failure = combine_failures("j", {0: ELSEWHERE, 1: AT_ITS_HOST}, None)
    assert failure is not None and failure.first_failure == WORKER
    assert [entry["global_rank"] for entry in failure.others] == [0, 1, 2]
    assert failure.attempts == ELSEWHERE.attempts


def test_rank_that_another_host_tells_of_as_stopped_is_not_told_of_twice() -> None:
    elsewhere = replace(ELSEWHERE, others=[other(3), other(0)])
    failure = combine_failures("j", {0: elsewhere, 1: AT_ITS_HOST}, None)
    assert failure is not None and [entry["global_rank"] for entry in failure.others] == [0, 2]


def test_failed_worker_comes_before_a_host_that_is_lost_later() -> None:
    failure = combine_failures("j", {0: ELSEWHERE}, LOST)
    assert failure is not None and failure.reason == REASON and failure.exit_code == 7


def test_lost_host_comes_before_what_the_others_say_of_it() -> None:
    said = JobFailure("j", 3, "lost node 1", None, [], [other(0)], [])
    failure = combine_failures("j", {0: said}, LOST)
    assert failure is not None and failure.reason == "h1: gone" and failure.exit_code == 3
    assert failure.others == [other(0)]


def test_interrupt_comes_before_everything() -> None:
    failure = combine_failures("j", {0: ELSEWHERE}, Interrupted("stopped by SIGINT", 2))
    assert failure is not None and failure.exit_code == 130 and failure.first_failure is None


def test_result_of_a_host_names_the_logs_here() -> None:
    failure = read_failure(json.loads(json.dumps(encode_record(AT_ITS_HOST))), Path("/home/me/log_output"))
    assert failure is not None and failure.first_failure is not None
    assert failure.first_failure.log == "/home/me/log_output/worker_3.log"
    assert read_failure(None, Path("/")) is None


def test_result_that_is_none_is_a_fault() -> None:
    with pytest.raises(ClusterError, match="install the same msrun"):
        read_failure({"job_id": 1}, Path("/"))


def test_secret_that_only_the_launcher_knows_is_hidden_in_excerpts() -> None:
    told = replace(AT_ITS_HOST, first_failure=replace(WORKER, excerpt=["token abcdef refused"]))
    hidden = hide_secrets(told, ["abcdef"])
    assert hidden.first_failure is not None and hidden.first_failure.excerpt == ["token ******** refused"]
