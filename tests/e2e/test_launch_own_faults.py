"""What msrun gets wrong itself is told under its own name, and the loss of a process of its own is survived."""

import json
import os
import signal
import sys

import pytest
from asked_cases import one_fast
from job_runner import MARK, WORKERS, parent_of, wait_until

from msrun import contract

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
    one_fast(
        (ONE_HOST, "msrun.launch.console", "Console.note", "args[0] == 'running'"),
        (SEVERAL_HOSTS, "msrun.launch.console", "Console.note", "args[0] == 'running'"),
        (ONE_HOST, "msrun.launch.metrics_file", "MetricsFile.finish", "True"),
        (SEVERAL_HOSTS, "msrun.launch.console", "Console.tick", "True"),
    ),
)
def test_slip_in_what_shows_the_job_is_told_once_and_the_job_goes_on(
    msrun, tmp_path, hosts, module, function, condition
):
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
    one_fast(
        (ONE_HOST, "msrun.cluster.membership", "Membership.started"),
        (SEVERAL_HOSTS, "msrun.launch.fleet.fleet_job", "FleetRecord.note"),
    ),
)
def test_slip_in_what_runs_the_job_ends_it(msrun, tmp_path, hosts, module, function):
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


# -- a process of its own that is lost or stopped while the job runs --------------------------------------------------


def own_process(job, lost, host=0):
    """Return the process id of the fork server or of the scheduler of a host, as of now."""
    told = [json.loads(line) for line in (job.log_dir / contract.EVENTS_JSONL).read_text().splitlines()]
    if lost == "fork server":
        worker = next(event["pid"] for event in reversed(told) if event.get("global_rank") == host)
        return parent_of(worker)
    names = ("scheduler", "host_scheduler")
    mine = [event for event in told if event["event"] in names and event.get("node_rank", 0) == host]
    return int(mine[-1]["pid"])


def wait_for_attempt(folder, job, ranks, attempt):
    job.wait_for(*(folder / f"record_{rank}_{attempt}.json" for rank in range(ranks)))


@pytest.mark.parametrize(
    ("lost", "options"),
    one_fast(
        ("fork server", ()),
        ("scheduler", ()),
        ("scheduler", ("--log_max_bytes=4096",)),
        ("fork server", ("--start_method=exec",)),
        ("fork server", ("--interactive",)),
    ),
)
def test_job_that_lost_it_starts_again(msrun, tmp_path, lost, options):
    words = ["--worker_num=2", "--max_restarts=1", *options, WORKERS / "attempt.py", "wait"]
    job = msrun.start(*words, cwd=tmp_path)
    wait_for_attempt(tmp_path, job, 2, 0)
    os.kill(own_process(job, lost), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    assert f"the {lost} ended" in finished.stderr and "starting all workers again now, restart 1" in finished.stderr
    assert [finished.log(rank).decode() for rank in range(2)] == [f"rank {rank} in attempt 1\n" for rank in range(2)]
    assert (finished.log_dir / "worker_1.attempt_0.log").read_text() == "rank 1 in attempt 0\n"
    record = (finished.log_dir / contract.SCHEDULER_LOG).read_text()
    assert f"attempt 1: the {lost} ended" in record and "job over: all workers ended with exit code 0" in record
    msrun.prove_nothing_left()


LEAVES_A_CHILD = """
import pathlib, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
pathlib.Path("left").touch()
"""


@pytest.mark.slow
def test_fork_server_that_is_lost_when_all_workers_have_ended_well_changes_nothing(msrun, tmp_path):
    (tmp_path / "train.py").write_text(LEAVES_A_CHILD)
    job = msrun.start("--worker_num=1", "train.py", cwd=tmp_path)
    job.wait_for(tmp_path / "left")
    server = job.pid_of_fork_server()
    wait_until(lambda: '"over"' in (job.log_dir / contract.EVENTS_JSONL).read_text(), "what was left is ended")
    os.kill(server, signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    msrun.prove_nothing_left()


STORE_PROGRAM = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.all_reduce(value := torch.ones(1))
pathlib.Path(f"record_{rank}_{attempt}.json").touch()
time.sleep(600 if attempt == "0" else 0)
print(f"rank {rank}: {value.item()}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "host"), [("fork server", 1), ("scheduler", 0), ("scheduler", 1)])
def test_host_that_has_lost_it_starts_again_with_the_others_and_ranks_meet_at_a_new_store(
    rehearsals, tmp_path, lost, host
):
    (tmp_path / "train.py").write_text(STORE_PROGRAM)
    job = rehearsals.start("2x1", "--max_restarts=1", "train.py")
    wait_for_attempt(tmp_path, job, 2, 0)
    os.kill(own_process(job, lost, host), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    assert f"the {lost} ended" in finished.stderr and "restart 1" in finished.stderr
    assert [finished.log(rank).decode() for rank in range(2)] == [f"rank {rank}: 2.0\n" for rank in range(2)]
