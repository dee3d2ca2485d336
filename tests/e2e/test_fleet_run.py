"""One command, many hosts over SSH: ranks, environment, arguments, logs, failures and exit status."""

import json
import signal
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from job_runner import WORKERS, read_record
from tls_files import PASSWORDS, Authority, TlsFolder

from msrun.launch.trace import write_trace


@pytest.mark.slow
def test_workers_of_two_hosts_are_one_world(fleet, tmp_path):
    job = fleet.run([2, 2], WORKERS / "all_reduce.py")
    assert job.code == 0, job.stderr
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(4)]
    assert [result["sum"] for result in results] == [[0.0, 10.0, 20.0, 30.0]] * 4
    assert results[0]["all"] == [{"rank": rank, "local": str(rank % 2)} for rank in range(4)]
    assert "all 4 workers on 2 hosts finished successfully" in job.stderr
    plan = job.read_json("plan.json")
    assert [host["name"] for host in plan["hosts"]] == ["host0", "host1"]
    assert plan["master"]["address"] == fleet.net.address(0)
    assert {path.name for path in job.log_dir.iterdir()} == {
        *(f"worker_{rank}.log" for rank in range(4)),
        *("scheduler.log", "rank_table.json", "plan.json", "events.jsonl", "job.lock"),
    }


@pytest.mark.slow
def test_no_host_opens_a_port_but_that_of_the_store(fleet, tmp_path):
    job = fleet.start([1, 1], "--master_port=29507", WORKERS / "wait.py").wait_for_workers(2)
    ports = [listening_ports(fleet.net.processes(node)[0]) for node in range(2)]
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    assert 29507 in ports[0] and 29507 not in ports[1]
    assert ports[0] - {29507} == ports[1], "that of sshd"


