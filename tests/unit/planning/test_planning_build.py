"""The plan of jobs that are bound, and of jobs on accelerators that are renumbered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import plan_of, spec_of

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.build import plan_early_server
from msrun.planning.environment import (
    POSING_FOLDER,
    SET_LATE,
    blas_threads,
    common_environment,
    of_rank,
    server_environment,
    settle_mindspore,
)
from msrun.planning.hosts import Fleet, HostAssignment
from msrun.planning.placement.host import Cpu, HostFacts, Topology
from msrun.planning.plan import render_plan
from msrun.planning.settings import Setting, option_variables, settings_note, without_option_variables
from msrun.planning.spec import CoreBinding

TWO_NODES = Topology(
    tuple(Cpu(n, n // 3 % 2, 0, n % 6) for n in range(12)),
    tuple(range(12)),
    memory_nodes=(0, 1),
    device_nodes={"gpu": {"0": 0, "1": 0, "2": 1, "3": 1}},
)
"""Six cores of two threads on two nodes: 0-2 and 6-8, 3-5 and 9-11."""
PLACED = HostFacts("h", "127.0.0.1", tuple(range(12)), gpus=("3", "1"), topology=TWO_NODES)


def plan_for(host=PLACED, caller=None, **changes):
    return plan_of(spec_of(Path("/j"), **changes), host, caller)


def test_plan_shows_the_physical_device_beside_the_one_that_the_worker_sees():
    plan = plan_for()
    assert [(worker.device_id, worker.physical_device, worker.env["DEVICE_ID"]) for worker in plan.workers] == [
        (0, "3", "0"),
        (1, "1", "1"),
    ]
    text = render_plan(plan, as_json=False)
    assert "  rank  local  device  physical  log\n     0      0       0         3  /j/log_output/worker_0.log\n" in text
    assert json.loads(render_plan(plan, as_json=True))["hosts"][0]["workers"][0]["physical_device"] == "3"


def test_cores_follow_the_physical_device():
    plan = plan_for(bind_core=CoreBinding())
    assert [worker.cpus for worker in plan.workers] == [(3, 4, 5, 9, 10, 11), (0, 1, 2, 6, 7, 8)]
    text = render_plan(plan, as_json=False)
    assert "     0      0       0         3  3-5,9-11  /j/log_output/worker_0.log\n" in text
    assert "  binding of rank 0: an even share near its device: NUMA node 1\n" in text
    assert "memory" not in text


def test_numa_binds_memory_and_the_plan_shows_it():
    plan = plan_for(bind_numa=True)
    assert [worker.memory_nodes for worker in plan.workers] == [(1,), (0,)]
    assert "  rank  local  device  physical      cpus  memory  log\n" in render_plan(plan, as_json=False)


def test_dict_takes_physical_numbers():
    core = CoreBinding(is_auto=False, devices={3: (0, 6), 1: (1, 7, 2, 8)}, scheduler=(11,))
    plan = plan_for(bind_core=core)
    assert [worker.cpus for worker in plan.workers] == [(0, 6), (1, 7, 2, 8)]
    assert plan.hosts[0].scheduler_cpus == (11,)
    assert "  binding of the scheduler: CPU 11\n" in render_plan(plan, as_json=False)
    assert plan.hosts[0].common_env["OMP_NUM_THREADS"] == "1"
    assert [worker.env.get("OMP_NUM_THREADS") for worker in plan.workers] == [None, "2"]
    with pytest.raises(UsageError, match="'device4' is no device here; there are devices 0-3"):
        plan_for(bind_core=CoreBinding(is_auto=False, devices={4: (0,)}))


@pytest.mark.parametrize("changes", [{"caller": {"OMP_NUM_THREADS": "5"}}, {"env": (("OMP_NUM_THREADS", "5"),)}])
def test_an_own_number_of_threads_is_kept_for_all(changes):
    plan = plan_for(bind_core=CoreBinding(is_auto=False, devices={3: (0,), 1: (1, 2)}), **changes)
    assert [worker.env.get("OMP_NUM_THREADS") for worker in plan.workers] == [None, None]
    assert not any("OMP_NUM_THREADS" in note for note in plan.notes)


def test_quota_of_the_cgroup_limits_the_threads():
    limited = Topology(TWO_NODES.cpus, TWO_NODES.allowed, quota_cores=4.5)
    plan = plan_for(HostFacts("h", "127.0.0.1", TWO_NODES.allowed, topology=limited))
    assert plan.hosts[0].common_env["OMP_NUM_THREADS"] == "2"
    assert plan.notes == (
        "OMP_NUM_THREADS=2 for each worker (its part of the cgroup's limit of 4.5 CPUs; set it to change)",
    )


@pytest.mark.parametrize(
    ("asked", "method", "text"),
    [
        ("auto", "exec", "OMP_PLACES binds whole processes: workers start by exec, each for itself"),
        ("fork", "fork", "--start_method fork with OMP_PLACES: OpenMP binds the fork server"),
        ("exec", "exec", ""),
    ],
)
def test_openmp_that_binds_by_itself_keeps_workers_from_forking(asked, method, text):
    plan = plan_for(start_method=asked, env=(("OMP_PLACES", "cores"),), preload=("torch",))
    assert plan.hosts[0].start_method == method
    assert plan.hosts[0].preload == (() if method == "exec" else ("torch",))
    notes = [note for note in plan.notes if "OMP_PLACES" in note]
    assert len(notes) == bool(text)
    assert all(text in note for note in notes)


HOST = HostFacts("node-a", "10.0.0.2", tuple(range(8)))
ASSIGNMENTS = (
    HostAssignment(0, "node-b", "10.0.0.1", (0, 1), (0, 1)),
    HostAssignment(1, "node-a", "10.0.0.2", (2, 3), (0, 1)),
)
OF_TWO = {"worker_num": 4, "node_rank": 1}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import json\nimport yaml\nimport torch.nn\nfrom msrun.runtime import init\n")
    return path


def early(spec, caller=None):
    return plan_early_server(spec, HOST, caller or {}, "JOB")


@pytest.mark.parametrize(
    ("caller", "changes"),
    [
        ({}, {}),
        ({"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "ib0", "OPENBLAS_NUM_THREADS": "3"}, {}),
        ({"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "old", "MSRUN_JOB_ID": "outer"}, {}),
        ({"PYTHONFAULTHANDLER": "", "TORCH_GLOO_LAZY_INIT": "0"}, {"env": (("OMP_NUM_THREADS", "3"), ("A", "b"))}),
        ({}, {"env": (("LD_LIBRARY_PATH", "/lib"), ("WORLD_SIZE", "1")), "max_restarts": 2}),
    ],
    ids=["nothing set", "threads and interface", "inside another job", "given words", "libraries"],
)
def test_only_what_no_import_reads_is_told_to_the_server_later(script, caller, changes):
    spec = spec_of(script.parent, **OF_TWO, **changes)
    server = early(spec, caller)
    assert server is not None
    fleet = Fleet(1, ASSIGNMENTS, "10.0.0.1", "eth1")
    plan = plan_of(spec, HOST, caller, fleet=fleet)
    known = server_environment(caller, plan.hosts[0].common_env)
    told = {name for name in {*known, *server.environment} if known.get(name) != server.environment.get(name)}
    assert told
    assert told <= SET_LATE
    assert server.environment["MSRUN_JOB_ID"] == "JOB"
    assert server.working_directory == plan.hosts[0].working_directory


TORCH_ONLY = HostFacts("node-a", "127.0.0.1", tuple(range(8)))
REAL = replace(TORCH_ONLY, mindspore_version="2.10.0")
NEITHER = replace(TORCH_ONLY, has_torch=False)


def script_with(folder, text, **changes):
    (folder / "train.py").write_text(text)
    return spec_of(folder, **changes)


@pytest.mark.parametrize(
    ("text", "host", "kind"),
    [
        ("import mindspore as ms", REAL, "real"),
        ("def main():\n    from mindspore.communication import init", REAL, "real"),
        ("import model", REAL, "real"),
        ("from layers.dense import Dense", REAL, "real"),
        ("import mindspore", TORCH_ONLY, "torch"),
        ("import mindspore", NEITHER, "none"),
        ("import msrun.mindspore as ms", REAL, "none"),
    ],
)
def test_a_script_that_imports_mindspore_gets_the_one_that_is_there(tmp_path, text, host, kind):
    (tmp_path / "model.py").write_text("import train\nfrom mindspore import nn\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "dense.py").write_text("from .. import model\n")
    assert settle_mindspore(script_with(tmp_path, text), host).mindspore == kind


def test_the_option_decides_and_names_what_is_missing(tmp_path):
    spec = script_with(tmp_path, "import mindspore")
    assert settle_mindspore(replace(spec, mindspore="torch"), REAL).mindspore == "torch"
    assert settle_mindspore(replace(spec, mindspore="none"), REAL).mindspore == "none"
    with pytest.raises(UsageError, match="--mindspore real: this Python has no mindspore; pip install mindspore"):
        settle_mindspore(replace(spec, mindspore="real"), TORCH_ONLY)
    with pytest.raises(UsageError, match="--mindspore torch: this Python has no torch"):
        settle_mindspore(replace(spec, mindspore="torch"), NEITHER)


def test_workers_of_real_mindspore_meet_at_its_scheduler_beside_the_store_of_torch(tmp_path):
    spec = script_with(tmp_path, "import numpy, mindspore", cluster_time_out_s=77)
    plan = plan_of(spec, REAL, master_port=4000)
    host = plan.hosts[0]
    assert host.start_method == "exec"
    assert host.common_env[contract.MASTER_PORT] == "4000"
    assert host.common_env[contract.MS_SCHED_PORT] == "4001"
    assert host.common_env[contract.MS_TOPO_TIMEOUT] == "77"
    assert host.mindspore_scheduler == {"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "sched", "RANK_ID": "0"}
    assert any(note.startswith("mindspore 2.10.0 of this environment") for note in plan.notes)
    assert plan.to_json()["hosts"][0]["mindspore_scheduler"]["MS_ROLE"] == "MS_SCHED"


def test_without_mindspore_its_name_stands_for_ours_behind_what_the_user_has_on_the_path(tmp_path):
    spec = script_with(tmp_path, "import mindspore\nfrom mindspore import nn\nimport numpy\n")
    plan = plan_of(spec, TORCH_ONLY, {"PYTHONPATH": "/a:/b"}, master_port=4000)
    host = plan.hosts[0]
    assert host.common_env["PYTHONPATH"] == f"/a:/b:{POSING_FOLDER}"
    assert host.preload == ("msrun.mindspore", "numpy")
    assert host.common_env[contract.MS_SCHED_PORT] == "4000"
    assert not host.mindspore_scheduler
    assert "mindspore is msrun.mindspore, on torch; mindspore is not installed" in plan.notes
    assert not any("PYTHONPATH" in note for note in plan.notes)
    early = plan_early_server(spec, TORCH_ONLY, {}, "JOB")
    assert early is not None
    assert early.environment["PYTHONPATH"] == str(POSING_FOLDER)


# -- the environment as a difference: whose value wins, what is hidden, what the fork server gets ---------------------

SPEC = spec_of(Path("/w"), has_trace=True)


def build(caller=None, extra=None, spec=SPEC):
    return common_environment(
        spec,
        None,
        caller=caller or {},
        extra=extra or {},
        job_id="j",
        run_dir="/r",
        master=("127.0.0.1", 5),
        target="cpu",
        threads=3,
        server_token="secret",
    )


def test_a_value_that_names_a_number_of_the_worker_has_that_number():
    env = (("CACHE", "/tmp/{rank}/{local_rank}_{node_rank}_{rank}"), ("JSON", '{"rank": 1, "x": {}}'), ("PLAIN", "a"))
    assert of_rank(env, {"rank": 9, "local_rank": 1, "node_rank": 2}) == {"CACHE": "/tmp/9/1_2_9"}


@pytest.mark.parametrize(
    ("caller", "extra", "name", "value"),
    [
        ({}, {}, "OMP_NUM_THREADS", "3"),
        ({"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "9"}, "OMP_NUM_THREADS", "9"),
        ({"PYTHONFAULTHANDLER": "0"}, {}, "PYTHONFAULTHANDLER", None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {}, "GLOO_SOCKET_IFNAME", None),
        ({}, {"GLOO_SOCKET_IFNAME": "eth1"}, "GLOO_SOCKET_IFNAME", "eth1"),
        ({"TORCH_GLOO_LAZY_INIT": "0"}, {}, "TORCH_GLOO_LAZY_INIT", "0"),
        ({"WORLD_SIZE": "99"}, {}, "WORLD_SIZE", "2"),
    ],
)
def test_who_wins(caller, extra, name, value):
    assert build(caller, extra).get(name) == value


def test_fork_server_gets_the_common_environment_without_ranks_and_with_one_blas_thread():
    caller = {"RANK": "3", "DEVICE_ID": "1", "HOME": "/h", "OPENBLAS_NUM_THREADS": "8"}
    env = server_environment(caller, {"WORLD_SIZE": "2"})
    assert env == {"HOME": "/h", "WORLD_SIZE": "2", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("caller", "common", "count"),
    [
        ({}, {"OMP_NUM_THREADS": "4"}, 4),
        ({"OPENBLAS_NUM_THREADS": "many"}, {"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, {}, 1),
    ],
)
def test_blas_threads_follow_the_variables(caller, common, count):
    assert blas_threads(caller, common) == count


NAMES = ["worker_num", "log_dir", "grace", "device_target", "config"]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, {}),
        ({"MSRUN_GRACE": "3", "GRACE": "4", "HOME": "/h"}, {"grace": "3"}),
        ({"MSRUN_GRACE": ""}, {}),
        ({"MSRUN_LOG_DIR": "l", "MSRUN_DEVICE_TARGET": "cpu", "MSRUN_JOB_ID": "j"}, {}),
        ({"MSRUN_LOG_DIR": "l", "MSRUN_GRACE": "3", "MSRUN_JOB_ID": "j"}, {"grace": "3"}),
        ({"MSRUN_RENDEZVOUS": "file:///x", "MSRUN_PROGRESS": "x", "MSRUN_STACK_SIGNAL": "42"}, {}),
    ],
)
def test_variables_that_are_settings(environ, found):
    assert option_variables(environ, NAMES) == found


@pytest.mark.parametrize(
    ("name", "meant"), [("MSRUN_WORKER_NMU", "MSRUN_WORKER_NUM"), ("MSRUN_VERIFI", "MSRUN_VERIFY")]
)
def test_misspelled_variable_is_refused_with_the_name_that_was_meant(name, meant):
    with pytest.raises(UsageError) as caught:
        option_variables({name: "1"}, NAMES)
    assert str(caught.value) == f"{name}: no such setting (did you mean {meant}?); correct the variable or unset it"


def test_workers_do_not_inherit_settings_but_keep_the_rest():
    environ = {"MSRUN_GRACE": "3", "MSRUN_LOG_DIR": "l", "MSRUN_CONFIG": "c", "MSRUN_IMAGE": "x", "HOME": "/h"}
    assert without_option_variables(environ, NAMES) == {"MSRUN_IMAGE": "x", "HOME": "/h"}


SETTINGS = [
    Setting("grace", 3.0, "MSRUN_GRACE"),
    Setting("env", ["A=b c", "B=1"], "job.yaml"),
    Setting("worker_num", 2, "command line"),
]


def test_note_names_what_does_not_stand_on_the_command_line():
    assert settings_note(SETTINGS) == ["settings: grace=3 (MSRUN_GRACE), env='A=b c' B=1 (job.yaml)"]
    assert settings_note(SETTINGS[2:]) == []
    assert settings_note([Setting("env", ["A=b\nc"], "MSRUN_ENV")]) == ["settings: env='A=b\\nc' (MSRUN_ENV)"]
