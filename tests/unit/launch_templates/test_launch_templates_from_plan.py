"""A plan of msrun becomes a job of any kind, or is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_runner import JobRunner

from launch_templates import BadFile
from launch_templates.cli import main
from launch_templates.settings import read_plan


def plan_of(folder: Path, *words: str) -> str:
    (folder / "train.py").touch()
    with JobRunner() as runner:
        done = subprocess.run(
            [sys.executable, "-m", "msrun", "--dry_run=json", *words],
            cwd=folder,
            env=runner.environ(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_of_several_hosts_gives_nodes_workers_options_and_script(tmp_path: Path) -> None:
    words = ["--hosts", "h1:2,h2:2,h3:2", "--bind_core", "--env", "A=b", "--max_restarts", "2", "--grace", "30"]
    found = read_plan(plan_of(tmp_path, *words, "train.py", "--lr", "0.1"), "plan.json")
    assert found == {
        "nodes": 3,
        "local_worker_num": 2,
        "max_restarts": 2,
        "grace_s": 30,
        "script": ["--bind_core=true", "--env=A=b", "train.py", "--lr", "0.1"],
    }


def test_plan_of_a_rehearsal_with_a_spare_host_asks_for_that_host_and_for_no_rehearsal(tmp_path: Path) -> None:
    words = ["--rehearse", "3x2", "--spares", "1", "--min_hosts", "1", "--max_restarts", "2"]
    found = read_plan(plan_of(tmp_path, *words, "train.py"), "plan.json")
    assert (found["nodes"], found["spares"], found["local_worker_num"], found["script"]) == (2, 1, 2, ["train.py"])


def test_plan_of_one_host_and_of_a_module(tmp_path: Path) -> None:
    found = read_plan(plan_of(tmp_path, "--worker_num", "4", "-m", "json.tool", "x"), "plan.json")
    assert found == {"nodes": 1, "local_worker_num": 4, "device_target": "CPU", "script": ["-m", "json.tool", "x"]}


def test_plan_from_a_pipe_is_rendered_and_what_is_set_goes_over_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, "--hosts", "h1:2,h2:2", "train.py")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plan.encode())))
    words = ["--from", "-", "--set", "name=a", "--set", "image=t:1", "--set", "nodes=5"]
    with pytest.raises(SystemExit) as ended:
        main(["render", "jobset", *words])
    assert ended.value.code == 0
    *_, body = yaml.safe_load_all(capsys.readouterr().out)
    job = body["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 5
    args = job["template"]["spec"]["containers"][0]["args"]
    assert args[0] == "--worker_num=10" and args[-1] == "train.py"


def test_plan_that_hides_a_secret_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--worker_num", "1", "--env", "HF_TOKEN=secret", "train.py")
    with pytest.raises(BadFile, match=r"hides a secret in '--env=HF_TOKEN=.*secret_env"):
        read_plan(plan, "plan.json")


def test_hosts_of_different_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="its hosts have 1, 2 of 3 workers; plan a job with as many"):
        read_plan(plan_of(tmp_path, "--hosts", "h1:2,h2:1", "train.py"), "plan.json")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"hosts": []}', '{"hosts": [{"workers": [1]}]}', "[" * 9999]
)
def test_other_texts_are_no_plan(content: Any) -> None:
    with pytest.raises(BadFile, match="is no plan of msrun; give the output of msrun --dry_run=json"):
        read_plan(content, "plan.json")


def test_every_option_of_msrun_is_a_field_or_goes_before_the_script_or_is_of_one_run() -> None:
    from launch_templates.msrun_options import NAMES
    from launch_templates.settings import _FIELDS, _OF_PLACE

    assert _OF_PLACE | {*_FIELDS} <= NAMES
    assert json.dumps(sorted(_OF_PLACE & {*_FIELDS})) == "[]"
