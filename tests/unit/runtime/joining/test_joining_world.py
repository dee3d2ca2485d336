"""The world of a process: its place from every launcher's variables, its device, and what a machine must have."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from job_runner import REPOSITORY

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime import (
    get_group_size,
    get_local_rank,
    get_local_rank_size,
    get_rank,
    init,
    is_initialized,
    release,
    requirements,
)
from msrun.runtime.joining import spec as devices
from msrun.runtime.joining.launchers import (
    find_cluster,
    find_worker,
    find_world,
    first_host,
    joining_limit_s,
    silence_limit_s,
)
from msrun.runtime.joining.spec import ALONE, Meeting, WorldSpec, derive_port
from msrun.runtime.requirements import describe_untested, warn_if_untested
from msrun.shm.process_group import register
from ranktable import build_table, write_table

OF_MSRUN = {
    "MSRUN_JOB_ID": "job",
    "MSRUN_RENDEZVOUS": "file:///tmp/store",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_precondition_transports": "6aae0a689fba5d8d-e5a17a422aa9f2a3",
    "OMPI_MCA_orte_hnp_uri": "1779499008.0;tcp://10.77.0.9,192.168.1.9:51243;tcp6://[fd77::9]:34033",
    "OMPI_MCA_orte_local_daemon_uri": "1779499008.1;tcp://10.77.0.10:50073",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.vm.0/pid.1",
}
MPIRUN_ALONE = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
MPIRUN_KEY = "mpirun 6aae0a689fba5d8d-e5a17a422aa9f2a3"
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "5,3",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
SLURM_KEY = "Slurm 77.0."
MS_ROLE = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "4",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "RANK_ID": "3",
}
SCHEDULER = Meeting(("10.0.0.1",), 8118, "MS_ROLE", "MS_SCHED_HOST", "the scheduler", may_be_foreign=True)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def by_master(key, port=29500):
    return Meeting(("10.0.0.1",), port, key, "MASTER_ADDR", may_be_foreign=True)


def meet_at(addresses, key, named_by):
    return Meeting(addresses, derive_port(key), key, named_by)


def spec(source, ranks, rendezvous, device):
    place, meeting = ("", rendezvous) if isinstance(rendezvous, Meeting) else (rendezvous, None)
    return WorldSpec(source, *ranks, place, meeting, device)


OF_MPIRUN = "OMPI_MCA_orte_hnp_uri"
ON_ONE_HOST = "file:///tmp/ompi.vm.0/pid.1/msrun_world_6aae0a689fba5d8d-e5a17a422aa9f2a3"
MPIRUN_HOSTS = ("10.77.0.9", "192.168.1.9")
IPV6_ONLY = {OF_MPIRUN: "9.0;tcp6://[fd77::9]:34033"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        ({"WORLD_SIZE": "8"}, ALONE),
        (OF_MSRUN, spec("msrun", (3, 8, 1, 4), "file:///tmp/store", None)),
        (without(OF_MSRUN, "MSRUN_RENDEZVOUS"), spec("msrun", (3, 8, 1, 4), "env://", None)),
        (TORCHRUN, spec("torchrun", (5, 8, 1, 4), "env://", None)),
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), spec("torchrun", (5, 8, 0, 8), "env://", None)),
        ({**MPIRUN, **MASTER}, spec("mpirun", (2, 4, 0, 2), by_master(MPIRUN_KEY), 0)),
        (MPIRUN, spec("mpirun", (2, 4, 0, 2), meet_at(MPIRUN_HOSTS, MPIRUN_KEY, OF_MPIRUN), 0)),
        ({**MPIRUN, **IPV6_ONLY}, spec("mpirun", (2, 4, 0, 2), meet_at(("fd77::9",), MPIRUN_KEY, OF_MPIRUN), 0)),
        (MPIRUN_ALONE, spec("mpirun", (2, 4, 2, 4), ON_ONE_HOST, 2)),
        ({**MPIRUN_ALONE, **MASTER}, spec("mpirun", (2, 4, 2, 4), by_master(MPIRUN_KEY), 2)),
        (
            without(MPIRUN_ALONE, "PMIX_SERVER_TMPDIR"),
            spec("mpirun", (2, 4, 2, 4), meet_at(("127.0.0.1",), MPIRUN_KEY, "OMPI_COMM_WORLD_LOCAL_SIZE"), 2),
        ),
        ({**SLURM, **MASTER}, spec("Slurm", (6, 8, 2, 3), by_master(SLURM_KEY), 2)),
        (SLURM, spec("Slurm", (6, 8, 2, 3), meet_at(("node08",), SLURM_KEY, "SLURM_STEP_NODELIST"), 2)),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"},
            spec("Slurm", (6, 8, 2, 8), meet_at(("127.0.0.1",), SLURM_KEY, "SLURM_STEP_NODELIST"), 2),
        ),
        (
            {**without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "MASTER_ADDR": "10.0.0.1"},
            spec("Slurm", (6, 8, 2, 4), by_master(SLURM_KEY, derive_port(SLURM_KEY)), 2),
        ),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        (MS_ROLE, spec("MS_ROLE", (3, 4, 0, 4), SCHEDULER, None)),
        ({**MS_ROLE, "DEVICE_ID": "7"}, spec("MS_ROLE", (3, 4, 0, 4), SCHEDULER, 7)),
        ({**without(MS_ROLE, "RANK_ID"), "MS_NODE_ID": "2"}, spec("MS_ROLE", (2, 4, 0, 4), SCHEDULER, None)),
        ({**MS_ROLE, "MS_NODE_ID": "node-b"}, spec("MS_ROLE", (3, 4, 0, 4), SCHEDULER, None)),
        (without(MS_ROLE, "RANK_ID"), spec("MS_ROLE", (-1, 4, 0, 4), SCHEDULER, None)),
        ({**MS_ROLE, "MS_ROLE": "MS_SCHED"}, ALONE),
    ],
    ids=lambda value: value.source if isinstance(value, WorldSpec) else "",
)
def test_every_launcher_is_understood(environ, expected):
    assert find_world(environ) == expected


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({**MS_ROLE, **SLURM, **MPIRUN, **TORCHRUN, **OF_MSRUN}, "msrun"),
        ({**SLURM, **MPIRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({**SLURM, **MPIRUN, **TORCHRUN, "RANK": "2"}, "torchrun"),
        ({**MS_ROLE, **SLURM, **MPIRUN, "RANK_TABLE_FILE": "/x/table.json"}, "MS_ROLE"),
        ({**SLURM, **MPIRUN, "RANK_TABLE_FILE": "/x/table.json", "RANK_ID": "0"}, "mpirun"),
        ({**SLURM, "RANK_TABLE_FILE": "/x/table.json", "RANK_ID": "0"}, "Slurm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nearest_launcher_wins_when_several_left_variables(environ, source):
    assert find_world(environ).source == source


FIRST_OF_MPIRUN = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({**TORCHRUN, "RANK": "eight"}, "RANK='eight': a whole number is expected; start the job with msrun"),
        (without(OF_MSRUN, "WORLD_SIZE"), "WORLD_SIZE=None: a whole number"),
        ({**OF_MSRUN, "LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5'"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of a world of 8 (torchrun variables): must be 0 to 7; stale variables"),
        ({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "rank 0 of a world of 0"),
        ({**TORCHRUN, **MPIRUN}, "RANK=5, but mpirun says OMPI_COMM_WORLD_RANK=2: left over in the shell? unset RANK"),
        (without(MPIRUN, OF_MPIRUN), "MASTER_ADDR is not set: mpirun -x MASTER_ADDR=ADDRESS_OF_THE_FIRST_HOST, or"),
        (FIRST_OF_MPIRUN, "MASTER_ADDR is not set: rank 0 does not run on mpirun's own host; mpirun -x MASTER_ADDR="),
        ({**MPIRUN, **MASTER, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: a port from 1 to 65535 is expected"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "MASTER_ADDR is not set: export it, the address of rank 0's host, bef"),
        ({**SLURM, "SLURM_PROCID": "0"}, "MASTER_ADDR is not set: export it, the address of rank 0's host, before sr"),
        ({"RANK_ID": "1", "RANK_SIZE": "8"}, "RANK_ID=1 and RANK_SIZE=8 are set, but not RANK_TABLE_FILE: export it"),
        ({"RANK_TABLE_FILE": "/x", "RANK_SIZE": "8"}, "RANK_TABLE_FILE and RANK_SIZE=8 are set, but not RANK_ID: exp"),
        ({**MS_ROLE, "RANK_ID": "4"}, "rank 4 of a world of 4 (MS_ROLE variables)"),
        ({**MS_ROLE, "RANK_ID": "-1"}, "RANK_ID=-1: 0 or more is expected, or unset it to be given a rank"),
        ({**MS_ROLE, "MS_NODE_ID": "2"}, "RANK_ID=3, but MS_NODE_ID=2: make them equal, or unset one"),
        (without(MS_ROLE, "MS_SCHED_PORT"), "MS_SCHED_PORT=None"),
        ({**MS_ROLE, "MS_SCHED_PORT": "0"}, "MS_SCHED_PORT=0: a port from 1 to 65535 is expected"),
        ({**MS_ROLE, "MS_WORKER_NUM": "0"}, "rank 3 of a world of 0"),
        ({**MS_ROLE, "MS_ROLE": "MS_WORKERS"}, "MS_ROLE='MS_WORKERS': MS_WORKER, MS_SCHED or MS_PSERVER is expected ("),
        (without(MS_ROLE, "MS_ROLE", "RANK_ID"), "MS_WORKER_NUM=4 and MS_SCHED_HOST=10.0.0.1 and MS_SCHED_PORT=8118"),
    ],
)
def test_contradictions_and_words_are_refused_with_a_remedy(environ, text):
    with pytest.raises(WorldError) as caught:
        find_world(environ)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def table(tmp_path):
    """Ranks 0 and 1 on devices 4 and 5 of 10.0.0.2, ranks 2 to 4 on those of 10.0.0.10."""
    path = tmp_path / "table.json"
    write_table(path, build_table([("10.0.0.2", (4, 5)), ("10.0.0.10", (0, 1, 2))], order="given"))
    return {"RANK_TABLE_FILE": str(path), "RANK_ID": "3"}


def test_rank_table_tells_place_device_and_where_to_meet(table):
    found = find_world({**table, "DEVICE_ID": "1", "RANK_SIZE": "5"})
    assert found.meeting is not None
    assert found == spec("rank table", (3, 5, 1, 3), found.meeting, 1)
    assert (found.meeting.addresses, found.meeting.keeper) == (("10.0.0.2",), "rank 0")
    assert found.meeting.port == derive_port(found.meeting.key)
    assert find_world(table) == found
    first = find_world({"MINDSPORE_HCCL_CONFIG_PATH": table["RANK_TABLE_FILE"], "RANK_ID": "0"})
    assert (first.device_id, first.local_rank, first.local_world_size) == (4, 0, 2)
    assert first.meeting is not None and first.meeting.key == found.meeting.key
    assert find_world({**table, **MASTER}).meeting == by_master(found.meeting.key)


def test_tables_of_one_server_meet_on_loopback_each_at_a_port_of_its_own(tmp_path):
    meetings = []
    for name in ("a", "b"):
        write_table(tmp_path / name, build_table([("10.0.0.2", 2)]))
        meetings.append(find_world({"RANK_TABLE_FILE": str(tmp_path / name), "RANK_ID": "1"}).meeting)
    assert [meeting.addresses for meeting in meetings] == [("127.0.0.1",)] * 2
    assert len({meeting.port for meeting in meetings}) == 2


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK_ID": "5"}, "RANK_ID=5: RANK_TABLE_FILE {path} has ranks 0 to 4 only; correct it"),
        (
            {"RANK_SIZE": "8"},
            "RANK_SIZE=8, but RANK_TABLE_FILE {path} has 5 ranks: make them equal, or unset RANK_SIZE",
        ),
        ({"DEVICE_ID": "3"}, "DEVICE_ID=3 with RANK_ID=3, but RANK_TABLE_FILE {path} gives that rank device 1 of serv"),
        ({"RANK_TABLE_FILE": "/no/table.json"}, "RANK_TABLE_FILE /no/table.json: cannot read /no/table.json"),
    ],
)
def test_what_contradicts_the_rank_table_is_refused(table, environ, text):
    with pytest.raises(WorldError) as caught:
        find_world({**table, **environ})
    assert text.format(path=table["RANK_TABLE_FILE"]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_first_host_of_a_folded_list():
    hosts = {"node": "node", "b,a": "b", "node[08-16,20],login": "node08", "node[7,1-3]": "node7", "": ""}
    hosts |= {"rack[2-3]n[01,05].x": "rack2n01.x"}
    assert {folded: first_host(folded) for folded in hosts} == hosts


def test_scheduler_and_parameter_servers_are_processes_with_that_role_and_no_launcher():
    scheduler = {**without(MS_ROLE, "RANK_ID"), "MS_ROLE": "MS_SCHED"}
    assert find_cluster(scheduler, "MS_SCHED") == (SCHEDULER, 4, 0)
    here = replace(SCHEDULER, addresses=("127.0.0.1",))
    assert find_cluster(without(scheduler, "MS_SCHED_HOST"), "MS_SCHED") == (here, 4, 0)
    assert find_cluster(MS_ROLE, "MS_SCHED") is None
    assert find_cluster({**scheduler, **TORCHRUN}, "MS_SCHED") is None
    with pytest.raises(WorldError, match="MS_WORKER_NUM=0: at least 1"):
        find_cluster({**scheduler, "MS_WORKER_NUM": "0"}, "MS_SCHED")
    server = {**scheduler, "MS_ROLE": "MS_PSERVER", "MS_SERVER_NUM": "2"}
    assert find_cluster(server, "MS_PSERVER") == (SCHEDULER, 4, 2)
    assert find_cluster(server, "MS_SCHED") is None and find_worker(server) is None
    with pytest.raises(WorldError, match="MS_SERVER_NUM=0: at least 1"):
        find_cluster(without(server, "MS_SERVER_NUM"), "MS_PSERVER")


def test_limits_come_from_mindspores_variables():
    assert joining_limit_s({}, 7.5) == 7.5
    assert joining_limit_s({"MS_TOPO_TIMEOUT": "20"}, 7.5) == 20
    assert joining_limit_s({"MS_TOPO_TIMEOUT": "-1"}, 7.5) == float("inf")
    assert silence_limit_s({}) == 30
    with pytest.raises(WorldError, match="MS_NODE_TIMEOUT=0: at least 1"):
        silence_limit_s({"MS_NODE_TIMEOUT": "0"})


def run_python(program, **environ):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **environ}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)


def test_process_alone_opens_nothing_and_has_rank_0():
    for _ in range(2):
        assert not is_initialized()
        init()
        assert is_initialized() and not dist.is_initialized()
        assert (get_rank(), get_group_size(), get_local_rank(), get_local_rank_size()) == (0, 1, 0, 1)
        with pytest.raises(WorldError, match=r"release\(\) first"):
            init()
        release()
        release()


def test_world_that_nobody_else_joins_is_an_error_within_the_time_limit(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=r"rank 1 of 2 could not join at env:// with shm"):
        init(timeout_s=1)
    assert not is_initialized()


def test_device_of_a_rank_is_that_of_its_backend():
    kinds = {"shm": "cpu", "gloo": "cpu", "nccl": "cuda", "cpu:gloo,cuda:nccl": "cuda", "cuda:gloo,cpu:gloo": "cuda"}
    kinds |= {"hccl": "npu", "cpu:gloo,npu:hccl": "npu"}
    assert {backend: devices.kind_of(backend) for backend in kinds} == kinds


def test_device_of_a_group_that_the_script_made_is_the_one_that_it_has_chosen(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 2))
    monkeypatch.setattr(devices.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert devices.device_of_group() == torch.device("cuda", 2)
    monkeypatch.setattr(devices.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert devices.device_of_group() == torch.device("cpu")


def test_rank_makes_its_device_the_current_one_before_it_joins(monkeypatch):
    chosen = []
    of_cuda = SimpleNamespace(device_count=lambda: 4, set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: of_cuda if kind == "cuda" else None)
    place = WorldSpec("msrun", 5, 8, 1, 4, "")
    assert devices.use_device(place, "gloo") == torch.device("cpu")
    assert devices.use_device(place, "cpu:gloo,cuda:gloo") == torch.device("cuda", 1)
    monkeypatch.setenv("DEVICE_ID", "3")
    devices.use_device(place, "nccl")
    assert chosen == [1, 3]
    monkeypatch.setenv("DEVICE_ID", "4")
    with pytest.raises(WorldError, match="rank 5 is to use cuda device 4, and this host has 4: start at most one"):
        devices.use_device(place, "nccl")


@pytest.mark.parametrize(
    ("target", "has_cuda", "chosen"),
    [("cpu", True, "gloo"), ("gpu", True, "cpu:gloo,cuda:nccl"), ("", True, "cpu:gloo,cuda:nccl"), ("", False, "gloo")],
)
def test_backend_follows_the_device_of_the_job(target, has_cuda, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert devices.choose_backend({"MSRUN_DEVICE_TARGET": target}, 1) == chosen


@pytest.mark.slow
def test_ascend_without_torch_npu_is_one_line_with_the_remedy():
    program = "from msrun.runtime import init\ninit()\n"
    done = run_python(program, RANK="0", WORLD_SIZE="2", MSRUN_DEVICE_TARGET="ascend")
    assert done.returncode == WorldError.exit_code
    last = done.stderr.splitlines()[-1]
    assert "--device_target ascend needs torch_npu, and it cannot be imported (No module named 'torch_npu')" in last
    assert last.endswith("or give --device_target cpu")


def test_shm_beside_another_device_is_refused_before_anybody_joins():
    with pytest.raises(WorldError, match="shm carries tensors of the CPU alone; give cpu:gloo beside other devices"):
        devices.check_backend("cpu:shm,cuda:nccl")
    devices.check_backend("shm")


def test_versions_that_are_not_tested_are_named_with_the_tested_ones():
    for version in (*contract.TORCH_VERSIONS, "2.15.0+cpu", "2.12.1", "a build of mine", ""):
        assert describe_untested(version) == ""
    for version in ("2.10.1", "2.16.0+cu130", "3.0", "1.13"):
        assert (
            describe_untested(version) == f"torch {version} is not tested with msrun.runtime; tested are 2.12 to 2.15"
        )


@pytest.mark.parametrize(
    "who", [{}, {"MSRUN_JOB_ID": "fork server"}, {"MSRUN_JOB_ID": "j", "RANK": "3"}, {"RANK": "1"}]
)
def test_rank_0_alone_warns_and_once(monkeypatch, who):
    monkeypatch.setattr(requirements, "_has_warned", False)
    monkeypatch.setattr(requirements, "_torch_version", lambda: "2.99.0")
    for name, value in who.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings() if who else pytest.warns(RuntimeWarning, match="torch 2.99.0 is not tested"):
        warnings.simplefilter("error" if who else "always")
        warn_if_untested()
    if not who:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_untested()


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
"""


def test_missing_torch_is_one_line_with_the_remedy_and_can_be_caught_as_an_import_error():
    done = run_python(WITHOUT_TORCH + "from msrun.runtime import init")
    assert done.returncode == 1
    assert done.stderr == (
        f"MissingPackageError: msrun.runtime needs torch, not installed for {sys.executable}; "
        "run: pip install 'msrun[runtime]'\n"
    )
    done = run_python(WITHOUT_TORCH + "try:\n    import msrun.runtime\nexcept ImportError:\n    1 / 0")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr, "other errors look as ever"
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_torch_does_not_hook_its_recorder_into_groups_of_shm(monkeypatch):
    recording = {"gloo"}
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", recording, raising=False)
    register()
    assert recording == {"gloo", "shm"}
    assert dist.Backend.backend_capability["shm"] == ["cpu"]
