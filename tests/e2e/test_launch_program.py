"""What a job runs: every form of SCRIPT with its arguments, a script from a pipe, a function."""

import os
import re
import signal
import subprocess
import sys

import pytest
from asked_cases import one_fast, slow_but
from job_runner import REPOSITORY, WORKERS, latest_job, read_record, wait_until

HOSTILE = [
    b"", b"I'm 72\" tall", b"$HOME", b"`touch x`", b";touch x", b"$(touch x)", b"*", b"two\nlines", b"tab\tand\r",
    b"back\\slash\\", "emoji 🚀 ünï".encode(), b"--help", b"--worker_num=3", b"--dry_run", b"--join", b"-m", b"--",
    b"-", b"not utf-8 \xff\xfe", b"{0} %s %%", b"=", b"{rank}",
]  # fmt: skip


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_hostile_arguments_arrive_unchanged(msrun, odd_path, method):
    """At a script with an odd name in an odd directory."""
    script = odd_path / "it's $1 ☃.py"
    script.write_bytes((WORKERS / "record.py").read_bytes())
    finished = msrun.run("--worker_num=1", "--start_method", method, script.name, *HOSTILE, cwd=odd_path)
    assert finished.code == 0, finished.stderr
    argv = read_record(odd_path, 0)["argv"]
    assert [word.encode("latin-1") for word in argv] == [os.fsencode(script.name), *HOSTILE]
    assert not (odd_path / "x").exists()


@pytest.mark.slow
def test_hostile_arguments_arrive_unchanged_at_a_shell_script(msrun, odd_path):
    finished = msrun.run("--worker_num=2", WORKERS / "record.sh", *HOSTILE, cwd=odd_path)
    assert finished.code == 0, finished.stderr
    for rank in (0, 1):
        assert (odd_path / f"args_{rank}").read_bytes().split(b"\0")[:-1] == HOSTILE
    assert not (odd_path / "x").exists()


def command_without_cwd():
    """Return a command that starts msrun as its console script does: without '' on the module path."""
    return [sys.executable, "-P", "-c", "from msrun.cli import main; main()"]


@pytest.mark.slow
def test_script_of_the_working_directory_wins_over_a_module_of_the_callers(msrun, tmp_path):
    """The fork server never imports from the directory that msrun is typed in."""
    (tmp_path / "click.py").write_text("raise SystemExit('wrong click')\n")
    (tmp_path / "train.py").write_text("import json; print(json.dumps([1]))\n")
    assert msrun.run("--worker_num=1", "train.py", cwd=tmp_path, command=command_without_cwd()).code == 0


# -- a script that can be read only once, and arguments that differ by rank -----

SHOWS = "import os, sys\nprint(os.environ['RANK'], sys.argv[1:], __name__)\n"


