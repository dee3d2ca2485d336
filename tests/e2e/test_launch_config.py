"""--config and MSRUN_ variables: what wins, what is said about it, what is refused, and that secrets stay hidden."""

import json
import re

import pytest
from asked_cases import one_fast

from msrun.errors import UsageError

SECRET = "hunter2-and-more"


@pytest.fixture
def cwd(tmp_path):
    """A directory with two scripts and files of settings."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])\n")
    (tmp_path / "other.py").write_text("import sys; print('other', sys.argv[1:])\n")
    (tmp_path / "job.yaml").write_text(
        "version: 1\nscript: train.py\nargs: [--lr, 0.10]\nworker_num: 2\ngrace: 4\nenv: {A: file, B: file}\n"
    )
    return tmp_path


@pytest.fixture
def plan_of(msrun_here, cwd):
    """Gives the plan of a dry run."""

    def plan(*words, **env):
        finished = msrun_here("--dry_run=json", *words, cwd=cwd, env=env)
        assert finished.code == 0, finished.stderr
        return json.loads(finished.stdout)

    return plan


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
def test_the_nearer_source_wins_and_is_named(plan_of, cwd, words, env, grace, source):
    (cwd / "other.yaml").write_bytes(b"\xef\xbb\xbfgrace: 5\n")  # with a byte order mark
    plan = plan_of(*words, "--worker_num=1", "train.py", **env)
    assert plan["grace_s"] == grace
    settings = {setting["name"]: setting for setting in plan["settings"]}
    assert settings.get("grace") == (source and {"name": "grace", "value": grace, "source": source})
    assert settings["worker_num"]["source"] == "command line"


def test_settings_are_shown_and_noted_once(msrun, msrun_here, cwd):
    words = ("--config=job.yaml", "--tail_worker_log=all")
    env = {"MSRUN_GRACE": "3", "MSRUN_QUIET": "0"}
    text = msrun_here(*words, "--dry_run", cwd=cwd, env=env).stdout.decode()
    for line in (r"worker_num=2 +job\.yaml", "grace=3 +MSRUN_GRACE", "tail_worker_log=all +command line"):
        assert re.search(rf"^  {line}$", text, re.MULTILINE)
    with (cwd / "job.yaml").open("a") as file:
        file.write("dry_run: true\nquiet: true\n")
    finished = msrun.run(*words, "--dry_run=False", cwd=cwd, env=env)
    assert finished.code == 0, finished.stderr
    (note,) = [line for line in finished.stderr.splitlines() if line.startswith("msrun: settings: ")]
    for part in ("worker_num=2 (job.yaml)", "grace=3 (MSRUN_GRACE)", "script=train.py --lr 0.10 (job.yaml)"):
        assert part in note
    assert "tail_worker_log" not in note
    assert finished.stdout.count(b"['--lr', '0.10']") == 2


def test_script_of_the_command_line_replaces_that_of_the_file_with_its_arguments(plan_of, cwd):
    (cwd / "module.yaml").write_text("script: json.tool\nmodule: true\nargs: [--help]\nworker_num: 1\n")
    (cwd / "below").mkdir()
    (cwd / "below" / "job.yaml").write_text("script: train.py\nworker_num: 1\nlog_dir: logs\n")

    def program(*words):
        found = plan_of(*words)["hosts"][0]["program"]
        return found["kind"], found["target"], found["args"]

    assert program("--config=job.yaml", "other.py", "x") == ("script", str(cwd / "other.py"), ["x"])
    assert program("--config=module.yaml") == ("module", "json.tool", ["--help"])
    assert program("--config=module.yaml", "train.py") == ("script", str(cwd / "train.py"), [])
    assert program("--config=below/job.yaml") == ("script", str(cwd / "train.py"), []), "from where msrun is started"
    assert plan_of("--config=below/job.yaml")["log_dir"] == str(cwd / "logs")


def test_variables_of_all_sources_are_collected_by_name(plan_of, cwd):
    (cwd / "lines.env").write_text("A=env_file\nD=env_file\n")

    def seen(*words):
        found = plan_of("--config=job.yaml", *words, MSRUN_ENV="B='of the environment' C=e")["hosts"][0]["env"]
        return {name: found[name] for name in "ABCD" if name in found}

    assert seen("--env=C=given") == {"A": "file", "B": "of the environment", "C": "given"}
    assert seen("--env_file=lines.env") == {"A": "env_file", "B": "of the environment", "C": "e", "D": "env_file"}
    (cwd / "job.yaml").write_text("script: train.py\nworker_num: 1\nenv: {A: file}\nenv_file: lines.env\n")
    assert seen() == {"A": "file", "B": "of the environment", "C": "e", "D": "env_file"}


def test_every_switch_can_be_taken_back(msrun_here, cwd):
    (cwd / "all.yaml").write_text("script: train.py\nworker_num: 1\nquiet: true\ndry_run: true\ndebug: true\n")
    assert b"command " in msrun_here("--config=all.yaml", cwd=cwd).stdout
    assert json.loads(msrun_here("--config=all.yaml", cwd=cwd, env={"MSRUN_DRY_RUN": "json"}).stdout)
    (cwd / "debug.yaml").write_text("debug: true\n")
    with pytest.raises(UsageError):  # as it was raised, for a traceback
        msrun_here("--config=debug.yaml", "no.py", cwd=cwd)
    assert msrun_here("--debug=False", "no.py", cwd=cwd, env={"MSRUN_DEBUG": "1"}).code == 2


@pytest.mark.parametrize("start_method", one_fast("fork", "exec"))
def test_secrets_reach_the_worker_and_nothing_that_msrun_writes(msrun, msrun_here, cwd, start_method):
    (cwd / "secret.py").write_text(
        "import json, os, pathlib, sys\n"
        "title = pathlib.Path('/proc/self/cmdline').read_text().replace(chr(0), ' ')\n"
        "pathlib.Path('seen.json').write_text(json.dumps([sys.argv[1:], os.environ['DB_PASSWORD'], title]))\n"
        "raise SystemExit('refused: ' + ' '.join(sys.argv[1:]))\n"
    )
    given = ["--api_key", SECRET, f"--token={SECRET}", f"https://me:{SECRET}@host/", "--lr", "0.1"]
    options = ["--worker_num=1", f"--start_method={start_method}", f"--env=DB_PASSWORD={SECRET}"]
    finished = msrun.run(*options, "secret.py", *given, cwd=cwd)
    assert finished.code == 1, finished.stderr
    args, password, title = json.loads((cwd / "seen.json").read_text())
    assert (args, password) == (given, SECRET)
    assert (SECRET in title) == (start_method == "exec")
    assert SECRET.encode() in finished.log(0)
    written = {path.name: path.read_text() for path in finished.log_dir.iterdir() if path.name != "worker_0.log"}
    assert {"plan.json", "events.jsonl", "scheduler.log", "failure.json"} <= set(written)
    assert [name for name, text in written.items() if SECRET in text] == []
    assert SECRET not in finished.stderr
    assert finished.read_json("plan.json")["hosts"][0]["program"]["args"][-2:] == ["--lr", "0.1"]
    for form in ("text", "json"):
        dry = msrun_here(*options, f"--dry_run={form}", "secret.py", *given, cwd=cwd)
        assert dry.code == 0 and SECRET.encode() not in dry.stdout
