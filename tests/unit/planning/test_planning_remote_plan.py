"""The plan of a job of hosts: compared with files as a whole, and its rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.masking import MASK
from msrun.planning.plan import LaunchPlan
from msrun.planning.plan_text import render_plan
from msrun.planning.program import Program
from msrun.planning.remote_plan import build_remote_plan
from msrun.planning.spec import LaunchSpec
from ranktable.hosts.hostfile import parse_hostfile

HOSTFILE = """
h1 slots=3 user=me port=2222
10.0.0.7 devices=5 python="/opt/my py/bin/python"
"""
CALLER = {
    "PATH": "/usr/bin",
    "HF_TOKEN": "hidden",
    "HTTP_PROXY": "http://me:hidden@proxy",
    "NCCL_DEBUG": "INFO",
    "HOME": "/root",
    "RANK": "7",
    "PYTHONUNBUFFERED": "0",
}


def plan_for(hostfile: str = HOSTFILE, caller: dict[str, str] = CALLER, **changes: Any) -> LaunchPlan:
    entries = parse_hostfile(hostfile, HostEntry, "--hostfile f")
    settings: dict[str, Any] = {
        "program": Program("script", "/my jobs/train.py", ("--lr", "0.1", "it's", "--api_key", "hidden")),
        "worker_num": sum(entry.slots for entry in entries),
        "local_worker_num": 0,
        "working_directory": Path("/my jobs"),
        "log_dir": Path("/my jobs/log_output"),
        "host_entries": entries,
        "env": (("API_KEY", "hidden"), ("A", "b c\nd")),
        "forward_env": ("HTTP_*", "HF_TOKEN"),
    }
    return build_remote_plan(
        LaunchSpec(**{**settings, **changes}),
        caller,
        job_id="JOB",
        agent_command=lambda python: f"exec '{python}' -c 'one\ntwo'",
    )


def rendered(plan: LaunchPlan, *, as_json: bool) -> str:
    return render_plan(plan, as_json=as_json).replace(sys.executable, "PYTHON") + "\n"


def test_plan_of_hosts_as_text_is_the_frozen_one(golden: Callable[[str, str], None]) -> None:
    golden("plan_hosts.txt", rendered(plan_for(), as_json=False))


def test_plan_of_hosts_as_json_is_the_frozen_one(golden: Callable[[str, str], None]) -> None:
    golden("plan_hosts.json", rendered(plan_for(), as_json=True))


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_masked_wherever_they_stand(as_json: bool) -> None:
    plan = plan_for()
    text = rendered(plan, as_json=as_json)
    assert "hidden" not in text and MASK in text
    assert plan.secrets == ("hidden",)
    assert plan.forwarded["HF_TOKEN"] == "hidden"


def test_secret_that_nobody_named_stays_and_is_told() -> None:
    plan = plan_for(forward_env=())
    assert "HF_TOKEN" not in plan.forwarded
    assert "secrets stay here: HF_TOKEN; --env HF_TOKEN gives it to all workers" in plan.notes
    assert not any("secrets" in note for note in plan_for(forward_env=(), env=(("HF_TOKEN", "x"),)).notes)


def test_what_only_a_host_can_know_is_not_made_up() -> None:
    plan = plan_for(caller={})
    open_names = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MSRUN_RENDEZVOUS", "MSRUN_DEVICE_TARGET"}
    assert not open_names & set(plan.hosts[0].common_env)
    (note,) = [note for note in plan.notes if note.startswith("decided on the hosts")]
    assert all(name in note for name in open_names)
    known = plan_for(caller={"OMP_NUM_THREADS": "7"}, device_target="cpu", master_addr="10.0.0.1")
    (note,) = [note for note in known.notes if note.startswith("decided on the hosts")]
    assert not any(name in note for name in ("MASTER_ADDR", "OMP_NUM_THREADS", "MSRUN_DEVICE_TARGET"))
    assert known.hosts[0].common_env["MASTER_ADDR"] == known.master_addr == "10.0.0.1"
    assert known.hosts[0].common_env["MSRUN_DEVICE_TARGET"] == "cpu"


@pytest.mark.parametrize(
    ("hostfile", "master_addr", "expected"),
    [
        ("h1:1\nh2:1", "127.0.0.1", "?"),
        ("h1:1 address=10.0.0.1\nh2:1", "127.0.0.1", "10.0.0.1"),
        ("10.0.0.1:1\nh2:1", "127.0.0.1", "10.0.0.1"),
        ("10.0.0.1:1\nh2:1", "10.9.9.9", "10.9.9.9"),
        ("h1:2", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_scheduler_is_on_the_first_host(hostfile: str, master_addr: str, expected: str) -> None:
    assert plan_for(hostfile, master_addr=master_addr).master_addr == expected


def test_ranks_and_devices_of_a_table_are_those_of_the_plan() -> None:
    table = (HostAssignment(0, "b", "10.0.0.2", (0, 3), (4, 5)), HostAssignment(1, "a", "10.0.0.1", (2, 1), (0, 1)))
    plan = plan_for("h1:2\nh2:2", table_hosts=table, rank_table_file=Path("/t.json"))
    assert [(worker.global_rank, worker.device_id) for worker in plan.hosts[0].workers] == [(0, 4), (3, 5)]
    assert [(worker.global_rank, worker.device_id) for worker in plan.hosts[1].workers] == [(2, 0), (1, 1)]
    assert (plan.master_addr, plan.rank_table_file) == ("10.0.0.2", "/t.json")