def pipe_into(msrun, cwd, *words, text=SHOWS):
    command = [sys.executable, "-m", "msrun", *words]
    return subprocess.run(
        command, cwd=cwd, env=msrun.environ(), input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_script_from_standard_input_is_read_once_and_stays_with_the_logs(msrun, tmp_path):
    done = pipe_into(msrun, tmp_path, "--worker_num=2", "--start_method=exec", "-", "a", "b")
    assert done.returncode == 0, done.stderr
    folder = latest_job(tmp_path / "log_output")
    assert [(folder / f"worker_{rank}.log").read_text() for rank in (0, 1)] == [
        f"{rank} ['a', 'b'] __main__\n" for rank in (0, 1)
    ]
    assert (folder / "script.py").read_text() == SHOWS


@pytest.mark.slow
def test_a_script_from_a_named_pipe_fails_under_the_name_of_its_copy(msrun, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", "printf '\\nraise ValueError(3)\\n' > pipe"], cwd=tmp_path):
        failed = msrun.run("--worker_num=2", "--start_method=exec", "pipe", "x", cwd=tmp_path)
    assert failed.code == 1 and '/script.py", line 2' in failed.stderr


@pytest.mark.parametrize(
    ("words", "text", "told"),
    one_fast(
        (["-"], " \n", "-: no program came from there"),
        (["--rehearse=1x1", "-"], SHOWS, "- and --rehearse: the script is read here, once; give a file"),
    ),
)
def test_what_cannot_be_is_refused(msrun, tmp_path, words, text, told):
    done = pipe_into(msrun, tmp_path, *words, text=text)
    assert done.returncode == 2
    assert done.stderr.startswith(f"msrun: error: {told}") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "log_output").exists()


@pytest.mark.parametrize(
    ("how", "where", "node", "local"), one_fast(("fork", "--worker_num=2", 0, 1), ("exec", "--rehearse=2x1", 1, 0))
)
def test_arguments_are_the_ranks_own_when_that_is_asked_for_and_so_is_the_role(
    msrun, tmp_path, how, where, node, local
):
    role = "print(*(os.environ[f'ROLE_{name}'] for name in ('NAME', 'RANK', 'WORLD_SIZE')))\n"
    (tmp_path / "train.py").write_text(SHOWS + role)
    options = [where, "--rank_args", "--pass_local_rank", "--role=actor", f"--start_method={how}"]
    done = msrun.run(*options, "train.py", "data-{rank}.bin", "{node_rank}{other}", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.log(1).decode() == f"1 ['--local-rank={local}', 'data-1.bin', '{node}{{other}}'] __main__\nactor 1 2\n"


def test_a_second_program_is_refused(msrun_here, tmp_path):
    job = msrun_here("-n", "1", "true", ":", "-n", "3", "true", cwd=tmp_path)
    assert (job.code, len(job.stderr.splitlines())) == (2, 1)
    assert "a job has one program; let a script choose by RANK" in job.stderr


# -- `msrun.run`: a function on all ranks from Python; what they return, what they raise, and how the job ends -----

HEAD = "import os, sys, time\nimport msrun\n"


def call(msrun, cwd, program):
    (cwd / "program.py").write_text(HEAD + program)
    return msrun.start(cwd=cwd, command=[sys.executable, "program.py"]).finish()


@pytest.mark.parametrize("function", one_fast("work", "lambda word, times: work(word, times=times)"))
def test_values_of_all_ranks_come_back_in_their_order(msrun, tmp_path, function):
    program = (
        "def work(word, times=1):\n    print('rank', os.environ['RANK'])\n"
        "    return word * times, int(os.environ['RANK'])\n"
        f"print(msrun.run({function}, ('a',), {{'times': 2}}, workers=3))\n"
    )
    done = call(msrun, tmp_path, program)
    assert done.code == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert "rank 0" in lines and "rank 1" not in lines
    assert lines[-1] == "[('aa', 0), ('aa', 1), ('aa', 2)]"


FAILING = """
class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)
def work(how):
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if how == "signal":
        os.kill(os.getpid(), 9)
    raise Odd(1, 2) if how == "odd" else ValueError("no such row")
try:
    msrun.run(work, ({!r},), workers={}, options=["--quiet"])
except Exception as error:
    print("caught", type(error).__name__, str(error), *getattr(error, "__notes__", []))
"""


@pytest.mark.parametrize(
    ("how", "workers", "caught"),
    slow_but(
        ("raise",),
        [
            ("raise", "2", r"ValueError no such row msrun: rank 1 on .*worker_1\.log"),
            ("signal", "2", "WorkerFailed rank 1 on .* signal SIGKILL"),
            ("odd", "2", "WorkerFailed rank 1 on .* exit code 1"),
        ],
        key=lambda how, *_: how,
    ),
)
def test_the_first_failure_is_raised_with_the_rank_that_failed(msrun, tmp_path, how, workers, caught):
    done = call(msrun, tmp_path, FAILING.format(how, workers))
    assert re.search(f"^caught {caught}", done.stdout.decode(), re.MULTILINE), (done.stdout, done.stderr)


def test_what_cannot_be_sent_to_another_process_is_refused(msrun, tmp_path):
    done = call(msrun, tmp_path, "def work(file): pass\nmsrun.run(work, (sys.stdin,), workers=1)\n")
    assert "UsageError: <function work" in done.stderr and "cannot be sent to another process" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signum", one_fast(signal.SIGINT, signal.SIGKILL))
def test_nothing_is_left_when_the_caller_ends(msrun, tmp_path, signum):
    (tmp_path / "program.py").write_text(
        HEAD + "def work():\n    open('ready_' + os.environ['RANK'], 'w').close()\n    time.sleep(600)\n"
        "msrun.run(work, workers=2)\n"
    )
    job = msrun.start(cwd=tmp_path, command=[sys.executable, "program.py"])
    wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in range(2)), "both ranks")
    job.send(signum)
    assert job.process.wait(30) == -signum
    msrun.prove_nothing_left()


INSTALLED = (sys.executable, str(REPOSITORY / "msrun_command.py"))
"""As the installed command does: its own folder, and not the current one, is where the interpreter looks first."""


@pytest.fixture
def project(tmp_path):
    package = tmp_path / "msrun"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'of the user'\n")
    (tmp_path / "plain.py").write_text("print('begins')\n")
    (tmp_path / "theirs.py").write_text("from msrun import NAME\nprint(NAME)\n")
    return tmp_path


def path(*folders):
    return {"PYTHONPATH": os.pathsep.join(folders)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said", "method"), one_fast(("plain.py", "begins", "fork"), ("theirs.py", "of the user", "exec"))
)
def test_users_package_of_our_name_breaks_nothing(msrun, project, script, said, method):
    """Workers that start by exec have it."""
    words = ["--worker_num=2", f"--start_method={method}", "--log_max_bytes=4K", script]
    job = msrun.run(*words, cwd=project, command=INSTALLED, env=path(".", str(REPOSITORY)))
    assert (job.code, job.log(1).decode()) == (0, f"{said}\n"), job.stderr


@pytest.mark.parametrize(
    "env", one_fast(path(".", str(REPOSITORY)), path(str(REPOSITORY))), ids=["PYTHONPATH", "beside"]
)
def test_one_line_says_where_it_cannot(msrun, project, env):
    job = msrun.run("--worker_num=1", "theirs.py", cwd=project, command=INSTALLED, env=env)
    assert job.code == 1
    (line,) = [line for line in job.stderr.splitlines() if "package" in line]
    assert line.startswith(f"msrun: {project}/msrun: workers import msrun's own package of that name")
    assert "--start_method exec" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", one_fast(["--log_max_bytes=4K"], ["--start_method=exec", "--log_max_bytes=4K"], ["--join=False"])
)
def test_nothing_is_left_open(msrun, project, options):
    words = ["--worker_num=2", *options, "plain.py"]
    job = msrun.start(*words, cwd=project, command=INSTALLED, env={"PYTHONWARNINGS": "error"}).finish()
    assert job.code == 0, job.stderr
    msrun.prove_nothing_left()
    said = [job.stderr, *(log.read_text() for log in job.log_dir.glob("*.log"))]
    assert [text for text in said if "Warning" in text] == []
