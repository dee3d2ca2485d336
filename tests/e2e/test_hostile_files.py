"""Every option that names a file, on endless files, pipes, devices and links: one line, little memory, nothing lost."""

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asked_cases import one_fast, slow_but
from job_runner import DEADLINE_S, REPOSITORY, is_job_variable

MEMORY_KB = 1_500_000
"""Of address space; an endless file that is read whole fills any."""
MAINS = {
    "msrun": "import sys; from msrun.cli import main; main(sys.argv[1:])",
    "ranktable": "import sys; from ranktable.cli import main; sys.exit(main(sys.argv[1:]))",
    "launch-template": "import sys; from launch_templates.cli import main; main(sys.argv[1:])",
}
RENDER = ("launch-template", "render", "jobset", "--set", "name=a", "--set", "image=r.example/a:1")
END = ("--", "t.py")
GENERATE = ("ranktable", "generate", "--hosts", "10.0.0.1:2")
READERS = {
    **{
        option: ("msrun", "--worker_num=1", f"--{option}=FILE", "true")
        for option in ("config", "env_file", "token_file", "rank_table_file", "tls_config", "hostfile")
    },
    "ssh_config": ("msrun", "--hosts=203.0.113.1:1", "--ssh_config=FILE", "true"),
    "values": (*RENDER, "--values", "FILE", *END),
    "patch": (*RENDER, "--patch", "FILE", *END),
    "from": (*RENDER, "--from", "FILE", *END),
    "lint": ("launch-template", "lint", "FILE"),
    "validate": ("ranktable", "validate", "FILE"),
    "device_ips": (*GENERATE, "--device_ips", "FILE"),
}
WRITERS = {
    "metrics_file": ("msrun", "--worker_num=1", "--metrics_file=FILE", "true"),
    "generate": (*GENERATE, "-o", "FILE"),
    "render": (*RENDER, "-o", "FILE", *END),
    "trace": ("msrun", "trace", "log_output", "-o", "FILE"),
}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in ("ab", "bc", "cd", "de", "ef", "fg")
)


def run(cwd, words, file):
    """Run a command with `file` in the place of FILE, in little memory."""
    program, *rest = (word.replace("FILE", file) for word in words)
    command = ["sh", "-c", f'ulimit -v {MEMORY_KB}; exec "$@"', "sh", sys.executable, "-c", MAINS[program], *rest]
    kept = {name: value for name, value in os.environ.items() if not is_job_variable(name)}
    env = {**kept, "PYTHONPATH": str(REPOSITORY), "HOME": str(cwd)}
    how = {"cwd": cwd, "env": env, "stdin": subprocess.DEVNULL, "timeout": DEADLINE_S}
    return subprocess.run(command, **how, capture_output=True, text=True, check=False)


def assert_refused(done):
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1 and "error: " in done.stderr, done.stderr


@pytest.mark.parametrize("name", slow_but(("config", "values", "validate"), READERS))
def test_an_endless_file_is_refused_in_one_line_and_little_memory(tmp_path, name):
    done = run(tmp_path, READERS[name], "/dev/zero")
    assert_refused(done)
    assert "/dev/zero" in done.stderr
    assert set(os.listdir(tmp_path)) <= {"log_output"}


@pytest.mark.slow
def test_a_pipe_that_nobody_writes_to_ends_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with ThreadPoolExecutor(len(READERS)) as threads:  # each waits for 10 s
        for done in threads.map(lambda words: run(tmp_path, words, "fifo"), READERS.values()):
            assert_refused(done)


@pytest.mark.parametrize("name", one_fast("values", "patch", "lint", "device_ips"))
def test_aliases_of_aliases_are_refused_in_one_line(tmp_path, name):
    (tmp_path / "bomb.yaml").write_text(BOMB)
    done = run(tmp_path, READERS[name], "bomb.yaml")
    assert_refused(done)
    assert "aliases" in done.stderr


@pytest.mark.slow
def test_a_token_comes_through_a_pipe(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    writer = threading.Thread(target=fifo.write_text, args=("some-letters\n",))
    writer.start()
    done = run(tmp_path, READERS["token_file"], "fifo")
    writer.join()
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path):
    """With what a job has left."""
    (tmp_path / "log_output").mkdir()
    plan = '{"job_id": "J", "run_dir": "/nowhere", "hosts": []}'
    (tmp_path / "log_output" / "plan.json").write_text(plan)
    (tmp_path / "log_output" / "events.jsonl").write_text('{"time": 1.0, "event": "x"}\n')
    return tmp_path


@pytest.mark.parametrize("name", slow_but(("generate",), WRITERS))
def test_outputs_leave_devices_pipes_and_links_what_they_are(folder, name):
    try:
        os.mknod(folder / "null.html", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # a node like /dev/null
    except PermissionError:
        pytest.skip("only root makes device nodes")
    os.mkfifo(folder / "fifo.html")
    (folder / "target.html").write_text("old")
    (folder / "link.html").symlink_to("target.html")
    reader = os.open(folder / "fifo.html", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for file in ("null.html", "fifo.html", "link.html"):
            done = run(folder, WRITERS[name], file)
            assert done.returncode == 0, done
        assert len(os.read(reader, 1000)) > 20
    finally:
        os.close(reader)
    assert stat.S_ISCHR((folder / "null.html").lstat().st_mode)
    assert (folder / "fifo.html").is_fifo()
    assert os.readlink(folder / "link.html") == "target.html"
    assert len((folder / "target.html").read_text()) > 20
    known = {"null.html", "fifo.html", "link.html", "target.html", "log_output"}
    assert set(os.listdir(folder)) - known == set()
