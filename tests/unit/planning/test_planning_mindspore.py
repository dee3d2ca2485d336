"""Which `mindspore` the workers of a script import, and what the plan holds for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.build import build_plan, plan_early_server
from msrun.planning.mindspore import POSING_FOLDER, settle_mindspore
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan import LaunchPlan
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

TORCH_ONLY = HostFacts("node-a", "127.0.0.1", tuple(range(8)))
REAL = replace(TORCH_ONLY, mindspore_version="2.10.0")
NEITHER = replace(TORCH_ONLY, has_torch=False)


def spec_of(folder: Path, text: str, **changes: Any) -> LaunchSpec:
    (folder / "train.py").write_text(text)
    settings: dict[str, Any] = {
        "program": Program("script", str(folder / "train.py")),
        "worker_num": 2,
        "local_worker_num": 2,
        "working_directory": folder,
        "log_dir": folder / "log_output",
    }
    return LaunchSpec(**{**settings, **changes})


def plan_of(spec: LaunchSpec, host: HostFacts, caller: dict[str, str] | None = None) -> LaunchPlan:
    return build_plan(spec, host, caller=caller or {}, job_id="JOB", run_dir="/r", master_port=4000)


@pytest.mark.parametrize(
    ("text", "host", "kind"),
    [
        ("import mindspore as ms", REAL, "real"),
        ("def main():\n    from mindspore.communication import init", REAL, "real"),
        ("import model", REAL, "real"),
        ("from layers.dense import Dense", REAL, "real"),
        ("import mindspore", TORCH_ONLY, "torch"),
        ("import mindspore", NEITHER, "none"),
        ("import torch", REAL, "none"),
        ("from .mindspore import x", REAL, "none"),
        ("import msrun.mindspore as ms", REAL, "none"),
        ("import mindspore if", REAL, "none"),
    ],
)
def test_a_script_that_imports_mindspore_gets_the_one_that_is_there(
    tmp_path: Path, text: str, host: HostFacts, kind: str
) -> None:
    (tmp_path / "model.py").write_text("import train\nfrom mindspore import nn\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "dense.py").write_text("from .. import model\n")
    assert settle_mindspore(spec_of(tmp_path, text), host).mindspore == kind


def test_the_option_decides_and_names_what_is_missing(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "import mindspore")
    assert settle_mindspore(replace(spec, mindspore="torch"), REAL).mindspore == "torch"
    assert settle_mindspore(replace(spec, mindspore="none"), REAL).mindspore == "none"
    with pytest.raises(UsageError, match="--mindspore real: this Python has no mindspore; pip install mindspore"):
        settle_mindspore(replace(spec, mindspore="real"), TORCH_ONLY)
    with pytest.raises(UsageError, match="--mindspore torch: this Python has no torch"):
        settle_mindspore(replace(spec, mindspore="torch"), NEITHER)


def test_workers_of_real_mindspore_meet_at_its_scheduler_beside_the_store_of_torch(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "import numpy, mindspore", cluster_time_out_s=77)
    plan = plan_of(spec, REAL)
    host = plan.hosts[0]
    assert host.start_method == "exec"
    assert host.common_env[contract.MASTER_PORT] == "4000"
    assert host.common_env[contract.MS_SCHED_PORT] == "4001"
    assert host.common_env[contract.MS_TOPO_TIMEOUT] == "77"
    assert host.mindspore_scheduler == {"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "sched", "RANK_ID": "0"}
    assert any(note.startswith("mindspore 2.10.0 of this environment") for note in plan.notes)
    assert plan.to_json()["hosts"][0]["mindspore_scheduler"]["MS_ROLE"] == "MS_SCHED"


def test_without_mindspore_its_name_stands_for_ours_behind_what_the_user_has_on_the_path(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "import mindspore\nfrom mindspore import nn\nimport numpy\n")
    plan = plan_of(spec, TORCH_ONLY, {"PYTHONPATH": "/a:/b"})
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
