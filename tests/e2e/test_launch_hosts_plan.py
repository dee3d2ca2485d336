"""--dry_run of a job of hosts asks and touches nothing and says what a run carries out; wrong lists end with 2."""

import json
import os
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import WORKERS

HOSTFILE = """\
# four workers, unequal
h1        slots=3 user=me port=2222
10.0.0.7  devices=5 python=/opt/py/bin/python
"""
ENV = {"HF_TOKEN": "hidden", "NCCL_DEBUG": "INFO", "MY_OWN": 'it\'s = "a\nb"', "HOME_GROWN": "x"}
OPTIONS = ["--hostfile=hosts.txt", "--env", "API_KEY=hidden", "--env", "A=b\nc"]
OPTIONS += ["--forward_env=MY_*", "--forward_env=HF_TOKEN"]

DRY_RUN = """
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
def cwd(tmp_path):
    """A folder with a script that would leave a trace, a list of hosts and a table of two."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    (tmp_path / "hosts.txt").write_text(HOSTFILE)
    (tmp_path / "table.json").write_text(json.dumps(TABLE))
    return tmp_path


TABLE = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [{"server_id": f"10.0.0.{n}", "device": [{"device_id": "0", "rank_id": str(n)}]} for n in (0, 1)],
    "status": "completed",
}


@pytest.mark.parametrize("form", one_fast("text", "json"))
def test_dry_run_asks_nobody_and_writes_nothing(msrun, msrun_here, cwd, form):
    words = (*OPTIONS, f"--dry_run={form}", "train.py")
    before = sorted(os.listdir(cwd))
    finished = msrun.run(*words, cwd=cwd, env=ENV, command=[sys.executable, "-c", DRY_RUN])
    assert (finished.code, finished.stderr) == (0, "")
    assert sorted(os.listdir(cwd)) == before
    assert b"hidden" not in finished.stdout
    assert msrun_here(*words, cwd=cwd, env=ENV).stdout == finished.stdout, "two of them are the same"


def plan_of(msrun_here, cwd, *words, **env):
    return json.loads(msrun_here("--dry_run=json", *words, cwd=cwd, env=env).stdout)


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
    dry = json.loads(msrun_here(*arguments, "--dry_run=json", WORKERS / "record.py", cwd=cwd, env=ENV).stdout)
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
    record = json.loads((cwd / "record_0.json").read_text())["env"]
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
