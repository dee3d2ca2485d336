"""--dry_run touches nothing and prints exactly the plan of the run, also of hosts; --check says what a host lacks."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, read_record
from plans import without_what_is_chosen_at_start

from ranktable import build_table, write_table

OPTIONS = ["--worker_num=3", "--env", "API_KEY=hidden", "--env", "A=b c", "--tail_worker_log=0,2", "--grace=2.5"]
HOSTFILE = """\
# four workers, unequal
h1        slots=3 user=me port=2222
10.0.0.7  devices=5 python=/opt/py/bin/python
"""
ENV = {"HF_TOKEN": "hidden", "NCCL_DEBUG": "INFO", "MY_OWN": 'it\'s = "a\nb"', "HOME_GROWN": "x"}
OF_HOSTS = ["--hostfile=hosts.txt", "--env", "API_KEY=hidden", "--env", "A=b\nc"]
OF_HOSTS += ["--forward_env=MY_*", "--forward_env=HF_TOKEN"]
HOOKED = """
import sys
def hook(event, args):
    if event.startswith(("socket.", "tempfile.")) and event != "socket.gethostname" or event in (
        "subprocess.Popen", "os.fork", "os.exec", "os.mkdir"):
        raise SystemExit(f"{event} in a dry run")
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise SystemExit(f"{args[0]} is written in a dry run")
sys.addaudithook(hook)
from msrun.cli import main
main()
"""


@pytest.fixture
def cwd(odd_path):
    """A folder of an odd name with a script that would leave a trace, a list of hosts and a table of two."""
    (odd_path / "train.py").write_text("open('started', 'w').close()\n")
    (odd_path / "hosts.txt").write_text(HOSTFILE)
    write_table(odd_path / "table.json", build_table([("10.0.0.0", 1), ("10.0.0.1", 1)]))
    return odd_path


@pytest.mark.parametrize("options", [OPTIONS, OF_HOSTS], ids=["one host", "hosts"])
@pytest.mark.parametrize("form", one_fast("--dry-run", "--dry_run=json"))
def test_dry_run_asks_nobody_touches_nothing_and_says_the_same_twice(msrun, msrun_here, cwd, form, options):
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(cwd.iterdir())]
    words, env = (*options, form, "train.py", "--lr", "0.1"), {**ENV, "PYTHONDONTWRITEBYTECODE": "1"}
    finished = msrun.run(*words, cwd=cwd, env=env, command=[sys.executable, "-c", HOOKED])
    assert (finished.code, finished.stderr) == (0, "")
    assert finished.stdout and b"hidden" not in finished.stdout
    assert msrun_here(*words, cwd=cwd, env=env).stdout == finished.stdout
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted(cwd.iterdir())] == before


def plan_of(msrun_here, cwd, *words, **env):
    return json.loads(msrun_here("--dry_run=json", *words, cwd=cwd, env=env).stdout)


def test_dry_run_is_the_plan_of_the_run(msrun, msrun_here, tmp_path):
    script = [WORKERS / "record.py", "--lr", "0.1"]
    dry = plan_of(msrun_here, tmp_path, *OPTIONS, *script)
    finished = msrun.run(*OPTIONS, *script, cwd=tmp_path)
    real = finished.read_plan()
    assert without_what_is_chosen_at_start(dry) == without_what_is_chosen_at_start(real)


@pytest.mark.slow
def test_bytes_that_are_no_text_can_be_printed(msrun, tmp_path):
    finished = msrun.run("--dry_run", WORKERS / "record.py", b"\xff", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert b"\xff" in finished.stdout
    finished = msrun.run("--dry_run=json", WORKERS / "record.py", b"\xff", cwd=tmp_path)
    assert json.loads(finished.stdout)["hosts"][0]["program"]["args"] == ["\udcff"]


# -- of hosts ---------------------------------------------------------------------------------------------------------


def test_hosts_may_come_from_a_table_a_variable_and_a_file(msrun_here, cwd):
    plan = plan_of(msrun_here, cwd, "--ssh", "--rank_table_file=table.json", "train.py")
    ranks = [(host["name"], host["workers"][0]["env"]["RANK"]) for host in plan["hosts"]]
    assert (ranks, plan["master"]["address"]) == ([("10.0.0.0", "0"), ("10.0.0.1", "1")], "10.0.0.0")
    (cwd / "job.yaml").write_text("script: train.py\nhosts: 'h1:2,h2:2'\nforward_env: ['MY_*', none]\n")
    plan = plan_of(msrun_here, cwd, "--config=job.yaml", **ENV)
    assert (plan["world_size"], list(plan["forwarded"])) == (4, ["MY_OWN"])
    assert plan_of(msrun_here, cwd, "--config=job.yaml", MSRUN_HOSTS="h3:7")["world_size"] == 7


DECIDED_THERE = {"MASTER_PORT", "MS_SCHED_PORT", "MSRUN_DEVICE_TARGET", "MSRUN_LOG_DIR", "MSRUN_PROGRESS"}
DECIDED_THERE |= {"MSRUN_RENDEZVOUS", "OMP_NUM_THREADS", "RANK_TABLE_FILE"}
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def test_dry_run_is_what_a_run_carries_out(msrun, msrun_here, cwd):
    """Another spelling of the interpreter makes this host one that an agent is started on."""
    python = f"{Path(sys.executable).parent}/./{Path(sys.executable).name}"
    arguments = ["--hosts=localhost:2", f"--python={python}", "--env", "API_KEY=hidden", "--forward_env=MY_*"]
    dry = plan_of(msrun_here, cwd, *arguments, WORKERS / "record.py", **ENV)
    finished = msrun.run(*arguments, WORKERS / "record.py", cwd=cwd, env=ENV)
    assert finished.code == 0, finished.stderr
    real = finished.read_plan()
    env = real["hosts"][0]["env"]
    assert env.keys() - dry["hosts"][0]["env"].keys() == DECIDED_THERE | INTERFACES
    assert real["device_target"] == env["MSRUN_DEVICE_TARGET"]
    assert real["device_reason"].startswith("as found on ")
    (note,) = [note for note in dry["notes"] if note.startswith("decided on the hosts")]
    assert all(name in note for name in DECIDED_THERE)
    assert without_what_is_chosen_there(dry) == without_what_is_chosen_there(real)
    record = read_record(cwd, 0)["env"]
    assert (record["MY_OWN"], record["HF_TOKEN"], record["API_KEY"]) == (ENV["MY_OWN"], "hidden", "hidden")
    written = [path.read_bytes() for path in finished.log_dir.iterdir() if path.is_file()]
    assert not any(b"hidden" in data for data in written)


def without_what_is_chosen_there(plan):
    (host,) = plan["hosts"]
    for name in (*DECIDED_THERE, *INTERFACES, "MSRUN_JOB_ID", "TORCHELASTIC_RUN_ID"):
        host["env"].pop(name, None)
    for worker in host["workers"]:
        del worker["binding"]
    for name in ("job_id", "run_dir", "notes", "device_target", "device_reason", "settings"):
        del plan[name]
    del host["name"], host["address"], plan["master"]["port"]
    return plan


# -- --check -----------------------------------------------------------------------------------------------------------

NAMES = ["program", "log_dir", "disk", "temporary", "shared_memory", "master_port", "tls", "devices", "rank_table"]
NAMES += ["memory", "open_files", "processes", "python", "torch"]


@pytest.fixture
def checked(tmp_path):
    """A directory with such a script alone."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    return tmp_path