def listening_ports(pid):
    """Return the TCP ports on which somebody listens where a process runs. Source: proc(5), /proc/PID/net/tcp."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"}


AWKWARD = ["I'm 72\" tall", "$HOME", "`id`", ";touch x", "*", "", "back\\", "two\nlines", "☃", "--help", "--"]


@pytest.mark.slow
def test_arguments_and_variables_arrive_unchanged_and_are_seen_by_nobody(fleet, tmp_path):
    value = "quote' \" = $X `id`\nsecond line\ttab ☃"
    words = [*AWKWARD, b"no text \xff\xfe"]
    job = fleet.start([1, 1], f"--env=AWKWARD={value}", WORKERS / "wait.py", *words, FOO_SECRET="hidden")
    job.wait_for_workers(2)
    for pid in fleet.net.processes(0, 1):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"AWKWARD" not in line and value.encode() not in line
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    job2 = fleet.run(
        [1, 1], f"--env=AWKWARD={value}", "--forward_env=FOO_*", WORKERS / "record.py", *words, FOO_BAR="1=2"
    )
    assert job2.code == 0, job2.stderr
    for rank in range(2):
        found = read_record(fleet.cwd, rank)
        assert [word.encode("latin-1") for word in found["argv"][1:]] == [
            word if isinstance(word, bytes) else word.encode() for word in words
        ]
        assert found["env"]["AWKWARD"].encode("latin-1").decode() == value
        assert found["env"]["FOO_BAR"] == "1=2"
        assert found["cwd"] == str(tmp_path)
        assert not [name for name in found["env"] if name.startswith("SSH_")]
    assert not (tmp_path / "x").exists()


def test_logs_of_hosts_without_a_common_disk_come_home_complete(fleet, own_disk):
    log_dir = own_disk / "logs"
    job = fleet.run([1, 1], "--tail_worker_log=none", WORKERS / "flood.py", "20000", log_dir=log_dir)
    assert job.code == 0, job.stderr
    for rank in range(2):
        lines = b"".join(b"rank %d line %d %s\n" % (rank, n, b"x" * (n % 97)) for n in range(20000))
        expected = lines + bytes(range(256)) + "ünïcode ☃ on stderr\n".encode() + b"no end of line"
        assert sorted(job.log(rank)) == sorted(expected) and job.log(rank).startswith(lines)
    assert not fleet.net.path(1, log_dir).exists()  # nothing of it is on the other hosts
    assert b"rank 0 registered" in (job.log_dir / "scheduler.log").read_bytes()


@pytest.mark.slow
def test_trace_and_metrics_of_all_hosts_are_written_here_alone(fleet, own_disk, tmp_path):
    (tmp_path / "steps.py").write_text(
        "import os, sys, time\nfrom msrun.runtime import report_progress\n"
        "for step in range(1, 6):\n    report_progress(step)\n    time.sleep(0.1)\n"
        "sys.exit(os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    log_dir, metrics = own_disk / "traced", own_disk / "job.prom"
    options = ["--trace", "--max_restarts=1", f"--metrics_file={metrics}"]
    job = fleet.run([1, 1], *options, tmp_path / "steps.py", log_dir=log_dir)
    assert job.code == 0, job.stderr
    assert write_trace(job.log_dir, tmp_path / "t.json").startswith(f"wrote {tmp_path}/t.json: 2 ranks, ")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = Counter(event["pid"] for event in events if event.get("cat") == "steps")
    assert steps[2] == 10, "rank 1: all steps of both attempts"
    assert 5 <= steps[1] <= 10, "rank 0 may have been stopped before it wrote those of its first attempt"
    assert f"rank 1, log: {log_dir}/{job.log_dir.name}/worker_1.attempt_0.log" in job.stderr
    told = (job.log_dir.parent.parent / metrics.name).read_text()
    assert 'state="done"} 2' in told and "msrun_restarts_total" in told
    assert not fleet.net.path(1, metrics).exists() and not fleet.net.path(1, log_dir).exists()


@pytest.mark.slow
def test_one_remote_host_is_enough_and_starts_again(fleet, tmp_path):
    job = fleet.run("host1:2", "--max_restarts=1", WORKERS / "attempt.py", "code=7:1")
    assert job.code == 0, job.stderr
    assert "all 2 workers finished successfully after restart 1" in job.stderr
    (again,) = [event for event in job.events if event["event"] == "restarting"]
    assert again["reason"].startswith("rank 1 on host1 failed first") and again["global_ranks"] == [1]
    assert json.loads((tmp_path / "record_1_1.json").read_text())["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.slow
def test_code_is_sent_to_hosts_whose_python_has_no_msrun(fleet, tmp_path):
    python = tmp_path / "python_without_msrun"  # -S: an editable installation is not found either, its packages are
    packages = sysconfig.get_paths()["purelib"]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    words = [f"--python={python}", "--forward_env=none", WORKERS / "record.py"]
    refused = fleet.run([1, 1], *words)
    assert refused.code == 3
    assert "msrun is not installed" in refused.errors[0] and "--ship" in refused.errors[0]
    shipped = fleet.run([1, 1], "--ship", *words)
    assert shipped.code == 0, shipped.stderr


@pytest.mark.slow
def test_files_for_tls_are_not_used_and_no_password_leaves_the_launcher(fleet, tmp_path):
    """One of the hosts is the launcher's own, whose agent is a child of it."""
    config = TlsFolder(tmp_path / "tls", Authority(days=20)).config()
    secrets = {**PASSWORDS, "MSRUN_TOKEN": "secret"}
    job = fleet.run("control:1,host0:1", f"--tls_config={config}", WORKERS / "record.py", **secrets)
    assert job.code == 0, job.stderr
    assert f"--tls_config {config}: not used: hosts and launcher talk over SSH" in job.stderr
    for rank in range(2):
        assert not set(secrets) & set(read_record(fleet.cwd, rank)["env"])
    for path in job.log_dir.iterdir():
        assert not any(password.encode() in path.read_bytes() for password in PASSWORDS.values()), path
