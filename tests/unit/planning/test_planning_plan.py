"""The plan as a whole, compared with a file, and its rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import plan_of, spec_of

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.build import RECOVERY_NOTE
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan import LaunchPlan
from msrun.planning.plan_text import render_plan
from msrun.planning.program import Program

HOST = HostFacts("node-a", "127.0.0.1", tuple(range(8)))


def plan_for(
    caller: dict[str, str] | None = None, host: HostFacts = HOST, fleet: Fleet | None = None, **changes: Any
) -> LaunchPlan:
    program = Program("script", "/my jobs/train.py", ("--lr", "0.1", "it's"))
    settings = {"program": program, "worker_num": 3, "local_worker_num": 3, **changes}
    return plan_of(spec_of(Path("/my jobs"), **settings), host, caller, fleet=fleet)


def full_plan() -> LaunchPlan:
    """Return a plan in which every part is filled."""
    return plan_for(
        {"RANK": "7", "MASTER_ADDR": "10.0.0.9", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0"},
        env=(("API_KEY", "hidden"), ("A", "b c")),
        preload=("pandas",),
        tail_ranks=(0, 2),
        worker_log_name="w_{hostname}_{ip}",
        grace_s=2.5,
    )


def test_plan_as_json_is_the_frozen_one(golden: Callable[[str, str], None]) -> None:
    golden("plan.json", render_plan(full_plan(), as_json=True).replace(sys.executable, "PYTHON") + "\n")


def test_plan_as_text_is_the_frozen_one(golden: Callable[[str, str], None]) -> None:
    golden("plan.txt", render_plan(full_plan(), as_json=False).replace(sys.executable, "PYTHON") + "\n")


def plan_of_several() -> LaunchPlan:
    """Return the plan of the second of two unequal hosts."""
    assignments = (
        HostAssignment(0, "node-b", "10.0.0.1", (0, 1, 2, 3), (0, 1, 2, 3)),
        HostAssignment(1, "node-a", "10.0.0.2", (4, 6), (0, 1)),
        HostAssignment(2, "node-c", "10.0.0.3", (5,), (7,)),
    )
    host = HostFacts("node-a", "10.0.0.2", tuple(range(8)))
    fleet = Fleet(1, assignments, "10.0.0.1", "eth1")
    return plan_for({}, host, worker_num=7, local_worker_num=2, node_rank=1, fleet=fleet)


def test_plan_of_several_hosts_is_the_frozen_one(golden: Callable[[str, str], None]) -> None:
    golden("plan_several.txt", render_plan(plan_of_several(), as_json=False).replace(sys.executable, "PYTHON") + "\n")


def test_plan_of_several_hosts_holds_the_whole_fleet_and_the_own_host() -> None:
    told = json.loads(render_plan(plan_of_several(), as_json=True))
    assert [HostAssignment.from_json(assignment).ranks for assignment in told["fleet"]] == [(0, 1, 2, 3), (4, 6), (5,)]
    (own,) = told["hosts"]
    assert (own["node_rank"], [worker["global_rank"] for worker in own["workers"]]) == (1, [4, 6])
    env = {**own["env"], **own["workers"][1]["env"]}
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MSRUN_RENDEZVOUS")
    assert [env[name] for name in names] == ["6", "1", "1", "3", "10.0.0.1", "env://"]
    assert (env["GLOO_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) == ("eth1", "eth1")
    assert "NCCL_SOCKET_IFNAME" not in env


@pytest.mark.parametrize(("has_torch", "expected"), [(True, "True"), (False, "False")])
def test_workers_expect_torchs_store_only_of_a_scheduler_that_has_torch(has_torch: bool, expected: str) -> None:
    plan = plan_for({}, replace(HOST, has_torch=has_torch), worker_num=2, local_worker_num=2)
    assert plan.hosts[0].common_env["TORCHELASTIC_USE_AGENT_STORE"] == expected


def test_interface_that_the_user_chose_stays() -> None:
    assignments = (HostAssignment(0, "a", "10.0.0.1", (0,), (0,)), HostAssignment(1, "b", "10.0.0.2", (1,), (0,)))
    fleet = Fleet(0, assignments, "10.0.0.1", "eth1")
    caller = {"GLOO_SOCKET_IFNAME": "ib0"}
    plan = plan_for(caller, worker_num=2, local_worker_num=1, fleet=fleet)
    assert "GLOO_SOCKET_IFNAME" not in plan.hosts[0].common_env
    assert plan.hosts[0].common_env["TP_SOCKET_IFNAME"] == "eth1"


def test_device_of_a_table_that_the_host_has_not_is_refused() -> None:
    assignments = (HostAssignment(0, "a", "10.0.0.1", (0,), (2,)), HostAssignment(1, "b", "10.0.0.2", (1,), (0,)))
    fleet = Fleet(0, assignments, "10.0.0.1", "eth1")
    settings = {"worker_num": 2, "local_worker_num": 1, "fleet": fleet, "device_target": "gpu"}
    with pytest.raises(UsageError, match="gives node-a the device 2, but 2 gpu devices are visible"):
        plan_for({}, HostFacts("node-a", "10.0.0.1", (0,), gpus=("0", "1")), **settings)
    plan = plan_for({}, HostFacts("node-a", "10.0.0.1", (0,), gpus=("0", "1", "5")), **settings)
    assert (plan.workers[0].device_id, plan.workers[0].physical_device) == (2, "5")


@pytest.mark.parametrize(
    ("host", "visible"),
    [
        (HostFacts("h", "127.0.0.1", (0,), gpus=("4", "6")), {"CUDA_VISIBLE_DEVICES": ["4", "6"]}),
        (HostFacts("h", "127.0.0.1", (0,), npus=("0", "3")), {"ASCEND_RT_VISIBLE_DEVICES": ["0", "3"]}),
        (HostFacts("h", "127.0.0.1", (0,)), {}),
    ],
)
def test_with_a_virtual_local_rank_each_worker_sees_its_device_as_number_0(
    host: HostFacts, visible: dict[str, list[str]]
) -> None:
    workers = plan_for(host=host, worker_num=2, local_worker_num=2, virtual_local_rank=True).workers
    expected = {"LOCAL_RANK": ["0", "0"], "DEVICE_ID": ["0", "0"], "RANK": ["0", "1"], **visible}
    assert {name: [worker.env[name] for worker in workers] for name in expected} == expected


@pytest.mark.parametrize(
    ("caller", "changes", "notes"),
    [
        ({}, {}, ["OMP_NUM_THREADS=2 for each worker (cores shared evenly; set it to change)"]),
        ({}, {"env": (("OMP_NUM_THREADS", "4"),)}, []),
        ({"OMP_NUM_THREADS": "1", "MS_ENABLE_RECOVERY": "1"}, {}, [RECOVERY_NOTE]),
        ({"OMP_NUM_THREADS": "1", "MS_ENABLE_RECOVERY": "1"}, {"max_restarts": 1}, []),
        (
            {"OMP_NUM_THREADS": "1", "RANK": "1", "WORLD_SIZE": "3", "MS_ROLE": "MS_SCHED"},
            {},
            ["set in your environment and replaced for the workers: MS_ROLE, RANK"],
        ),
    ],
)
def test_notes_say_what_was_decided_for_the_user(caller: dict[str, str], changes: Any, notes: list[str]) -> None:
    assert list(plan_for(caller, **changes).notes) == notes


def test_preload_is_what_the_script_imports_and_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import numpy\nfrom torch import nn\n")
    script = Program("script", str(tmp_path / "train.py"))
    assert plan_for(program=script, preload=("pandas", "numpy")).hosts[0].preload == ("numpy", "torch:nn", "pandas")
    assert plan_for(program=script, start_method="exec").hosts[0].preload == ()


@pytest.mark.parametrize("name", ["pkg/train.py", "pkg/train/__main__.py"])
def test_preload_of_a_module_is_what_its_file_in_the_working_directory_imports(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("import torch\n")
    program = Program("module", "pkg.train")
    assert plan_for(program=program, working_directory=tmp_path).hosts[0].preload == ("torch",)
    assert plan_for(program=program, working_directory=tmp_path / "pkg").hosts[0].preload == ()


def test_parameter_servers_are_planned_beside_the_workers_and_have_no_rank() -> None:
    plan = plan_for(server_num=2)
    host = plan.hosts[0]
    assert [server.log_path for server in host.servers] == [f"/my jobs/log_output/server_{n}.log" for n in range(2)]
    assert host.common_env["MS_SERVER_NUM"] == "2" and not host.common_env.keys() & contract.RANK_VARIABLES
    address = {"MSRUN_SERVER_ADDRESS": "127.0.0.1"}
    assert host.servers[1].env == {"MS_ROLE": "MS_PSERVER", "MS_NODE_ID": "server_1", **address}
    assert "parameter server 1, log /my jobs/log_output/server_1.log" in render_plan(plan, as_json=False)
    assert "MS_SERVER_NUM" not in plan_for().hosts[0].common_env


def test_hosts_take_turns_at_parameter_servers_and_they_listen_where_other_hosts_reach_them() -> None:
    assignments = tuple(HostAssignment(node, f"h{node}", f"10.0.0.{node + 1}", (node,), (0,)) for node in range(2))
    found = {}
    for node in range(2):
        host = replace(HOST, address=assignments[node].address)
        fleet = Fleet(node, assignments, "10.0.0.1", "eth1")
        plan = plan_for({}, host, worker_num=2, local_worker_num=1, server_num=3, fleet=fleet)
        for server in plan.hosts[0].servers:
            found[server.index] = server.env["MSRUN_SERVER_ADDRESS"]
    assert found == {0: "10.0.0.1", 2: "10.0.0.1", 1: "10.0.0.2"}


def test_parameter_servers_need_torch() -> None:
    with pytest.raises(UsageError, match="--server_num 1: parameter servers need torch"):
        plan_for(server_num=1, host=replace(HOST, has_torch=False))


def test_a_master_address_that_is_not_loopback_is_said_not_to_be_used() -> None:
    plan = plan_for(master_addr="train-0.train")
    assert plan.master_addr == "127.0.0.1"
    assert any("--master_addr train-0.train is not used" in note for note in plan.notes)
