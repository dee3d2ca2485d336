"""What msrun's own code gets wrong is told under msrun's own name; what only shows the job does not end it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job_runner import MARK, JobRunner

ONE_HOST = ["--worker_num=2"]
SEVERAL_HOSTS = ["--rehearse=2x1", f"--forward_env={MARK}"]
SLIP = """
import {module}
from msrun.cli import main

real = {module}.{function}

def slip(self, *args, **settings):
    real(self, *args, **settings)
    if {condition}:
        {{}}["no_such_key"]

{module}.{function} = slip
main()
"""


@pytest.mark.parametrize(
    ("hosts", "module", "function", "condition"),
    [
        (ONE_HOST, "msrun.launch.console", "Console.note", "args[0] == 'running'"),
        (ONE_HOST, "msrun.launch.output", "_Place._note_progress", "True"),
        (SEVERAL_HOSTS, "msrun.launch.console", "Console.note", "args[0] == 'running'"),
        pytest.param(ONE_HOST, "msrun.launch.metrics_file", "MetricsFile.finish", "True", marks=pytest.mark.slow),
        pytest.param(SEVERAL_HOSTS, "msrun.launch.console", "Console.tick", "True", marks=pytest.mark.slow),
        pytest.param(SEVERAL_HOSTS, "msrun.launch.output", "_Place._note_progress", "True", marks=pytest.mark.slow),
    ],
)
def test_slip_in_what_shows_the_job_is_told_once_and_the_job_goes_on(
    msrun: JobRunner, tmp_path: Path, hosts: list[str], module: str, function: str, condition: str
) -> None:
    (tmp_path / "slip.py").write_text(SLIP.format(module=module, function=function, condition=condition))
    (tmp_path / "train.py").write_text("import time; print('begun', flush=True); time.sleep(0.5); raise SystemExit(7)")
    words = [*hosts, f"--metrics_file={tmp_path / 'job.prom'}", "train.py"]
    finished = msrun.run(*words, cwd=tmp_path, command=(sys.executable, str(tmp_path / "slip.py")))
    assert finished.code == 7, finished.stderr
    told = [line for line in finished.stderr.splitlines() if "warning" in line]
    assert len(told) == 1 and "KeyError: 'no_such_key'" in told[0] and "msrun's own" in told[0], finished.stderr
    assert told[0].endswith(f"{finished.log_dir}/scheduler.log")
    log = (finished.log_dir / "scheduler.log").read_text()
    assert log.count("KeyError: 'no_such_key'") == 1 and "slip.py" in log
    assert any("msrun: error: rank " in line for line in finished.errors), "the failure is reported as ever"


@pytest.mark.parametrize(
    ("hosts", "module", "function"),
    [
        (ONE_HOST, "msrun.agent.supervisor", "Supervisor._on_started"),
        (SEVERAL_HOSTS, "msrun.launch.fleet.record", "FleetRecord._note_worker"),
        pytest.param(SEVERAL_HOSTS, "msrun.launch.fleet.fleet_job", "FleetRun._tick", marks=pytest.mark.slow),
    ],
)
def test_slip_in_what_runs_the_job_ends_it_under_its_own_name(
    msrun: JobRunner, tmp_path: Path, hosts: list[str], module: str, function: str
) -> None:
    (tmp_path / "slip.py").write_text(SLIP.format(module=module, function=function, condition="True"))
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    finished = msrun.start(
        *hosts, "train.py", cwd=tmp_path, command=(sys.executable, str(tmp_path / "slip.py"))
    ).finish()
    msrun.prove_nothing_left()
    log = finished.log_dir / "scheduler.log"
    named = f"msrun: error: msrun itself failed: KeyError: 'no_such_key'; traceback in {log}; report it"
    assert finished.code == 3 and named in finished.errors, finished.stderr
    assert "install the same msrun" not in finished.stderr and "Traceback" not in finished.stderr
    assert "Traceback" in log.read_text()
