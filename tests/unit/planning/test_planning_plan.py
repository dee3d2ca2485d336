"""Plans of a job here and of a job of hosts, as text, JSON and page: compared with files, and their rules."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plans import plan_of, spec_of

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.build import RECOVERY_NOTE, build_remote_plan
from msrun.planning.hosts import Fleet, HostAssignment, HostEntry
from msrun.planning.masking import MASK
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan import render_plan
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec
from ranktable.hosts.hostfile import parse_hostfile

HOST = HostFacts("node-a", "127.0.0.1", tuple(range(8)))


def plan_for(caller=None, host=HOST, fleet=None, **changes):
    program = Program("script", "/my jobs/train.py", ("--lr", "0.1", "it's"))
    settings = {"program": program, "worker_num": 3, "local_worker_num": 3, **changes}
    return plan_of(spec_of(Path("/my jobs"), **settings), host, caller, fleet=fleet)


def full_plan():
    """Return a plan in which every part is filled."""
    return plan_for(
        {"RANK": "7", "MASTER_ADDR": "10.0.0.9", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0"},
        env=(("API_KEY", "hidden"), ("A", "b c")),
        preload=("pandas",),
        tail_ranks=(0, 2),
        worker_log_name="w_{hostname}_{ip}",
        grace_s=2.5,
    )


def plan_of_several():
    """Return the plan of the second of two unequal hosts."""
    assignments = (
        HostAssignment(0, "node-b", "10.0.0.1", (0, 1, 2, 3), (0, 1, 2, 3)),
        HostAssignment(1, "node-a", "10.0.0.2", (4, 6), (0, 1)),
        HostAssignment(2, "node-c", "10.0.0.3", (5,), (7,)),
    )
    host = HostFacts("node-a", "10.0.0.2", tuple(range(8)))
    fleet = Fleet(1, assignments, "10.0.0.1", "eth1")
    return plan_for({}, host, worker_num=7, local_worker_num=2, node_rank=1, fleet=fleet)


@pytest.mark.parametrize(("has_torch", "expected"), [(True, "True"), (False, "False")])
def test_workers_expect_torchs_store_only_of_a_scheduler_that_has_torch(has_torch, expected):
    plan = plan_for({}, replace(HOST, has_torch=has_torch), worker_num=2, local_worker_num=2)
    assert plan.hosts[0].common_env["TORCHELASTIC_USE_AGENT_STORE"] == expected


def test_device_of_a_table_that_the_host_has_not_is_refused():
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
def test_with_a_virtual_local_rank_each_worker_sees_its_device_as_number_0(host, visible):
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
            {"OMP_NUM_THREADS": "1", "RANK": "1", "WORLD_SIZE": "3"},
            {},
            ["set in your environment and replaced for the workers: RANK"],
        ),
    ],
)
def test_notes_say_what_was_decided_for_the_user(caller, changes, notes):
    assert list(plan_for(caller, **changes).notes) == notes


def test_preload_is_what_the_script_imports_and_what_is_named(tmp_path):
    (tmp_path / "train.py").write_text("import numpy\nfrom torch import nn\n")
    script = Program("script", str(tmp_path / "train.py"))
    assert plan_for(program=script, preload=("pandas", "numpy")).hosts[0].preload == ("numpy", "torch:nn", "pandas")
    assert plan_for(program=script, start_method="exec").hosts[0].preload == ()


@pytest.mark.parametrize("name", ["pkg/train.py", "pkg/train/__main__.py"])
def test_preload_of_a_module_is_what_its_file_in_the_working_directory_imports(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("import torch\n")
    program = Program("module", "pkg.train")
    assert plan_for(program=program, working_directory=tmp_path).hosts[0].preload == ("torch",)
    assert plan_for(program=program, working_directory=tmp_path / "pkg").hosts[0].preload == ()


def test_parameter_servers_are_planned_beside_the_workers_and_have_no_rank():
    plan = plan_for(server_num=2)
    host = plan.hosts[0]
    assert [server.log_path for server in host.servers] == [f"/my jobs/log_output/server_{n}.log" for n in range(2)]
    assert host.common_env["MS_SERVER_NUM"] == "2" and not host.common_env.keys() & contract.RANK_VARIABLES
    address = {"MSRUN_SERVER_ADDRESS": "127.0.0.1"}
    assert host.servers[1].env == {"MS_ROLE": "MS_PSERVER", "MS_NODE_ID": "server_1", **address}
    assert "parameter server 1, log /my jobs/log_output/server_1.log" in render_plan(plan, as_json=False)
    assert "MS_SERVER_NUM" not in plan_for().hosts[0].common_env


def test_hosts_take_turns_at_parameter_servers_and_they_listen_where_other_hosts_reach_them():
    assignments = tuple(HostAssignment(node, f"h{node}", f"10.0.0.{node + 1}", (node,), (0,)) for node in range(2))
    found = {}
    for node in range(2):
        host = replace(HOST, address=assignments[node].address)
        fleet = Fleet(node, assignments, "10.0.0.1", "eth1")
        plan = plan_for({}, host, worker_num=2, local_worker_num=1, server_num=3, fleet=fleet)
        for server in plan.hosts[0].servers:
            found[server.index] = server.env["MSRUN_SERVER_ADDRESS"]
    assert found == {0: "10.0.0.1", 2: "10.0.0.1", 1: "10.0.0.2"}


def test_parameter_servers_need_torch():
    with pytest.raises(UsageError, match="--server_num 1: parameter servers need torch"):
        plan_for(server_num=1, host=replace(HOST, has_torch=False))


def test_a_master_address_that_is_not_loopback_is_said_not_to_be_used():
    plan = plan_for(master_addr="train-0.train")
    assert plan.master_addr == "127.0.0.1"
    assert any("--master_addr train-0.train is not used" in note for note in plan.notes)


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


def remote_plan(hostfile=HOSTFILE, caller=CALLER, **changes):
    entries = parse_hostfile(hostfile, HostEntry, "--hostfile f")
    settings = {
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


def rendered(plan, *, as_json):
    return render_plan(plan, as_json=as_json).replace(sys.executable, "PYTHON") + "\n"


FROZEN = {"plan": full_plan, "plan_several": plan_of_several, "plan_hosts": remote_plan}


@pytest.mark.parametrize("name", ["plan.json", "plan.txt", "plan_several.txt", "plan_hosts.txt", "plan_hosts.json"])
def test_plans_as_text_and_as_json_are_the_frozen_ones(golden, name):
    plan, _, form = name.partition(".")
    golden(name, rendered(FROZEN[plan](), as_json=form == "json"))


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_masked_wherever_they_stand(as_json):
    plan = remote_plan()
    text = rendered(plan, as_json=as_json)
    assert "hidden" not in text and MASK in text
    assert plan.secrets == ("hidden",)
    assert plan.forwarded["HF_TOKEN"] == "hidden"


def test_secret_that_nobody_named_stays_and_is_told():
    plan = remote_plan(forward_env=())
    assert "HF_TOKEN" not in plan.forwarded
    assert "secrets stay here: HF_TOKEN; --env HF_TOKEN gives it to all workers" in plan.notes
    assert not any("secrets" in note for note in remote_plan(forward_env=(), env=(("HF_TOKEN", "x"),)).notes)


def test_what_only_a_host_can_know_is_not_made_up():
    plan = remote_plan(caller={})
    open_names = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MSRUN_RENDEZVOUS", "MSRUN_DEVICE_TARGET"}
    assert not open_names & set(plan.hosts[0].common_env)
    (note,) = [note for note in plan.notes if note.startswith("decided on the hosts")]
    assert all(name in note for name in open_names)
    known = remote_plan(caller={"OMP_NUM_THREADS": "7"}, device_target="cpu", master_addr="10.0.0.1")
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
def test_scheduler_is_on_the_first_host(hostfile, master_addr, expected):
    assert remote_plan(hostfile, master_addr=master_addr).master_addr == expected


def test_ranks_and_devices_of_a_table_are_those_of_the_plan():
    table = (HostAssignment(0, "b", "10.0.0.2", (0, 3), (4, 5)), HostAssignment(1, "a", "10.0.0.1", (2, 1), (0, 1)))
    plan = remote_plan("h1:2\nh2:2", table_hosts=table, rank_table_file=Path("/t.json"))
    assert [(worker.global_rank, worker.device_id) for worker in plan.hosts[0].workers] == [(0, 4), (3, 5)]
    assert [(worker.global_rank, worker.device_id) for worker in plan.hosts[1].workers] == [(2, 0), (1, 1)]
    assert (plan.master_addr, plan.rank_table_file) == ("10.0.0.2", "/t.json")