def lines_of(text):
    """Return name -> (status, finding)."""
    found = {}
    for line in text.decode().splitlines():
        match = re.fullmatch(r"(ok|warn|fail) +(\w+) +(.+)", line)
        assert match, line
        found[match[2]] = (match[1], match[3])
    return found


def test_good_host_is_said_to_be_good_and_nothing_is_started(msrun, checked):
    finished = msrun.run("--worker_num=2", "--check", "train.py", cwd=checked)
    assert finished.code == 0, finished.stdout
    assert finished.stderr == ""
    found = lines_of(finished.stdout)
    assert list(found) == NAMES
    assert "fail" not in {status for status, _ in found.values()}
    assert found["program"] == ("ok", f"script {checked / 'train.py'}")
    assert os.listdir(checked) == ["train.py"]


def test_quiet_shows_only_what_needs_attention(msrun_here, checked):
    finished = msrun_here("--worker_num=2", "--quiet", "--check", "-m", "no_such_module", cwd=checked)
    assert finished.code == 2
    found = lines_of(finished.stdout)
    assert "ok" not in {status for status, _ in found.values()}
    assert found["program"][0] == "fail"


def test_everything_that_fails_is_shown_at_once(msrun_here, checked):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--device_target=gpu", "--log_dir=train.py", "--rank_table_file=no.json", f"--master_port={port}"]
        finished = msrun_here("--worker_num=2", *options, "--check", "train.py", cwd=checked)
    assert finished.code == 2
    found = lines_of(finished.stdout)
    failed = {name for name, (status, _) in found.items() if status == "fail"}
    assert failed == {"log_dir", "master_port", "devices", "rank_table"}
    assert f"taken by pid {os.getpid()} (" in found["master_port"][1]
    assert os.listdir(checked) == ["train.py"]


@pytest.mark.slow
def test_host_without_room_is_another_kind_of_failure_and_stops_a_run_too(msrun, checked):
    few = ["prlimit", "--nofile=33"]
    finished = msrun.run("--worker_num=2", "--check", "train.py", cwd=checked, prefix=few)
    assert finished.code == 3
    assert lines_of(finished.stdout)["open_files"][0] == "fail"
    finished = msrun.run("--worker_num=2", "train.py", cwd=checked, prefix=few)
    assert finished.code == 3
    assert "33 open files allowed for each process, 2 workers need 34" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert os.listdir(checked) == ["train.py"]
