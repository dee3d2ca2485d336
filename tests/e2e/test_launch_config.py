"""--config and MSRUN_ variables: what wins, what is said about it, what is refused, and that secrets stay hidden."""

import functools
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

from msrun.errors import UsageError
from ranktable import build_table, write_table

SECRET = "hunter2-and-more"


@pytest.fixture
def folder(tmp_path):
    """A directory with two scripts and files of settings."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])\n")
    (tmp_path / "other.py").write_text("import sys; print('other', sys.argv[1:])\n")
    (tmp_path / "job.yaml").write_text(
        "version: 1\nscript: train.py\nargs: [--lr, 0.10]\nworker_num: 2\ngrace: 4\nenv: {A: file, B: file}\n"
    )
    return tmp_path


def dry_plan(msrun_here, cwd, *words, **env):
    finished = msrun_here("--dry_run=json", *words, cwd=cwd, env=env)
    assert finished.code == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture
def plan_of(msrun_here, folder):
    """Gives the plan of a dry run."""
    return functools.partial(dry_plan, msrun_here, folder)


@pytest.mark.parametrize(
    ("words", "env", "grace", "source"),
    [
        ([], {}, 10.0, None),
        (["--config=job.yaml"], {}, 4.0, "job.yaml"),
        ([], {"MSRUN_GRACE": "3"}, 3.0, "MSRUN_GRACE"),
        (["--config=job.yaml"], {"MSRUN_GRACE": "3"}, 3.0, "MSRUN_GRACE"),
        (["--config=job.yaml"], {"MSRUN_GRACE": ""}, 4.0, "job.yaml"),
        (["--config=job.yaml", "--grace=2"], {"MSRUN_GRACE": "3"}, 2.0, "command line"),
        (["--grace=10"], {"MSRUN_GRACE": "3"}, 10.0, "command line"),
        ([], {"MSRUN_CONFIG": "job.yaml"}, 4.0, "job.yaml"),
        (["--config=other.yaml"], {"MSRUN_CONFIG": "job.yaml"}, 5.0, "other.yaml"),
    ],
)
def test_the_nearer_source_wins_and_is_named(plan_of, folder, words, env, grace, source):
    (folder / "other.yaml").write_bytes(b"\xef\xbb\xbfgrace: 5\n")  # with a byte order mark
    plan = plan_of(*words, "--worker_num=1", "train.py", **env)
    assert plan["grace_s"] == grace
    settings = {setting["name"]: setting for setting in plan["settings"]}
    assert settings.get("grace") == (source and {"name": "grace", "value": grace, "source": source})
    assert settings["worker_num"]["source"] == "command line"


def test_settings_are_shown_and_noted_once(msrun, msrun_here, folder):
    words = ("--config=job.yaml", "--tail_worker_log=all")
    env = {"MSRUN_GRACE": "3", "MSRUN_QUIET": "0"}
    text = msrun_here(*words, "--dry_run", cwd=folder, env=env).stdout.decode()
    for line in (r"worker_num=2 +job\.yaml", "grace=3 +MSRUN_GRACE", "tail_worker_log=all +command line"):
        assert re.search(rf"^  {line}$", text, re.MULTILINE)
    with (folder / "job.yaml").open("a") as file:
        file.write("dry_run: true\nquiet: true\n")
    finished = msrun.run(*words, "--dry_run=False", cwd=folder, env=env)
    assert finished.code == 0, finished.stderr
    (note,) = [line for line in finished.stderr.splitlines() if line.startswith("msrun: settings: ")]
    for part in ("worker_num=2 (job.yaml)", "grace=3 (MSRUN_GRACE)", "script=train.py --lr 0.10 (job.yaml)"):
        assert part in note
    assert "tail_worker_log" not in note
    assert finished.stdout.count(b"['--lr', '0.10']") == 2


def test_script_of_the_command_line_replaces_that_of_the_file_with_its_arguments(plan_of, folder):
    (folder / "module.yaml").write_text("script: json.tool\nmodule: true\nargs: [--help]\nworker_num: 1\n")
    (folder / "below").mkdir()
    (folder / "below" / "job.yaml").write_text("script: train.py\nworker_num: 1\nlog_dir: logs\n")

    def program(*words):
        found = plan_of(*words)["hosts"][0]["program"]
        return found["kind"], found["target"], found["args"]

    assert program("--config=job.yaml", "other.py", "x") == ("script", str(folder / "other.py"), ["x"])
    assert program("--config=module.yaml") == ("module", "json.tool", ["--help"])
    assert program("--config=module.yaml", "train.py") == ("script", str(folder / "train.py"), [])
    assert program("--config=below/job.yaml") == ("script", str(folder / "train.py"), []), "from where msrun is started"
    assert plan_of("--config=below/job.yaml")["log_dir"] == str(folder / "logs")


def test_variables_of_all_sources_are_collected_by_name(plan_of, folder):
    (folder / "lines.env").write_text("A=env_file\nD=env_file\n")

    def seen(*words):
        found = plan_of("--config=job.yaml", *words, MSRUN_ENV="B='of the environment' C=e")["hosts"][0]["env"]
        return {name: found[name] for name in "ABCD" if name in found}

    assert seen("--env=C=given") == {"A": "file", "B": "of the environment", "C": "given"}
    assert seen("--env_file=lines.env") == {"A": "env_file", "B": "of the environment", "C": "e", "D": "env_file"}
    (folder / "job.yaml").write_text("script: train.py\nworker_num: 1\nenv: {A: file}\nenv_file: lines.env\n")
    assert seen() == {"A": "file", "B": "of the environment", "C": "e", "D": "env_file"}


def test_every_switch_can_be_taken_back(msrun_here, folder):
    (folder / "all.yaml").write_text("script: train.py\nworker_num: 1\nquiet: true\ndry_run: true\ndebug: true\n")
    assert b"command " in msrun_here("--config=all.yaml", cwd=folder).stdout
    assert json.loads(msrun_here("--config=all.yaml", cwd=folder, env={"MSRUN_DRY_RUN": "json"}).stdout)
    (folder / "debug.yaml").write_text("debug: true\n")
    with pytest.raises(UsageError):  # as it was raised, for a traceback
        msrun_here("--config=debug.yaml", "no.py", cwd=folder)
    assert msrun_here("--debug=False", "no.py", cwd=folder, env={"MSRUN_DEBUG": "1"}).code == 2


@pytest.mark.parametrize("start_method", one_fast("fork", "exec"))
def test_secrets_reach_the_worker_and_nothing_that_msrun_writes(msrun, msrun_here, folder, start_method):
    (folder / "secret.py").write_text(
        "import json, os, pathlib, sys\n"
        "title = pathlib.Path('/proc/self/cmdline').read_text().replace(chr(0), ' ')\n"
        "pathlib.Path('seen.json').write_text(json.dumps([sys.argv[1:], os.environ['DB_PASSWORD'], title]))\n"
        "raise SystemExit('refused: ' + ' '.join(sys.argv[1:]))\n"
    )
    given = ["--api_key", SECRET, f"--token={SECRET}", f"https://me:{SECRET}@host/", "--lr", "0.1"]
    options = ["--worker_num=1", f"--start_method={start_method}", f"--env=DB_PASSWORD={SECRET}"]
    finished = msrun.run(*options, "secret.py", *given, cwd=folder)
    assert finished.code == 1, finished.stderr
    args, password, title = json.loads((folder / "seen.json").read_text())
    assert (args, password) == (given, SECRET)
    assert (SECRET in title) == (start_method == "exec")
    assert SECRET.encode() in finished.log(0)
    written = {path.name: path.read_text() for path in finished.log_dir.iterdir() if path.name != "worker_0.log"}
    assert {"plan.json", "events.jsonl", "scheduler.log", "failure.json"} <= set(written)
    assert [name for name, text in written.items() if SECRET in text] == []
    assert SECRET not in finished.stderr
    assert finished.read_json("plan.json")["hosts"][0]["program"]["args"][-2:] == ["--lr", "0.1"]
    for form in ("text", "json"):
        dry = msrun_here(*options, f"--dry_run={form}", "secret.py", *given, cwd=folder)
        assert dry.code == 0 and SECRET.encode() not in dry.stdout


# -- --dry_run touches nothing and prints exactly the plan of the run, also of hosts; --check says what a host lacks --

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


def test_dry_run_is_the_plan_of_the_run(msrun, msrun_here, tmp_path):
    script = [WORKERS / "record.py", "--lr", "0.1"]
    dry = dry_plan(msrun_here, tmp_path, *OPTIONS, *script)
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
    plan = dry_plan(msrun_here, cwd, "--ssh", "--rank_table_file=table.json", "train.py")
    ranks = [(host["name"], host["workers"][0]["env"]["RANK"]) for host in plan["hosts"]]
    assert (ranks, plan["master"]["address"]) == ([("10.0.0.0", "0"), ("10.0.0.1", "1")], "10.0.0.0")
    (cwd / "job.yaml").write_text("script: train.py\nhosts: 'h1:2,h2:2'\nforward_env: ['MY_*', none]\n")
    plan = dry_plan(msrun_here, cwd, "--config=job.yaml", **ENV)
    assert (plan["world_size"], list(plan["forwarded"])) == (4, ["MY_OWN"])
    assert dry_plan(msrun_here, cwd, "--config=job.yaml", MSRUN_HOSTS="h3:7")["world_size"] == 7


DECIDED_THERE = {"MASTER_PORT", "MS_SCHED_PORT", "MSRUN_DEVICE_TARGET", "MSRUN_LOG_DIR", "MSRUN_PROGRESS"}
DECIDED_THERE |= {"MSRUN_RENDEZVOUS", "OMP_NUM_THREADS", "RANK_TABLE_FILE"}
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def test_dry_run_is_what_a_run_carries_out(msrun, msrun_here, cwd):
    """Another spelling of the interpreter makes this host one that an agent is started on."""
    python = f"{Path(sys.executable).parent}/./{Path(sys.executable).name}"
    arguments = ["--hosts=localhost:2", f"--python={python}", "--env", "API_KEY=hidden", "--forward_env=MY_*"]
    dry = dry_plan(msrun_here, cwd, *arguments, WORKERS / "record.py", **ENV)
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
