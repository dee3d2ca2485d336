"""What a fork server is started with before its job is known, and that it is as good as one that knew it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrun.planning.build import EarlyServer, build_plan, plan_early_server
from msrun.planning.environment import SET_LATE, server_environment
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

HOST = HostFacts("node-a", "10.0.0.2", tuple(range(8)))
ASSIGNMENTS = (
    HostAssignment(0, "node-b", "10.0.0.1", (0, 1), (0, 1)),
    HostAssignment(1, "node-a", "10.0.0.2", (2, 3), (0, 1)),
)


def spec_of(script: Path, **changes: Any) -> LaunchSpec:
    settings: dict[str, Any] = {
        "program": Program("script", str(script)),
        "worker_num": 4,
        "local_worker_num": 2,
        "node_rank": 1,
        "working_directory": script.parent,
        "log_dir": script.parent / "log_output",
    }
    return LaunchSpec(**{**settings, **changes})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import json\nimport yaml\nimport torch.nn\nfrom msrun.runtime import init\n")
    return path


def early(spec: LaunchSpec, caller: dict[str, str] | None = None) -> EarlyServer | None:
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
def test_only_what_no_import_reads_is_told_to_the_server_later(
    script: Path, caller: dict[str, str], changes: dict[str, Any]
) -> None:
    spec = spec_of(script, **changes)
    server = early(spec, caller)
    assert server is not None
    fleet = Fleet(1, ASSIGNMENTS, "10.0.0.1", "eth1")
    plan = build_plan(spec, HOST, caller=caller, job_id="JOB", run_dir="/r", master_port=1, fleet=fleet)
    known = server_environment(caller, plan.hosts[0].common_env)
    told = {name for name in {*known, *server.environment} if known.get(name) != server.environment.get(name)}
    assert told
    assert told <= SET_LATE
    assert server.environment["MSRUN_JOB_ID"] == "JOB"
    assert server.working_directory == plan.hosts[0].working_directory


def test_modules_of_the_user_wait_until_the_job_starts(script: Path) -> None:
    server = early(spec_of(script, preload=("yaml", "torch.fx", "numpyro")))
    assert server is not None
    assert server.imports == ("torch.nn", "msrun.runtime:init", "torch.fx")


@pytest.mark.parametrize(
    ("text", "caller", "changes"),
    [
        ("import json\n", {}, {}),
        ("import torch\n", {}, {"start_method": "exec"}),
        ("import torch\n", {"OMP_PROC_BIND": "close"}, {}),
    ],
    ids=["nothing to import", "exec is asked for", "OpenMP binds processes"],
)
def test_without_anything_to_import_no_server_is_started_early(
    script: Path, text: str, caller: dict[str, str], changes: dict[str, Any]
) -> None:
    script.write_text(text)
    assert early(spec_of(script, **changes), caller) is None


def test_an_executable_needs_no_server(script: Path) -> None:
    assert early(spec_of(script, program=Program("executable", "/bin/true"))) is None
