"""--dry_run of a job of hosts asks and touches nothing and says what a run carries out; wrong lists end with 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asked_cases import one_fast
from job_runner import JobRunner

HOSTFILE = """\
# four workers, unequal
h1        slots=3 user=me port=2222
10.0.0.7  devices=5 python=/opt/py/bin/python
"""
ENV = {"HF_TOKEN": "hidden", "NCCL_DEBUG": "INFO", "MY_OWN": 'it\'s = "a\nb"', "HOME_GROWN": "x"}
OPTIONS = [
    "--hostfile=hosts.txt",
    "--env",
    "API_KEY=hidden",
    "--env",
    "A=b\nc",
    "--forward_env=MY_*",
    "--forward_env=HF_TOKEN",
]

HOOK = """
import sys
def hook(event, args):
    if event.startswith(("socket.", "tempfile.")) and event != "socket.gethostname" or event in (
        "subprocess.Popen", "os.fork", "os.exec", "os.mkdir"):
        raise SystemExit(f"{event} in a dry run")
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise SystemExit(f"{args[0]} is written in a dry run")
sys.addaudithook(hook)
from msrun.cli import main
"""
DRY_RUN = HOOK + "main()"
EACH = (
    HOOK
    + """
import contextlib, io, json
answers = {}
for name, words in json.load(sys.stdin).items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            answers[name] = (end.code, said.getvalue())
print(json.dumps(answers))
"""
)


FILES = {
    "hosts.txt": HOSTFILE,
    "empty.txt": "",
    "comments.txt": "# h1\n\n# h2\n",
    "twice.txt": "h1 slots=2\nh2 slots=2\nH1 slots=2\n",
    "abc.txt": "h1 slots=2\nh2 slots=abc\n",
    "zero.txt": "h1 slots=0\n",
    "minus.txt": "h1 slots=-1\n",
    "shell.txt": "$(id)\n",
    "table.json": json.dumps(
        {
            "version": "1.0",
            "server_count": "2",
            "server_list": [
                {"server_id": f"10.0.0.{n}", "device": [{"device_id": "0", "rank_id": str(n)}]} for n in (0, 1)
            ],
            "status": "completed",
        }
    ),
}


def fill(folder: Path) -> Path:
    """Return the folder with a script that would leave a trace, and the files that the tests name."""
    (folder / "train.py").write_text("open('started', 'w').close()\n")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    return fill(tmp_path)


WRONG = {
    "missing hostfile": (["--hostfile=no.txt"], r"--hostfile no\.txt: cannot be read \(No such file"),
    "empty hostfile": (["--hostfile=empty.txt"], r"--hostfile empty\.txt: is empty"),
    "only comments": (["--hostfile=comments.txt"], r"--hostfile comments\.txt: holds only comments"),
    "a host twice": (
        ["--hostfile=twice.txt"],
        r"--hostfile twice\.txt, line 3 and .* line 1: H1 \(h1\) is given twice",
    ),
    "slots abc": (["--hostfile=abc.txt"], r"--hostfile abc\.txt, line 2: slots 'abc' is no such number"),
    "slots 0": (["--hostfile=zero.txt"], r"--hostfile zero\.txt, line 1: slots '0'"),
    "slots -1": (["--hostfile=minus.txt"], r"--hostfile minus\.txt, line 1: slots '-1'"),
    "shell text": (["--hostfile=shell.txt"], r"--hostfile shell\.txt, line 1: '\$\(id\)' is neither"),
    "hosts of shell text": (["--hosts=h1;id"], r"--hosts: 'h1;id' is neither a host name nor an address"),
    "option as a host": (["--hosts=-oProxyCommand=id"], r"--hosts: '-oProxyCommand=id' starts with '-'"),
    "no hosts": (["--hosts="], r"--hosts: is empty"),
    "unknown host": (["--hosts=h1:2", "--include=h9"], r"--include h9: h9 is none of the job's hosts"),
    "unknown slot": (["--hosts=h1:2", "--include=h1:2"], r"--include h1:2: h1 has no device 2; its devices are 0-1"),
    "both filters": (["--hosts=h1", "--include=h1", "--exclude=h1"], r"--include and --exclude: give one of the two"),
    "both lists": (["--hosts=h1", "--hostfile=hosts.txt"], r"--hosts and --hostfile: give one of the two"),
    "loopback master": (
        ["--hosts=h1,h2", "--master_addr=127.0.0.1"],
        r"--master_addr 127\.0\.0\.1: the 2 hosts cannot reach each other by it",
    ),
    "workers": (["--hosts=h1:2,h2:2", "--worker_num=8"], r"--worker_num 8: the slots of 2 hosts add up to 4"),
    "node rank": (["--hosts=h1", "--node_rank=0"], r"--node_rank 0: hosts are numbered in the order"),
    "tail": (["--hosts=h1:2,h2:2", "--tail_worker_log=4"], r"--tail_worker_log 4: .*ranks are 0 to 3"),
    "relative python": (
        ["--hosts=h1", "--python=python3"],
        r"--python: python 'python3' is no absolute path; give the absolute path",
    ),
    "python without hosts": (["--python=/opt/python"], r"--python /opt/python: for hosts of --hosts"),
    "pattern": (["--hosts=h1", "--forward_env=A=1"], r"--forward_env 'A=1': .*--env gives a variable a value"),
    "variable of this host": (["--hosts=h1", "--forward_env=HOME"], r"--forward_env HOME: belongs to this host"),
    "table of other hosts": (
        ["--hosts=h1,h2", "--rank_table_file=table.json"],
        r"--rank_table_file .*table\.json: its server 10\.0\.0\.0 is no host of --hosts",
    ),
    "ssh without hosts": (["--ssh"], r"--ssh: no hosts are given"),
    "log dir is a file": (["--hosts=h1", "--log_dir=train.py"], r"--log_dir .*train\.py is a file; give a directory"),
}


@pytest.fixture(scope="module")
def answers(msrun_of_module: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and errors of every wrong command; one process tries them all, it takes long to come up."""
    folder = fill(tmp_path_factory.mktemp("wrong"))
    before = sorted(os.listdir(folder))
    done = subprocess.run(
        [sys.executable, "-c", EACH],
        input=json.dumps({name: [*arguments, "train.py"] for name, (arguments, _) in WRONG.items()}),
        cwd=folder,
        env=msrun_of_module.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(os.listdir(folder)) == before
    return {name: tuple(answer) for name, answer in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_hosts_are_refused_in_one_line_and_nothing_happens(
    answers: dict[str, tuple[int, str]], name: str
) -> None:
    code, said = answers[name]
    assert code == 2, said
    assert said.startswith("msrun: error: ") and said.count("\n") == 1
    assert re.search(WRONG[name][1], said), said


@pytest.mark.parametrize("form", one_fast("text", "json"))
def test_dry_run_opens_no_socket_resolves_no_name_and_writes_nothing(msrun: JobRunner, cwd: Path, form: str) -> None:
    before = sorted(os.listdir(cwd))
    command = [sys.executable, "-c", DRY_RUN]
    texts = set()
    for _ in range(2):
        finished = msrun.run(*OPTIONS, f"--dry_run={form}", "train.py", cwd=cwd, env=ENV, command=command)
        assert (finished.code, finished.stderr) == (0, "")
        texts.add(finished.stdout)
    assert len(texts) == 1
    assert sorted(os.listdir(cwd)) == before
    assert b"hidden" not in texts.pop()


def test_dry_run_says_who_runs_what_and_what_goes_there(msrun: JobRunner, cwd: Path) -> None:
    text = msrun.run(*OPTIONS, "--dry_run", "train.py", cwd=cwd, env=ENV).stdout.decode()
    assert re.search(r"0 +h1 +3 +0-2 +0-2 +- +me +2222", text)
    assert re.search(r"1 +10\.0\.0\.7 +1 +3 +5 +10\.0\.0\.7 +- +- +/opt/py/bin/python", text)
    assert "agent        exec /bin/sh -c ... (a program of " in text
    for line in ("  HF_TOKEN=********", "  NCCL_DEBUG=INFO", '  MY_OWN=it\'s = "a\\nb"', "  A=b\\nc"):
        assert line in text.splitlines()
    assert "HOME_GROWN" not in text
    assert str(cwd / "log_output" / "worker_3.log") in text


def test_json_of_the_plan_holds_every_worker_of_every_host(msrun: JobRunner, cwd: Path) -> None:
    plan = json.loads(msrun.run(*OPTIONS, "--dry_run=json", "train.py", cwd=cwd, env=ENV).stdout)
    workers = [(host["name"], worker) for host in plan["hosts"] for worker in host["workers"]]
    assert [(name, worker["global_rank"], worker["local_rank"]) for name, worker in workers] == [
        ("h1", 0, 0),
        ("h1", 1, 1),
        ("h1", 2, 2),
        ("10.0.0.7", 3, 0),
    ]
    assert [host["env"]["LOCAL_WORLD_SIZE"] for host in plan["hosts"]] == ["3", "1"]
    assert plan["hosts"][1]["agent"]["command"].count(" sh /opt/py/bin/python -c ") == 1
    assert plan["forwarded"]["MY_OWN"] == ENV["MY_OWN"]
    assert plan["forwarded"]["HF_TOKEN"] == plan["hosts"][0]["env"]["API_KEY"] == "********"


def test_servers_of_a_rank_table_are_hosts_with_ssh(msrun: JobRunner, cwd: Path) -> None:
    finished = msrun.run("--ssh", "--rank_table_file=table.json", "--dry_run=json", "train.py", cwd=cwd)
    plan = json.loads(finished.stdout)
    assert [(host["name"], host["workers"][0]["env"]["RANK"]) for host in plan["hosts"]] == [
        ("10.0.0.0", "0"),
        ("10.0.0.1", "1"),
    ]
    assert plan["master"]["address"] == "10.0.0.0"


def test_hosts_may_come_from_the_environment_and_from_a_file(msrun: JobRunner, cwd: Path) -> None:
    (cwd / "job.yaml").write_text("script: train.py\nhosts: 'h1:2,h2:2'\nforward_env: ['MY_*', none]\n")
    arguments = ["--config=job.yaml", "--dry_run=json"]
    plan = json.loads(msrun.run(*arguments, cwd=cwd, env=ENV).stdout)
    assert (plan["world_size"], list(plan["forwarded"])) == (4, ["MY_OWN"])
    plan = json.loads(msrun.run(*arguments, cwd=cwd, env={"MSRUN_HOSTS": "h3:7"}).stdout)
    assert plan["world_size"] == 7


def test_list_of_only_this_host_is_an_ordinary_job(msrun: JobRunner, workers: Path, cwd: Path) -> None:
    finished = msrun.run("--hosts=localhost:4", "--include=localhost:1,3", workers / "record.py", cwd=cwd)
    assert finished.code == 0, finished.stderr
    records = [json.loads((cwd / f"record_{rank}.json").read_text())["env"] for rank in (0, 1)]
    assert [(env["RANK"], env["WORLD_SIZE"], env["DEVICE_ID"]) for env in records] == [("0", "2", "1"), ("1", "2", "3")]


DECIDED_THERE = {"MASTER_PORT", "MS_SCHED_PORT", "MSRUN_DEVICE_TARGET", "MSRUN_LOG_DIR", "MSRUN_PROGRESS"}
DECIDED_THERE |= {"MSRUN_RENDEZVOUS", "OMP_NUM_THREADS", "RANK_TABLE_FILE"}
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def test_dry_run_is_what_a_run_carries_out(msrun: JobRunner, workers: Path, cwd: Path) -> None:
    """Another spelling of the interpreter makes this host one that an agent is started on."""
    python = f"{Path(sys.executable).parent}/./{Path(sys.executable).name}"
    arguments = ["--hosts=localhost:2", f"--python={python}", "--env", "API_KEY=hidden", "--forward_env=MY_*"]
    dry = json.loads(msrun.run(*arguments, "--dry_run=json", workers / "record.py", cwd=cwd, env=ENV).stdout)
    finished = msrun.run(*arguments, workers / "record.py", cwd=cwd, env=ENV)
    assert finished.code == 0, finished.stderr
    real = finished.read_plan()
    env = real["hosts"][0]["env"]
    assert env.keys() - dry["hosts"][0]["env"].keys() == DECIDED_THERE | INTERFACES
    (note,) = [note for note in dry["notes"] if note.startswith("decided on the hosts")]
    assert all(name in note for name in DECIDED_THERE)
    assert without_what_is_chosen_there(dry) == without_what_is_chosen_there(real)
    record = json.loads((cwd / "record_0.json").read_text())["env"]
    assert (record["MY_OWN"], record["HF_TOKEN"], record["API_KEY"]) == (ENV["MY_OWN"], "hidden", "hidden")
    written = [path.read_bytes() for path in finished.log_dir.iterdir() if path.is_file()]
    assert not any(b"hidden" in data for data in written)


def without_what_is_chosen_there(plan: dict[str, Any]) -> dict[str, Any]:
    (host,) = plan["hosts"]
    for name in (*DECIDED_THERE, *INTERFACES, "MSRUN_JOB_ID", "TORCHELASTIC_RUN_ID"):
        host["env"].pop(name, None)
    for worker in host["workers"]:
        del worker["binding"]
    for name in ("job_id", "run_dir", "notes", "device_target", "device_reason", "settings"):
        del plan[name]
    del host["name"], host["address"], plan["master"]["port"]
    return plan
