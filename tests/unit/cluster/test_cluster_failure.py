"""One failure of a job out of the coordinator's word and what each host has seen."""

from __future__ import annotations

from dataclasses import replace

from failure_reports import failure_of, worker_of

from msrun.cluster.failure import JobFailure, fault_of_job, merge_failures

FIRST = failure_of(3)


def other(rank: int) -> dict[str, int | str]:
    return {"global_rank": rank, "state": "stopped by msrun", "doing": ""}


def stopped(*ranks: int, attempts: int = 0) -> JobFailure:
    """Return what a host has seen whose workers were stopped because of another's."""
    earlier: list[dict[str, int | float | str]] = [{"attempt": number, "reason": "x"} for number in range(attempts)]
    return replace(fault_of_job("JOB", FIRST.reason, 7), others=[other(rank) for rank in ranks], attempts=earlier)


def test_others_of_all_hosts_are_told_of_once_and_in_their_order() -> None:
    merged = merge_failures(FIRST, [stopped(4, 5, attempts=1), replace(FIRST, others=[other(2)]), stopped(0, 1)])
    assert merged.first_failure == FIRST.first_failure and merged.reason == FIRST.reason
    assert [entry["global_rank"] for entry in merged.others] == [0, 1, 2, 4, 5]
    assert merged.attempts == [{"attempt": 0, "reason": "x"}]


def test_worker_that_failed_first_on_its_host_alone_is_one_of_the_others() -> None:
    merged = merge_failures(FIRST, [FIRST, failure_of(6, 9)])
    assert merged.others == [{"global_rank": 6, "state": "failed (exit code 9)", "doing": ""}]
    killed = replace(worker_of(6), exit_code=None, signal="SIGKILL")
    merged = merge_failures(FIRST, [replace(stopped(), lagging=[killed])])
    assert merged.others[0]["state"] == "failed (signal SIGKILL)"


def test_log_of_the_failed_worker_is_as_its_host_has_read_it_last() -> None:
    later = replace(worker_of(3), excerpt=["last words", "and more"])
    merged = merge_failures(FIRST, [stopped(0), replace(FIRST, first_failure=later)])
    assert merged.first_failure == later


def test_ranks_that_were_waited_for_are_not_among_the_others() -> None:
    hang = replace(fault_of_job("JOB", "stuck", 124), lagging=[worker_of(3)])
    merged = merge_failures(hang, [stopped(2, 3), stopped(0)])
    assert [worker.global_rank for worker in merged.lagging] == [3]
    assert [entry["global_rank"] for entry in merged.others] == [0, 2]


def test_failure_of_which_no_host_has_told_more_stays_as_it_is() -> None:
    assert merge_failures(FIRST, []) == FIRST
