"""The failure of a job over many hosts in the launcher's words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from failure_reports import failure_of, worker_of

from msrun.launch.failure import at_home, hide_secrets


def test_result_of_a_host_names_the_logs_here() -> None:
    failure = at_home(replace(failure_of(3), lagging=[worker_of(4)]), Path("/home/me/log_output"))
    assert failure.first_failure is not None and failure.first_failure.log == "/home/me/log_output/worker_3.log"
    assert failure.lagging[0].log == "/home/me/log_output/worker_4.log"


def test_secret_that_only_the_launcher_knows_is_hidden_in_excerpts() -> None:
    told = replace(failure_of(3), first_failure=replace(worker_of(3), excerpt=["token abcdef refused"]))
    hidden = hide_secrets(told, ["abcdef"])
    assert hidden.first_failure is not None and hidden.first_failure.excerpt == ["token ******** refused"]
