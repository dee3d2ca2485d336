"""What a worker does: it is bound, torch is watched as it joins, its program runs as the interpreter runs it."""

import importlib
import os
import platform
import signal
import subprocess
import sys
import threading
from contextlib import closing
from types import ModuleType
from unittest import mock

import pytest
from fake_agents import FakeClock
from job_runner import REPOSITORY

from msrun import contract
from msrun.agent.host.host_facts import read_topology
from msrun.agent.processes import main_module
from msrun.agent.processes import progress_board as joining
from msrun.agent.processes.child import MPOL_BIND, MPOL_PREFERRED, SET_MEMPOLICY
from msrun.agent.processes.main_module import describe_wait
from msrun.agent.processes.progress_board import PROGRESS_BOARD, Progress, ProgressBoard

ProgressRecord = pytest.importorskip("msrun.runtime.progress", exc_type=ImportError).ProgressRecord

IMPORT = "from msrun.agent.processes.child import apply_binding"
FIRST = min(os.sched_getaffinity(0))
NO_CPU = 1 + max(cpu.number for cpu in read_topology().cpus) + 1000
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236, "loongarch64": 236, "ppc64le": 260, "s390x": 268}

POLICY = f"""
import ctypes, os
def policy():
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall({GET_MEMPOLICY.get(platform.machine(), -1)}, ctypes.byref(mode), mask, 1024, None, 0):
        raise OSError(ctypes.get_errno(), "get_mempolicy")
    return mode.value, mask[0]
"""


def run(program):
    """Run a program that may bind itself."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("cpus", "text"), [((NO_CPU,), "Invalid argument"), ((FIRST, NO_CPU), f"only CPUs {FIRST} were allowed")]
)
def test_a_process_that_cannot_have_its_processors_ends_with_one_line(cpus, text):
    done = run(f"{IMPORT}; apply_binding('worker 3', {cpus}, ()); print('went on')")
    assert (done.returncode, done.stdout) == (contract.EXIT_CLUSTER, "")
    shown = ", ".join(map(str, cpus))
    assert done.stderr == f"msrun: cannot bind worker 3 to CPUs {shown}: {text}\n"


def may_set_memory_policy():
    """Return whether this kernel and container allow a policy at all: the default one needs no node."""
    number = SET_MEMPOLICY.get(platform.machine(), -1)
    program = f"import ctypes, sys; sys.exit(0 if ctypes.CDLL(None).syscall({number}, 0, None, 0) == 0 else 1)"
    return run(program).returncode == 0


needs_policy = pytest.mark.skipif(not may_set_memory_policy(), reason="the kernel allows no memory policy here")


@needs_policy
def test_memory_is_bound_to_the_node():
    node = read_topology().memory_nodes[0]
    done = run(f"{POLICY}\n{IMPORT}\napply_binding('worker 0', (), ({node},))\nprint(*policy())")
    assert done.stderr == ""
    assert done.stdout.split() == [str(MPOL_BIND), str(1 << node)]


@needs_policy
def test_memory_is_preferred_where_it_cannot_be_bound():
    """A kernel that refuses to bind is played by one whose first answer is lost."""
    node = read_topology().memory_nodes[0]
    done = run(
        f"{POLICY}\nfrom msrun.agent.processes import child as affinity\nreal = affinity._set_mempolicy\n"
        "def refuse(mode, nodes):\n"
        "    if mode == affinity.MPOL_BIND:\n        raise OSError(22, 'Invalid argument')\n    real(mode, nodes)\n"
        f"affinity._set_mempolicy = refuse\naffinity.apply_binding('worker 0', (), [{node}])\nprint(*policy())"
    )
    assert done.stderr == ""
    assert done.stdout.split() == [str(MPOL_PREFERRED), str(1 << node)]


def test_memory_that_cannot_be_had_is_written_down_and_the_process_goes_on():
    done = run(f"{IMPORT}; apply_binding('worker 3', (), (999,)); print('went on')")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("msrun: cannot bind the memory of worker 3 to NUMA node 999: ")
    assert done.stderr.endswith("; going on without\n") and "Success" not in done.stderr


BECOME = """
import os, resource, sys, types
from msrun.agent.processes.child import Given, become
from msrun.agent.processes.server_handle import ProcessSpec
from msrun.planning.program import Program
"""


def test_terminal_that_cannot_be_opened_ends_the_process():
    done = run(f"{BECOME}become(ProcessSpec(0, '/log', terminal='/gone'), Given(os.getppid()))")
    assert done.returncode == contract.EXIT_CLUSTER
    assert done.stderr == "msrun: cannot open the terminal /gone: No such file or directory\n"


def test_program_that_cannot_be_compiled_is_left_to_the_interpreter_in_the_process_that_it_would_have(tmp_path):
    """With its environment, its number of threads and of files, and its streams."""
    (tmp_path / "bad.py").write_text("def")
    words = f"""{BECOME}
def told(*words):
    print(*words, os.environ.get("GONE"), sys.stdin.read(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    print("to stderr", file=sys.stderr)
sys.modules["torch"] = types.SimpleNamespace(set_num_threads=told)
os.environ["GONE"] = "1"
program = Program("script", {str(tmp_path / "bad.py")!r})
spec = ProcessSpec(0, "out", program, env={{"OMP_NUM_THREADS": "3", "GONE": None}}, error_log_path="err")
become(spec, Given(os.getppid(), open_files=64))
"""
    env = {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    assert subprocess.run([sys.executable, "-c", words], env=env, cwd=tmp_path, timeout=60).returncode == 1
    assert (tmp_path / "out").read_text() == "3 None  64\n"
    said = (tmp_path / "err").read_text()
    assert said.startswith("to stderr\n") and said.endswith("SyntaxError: invalid syntax\n")


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The board of three workers; this process is rank 1."""
    path = tmp_path / PROGRESS_BOARD
    monkeypatch.setenv(contract.MSRUN_PROGRESS, str(path))
    monkeypatch.setenv(contract.RANK, "1")
    monkeypatch.setenv(contract.WORLD_SIZE, "3")
    with closing(ProgressBoard(path, 3)) as board:
        board.create()
        yield board


@pytest.fixture
def torchs(board, monkeypatch):
    """A module as torch's that is watched; its one handler notes what it is called with."""
    made = ModuleType(joining.RENDEZVOUS)
    made.calls = []
    made._rendezvous_handlers = {"env": lambda *words, **settings: made.calls.append((*words, settings)) or iter(())}
    monkeypatch.setitem(sys.modules, joining.RENDEZVOUS, made)
    joining.watch_joining()
    return made


def phases(board):
    return [board.read(rank).phase for rank in range(3)]


@pytest.mark.parametrize(
    ("url", "is_told"),
    [("env://", True), ("env://?rank=1&world_size=3", True), ("tcp://h:1?rank=0&world_size=2", False)],
)
def test_meeting_of_the_whole_world_is_told_and_goes_on(board, torchs, url, is_told):
    torchs._rendezvous_handlers["env"](url, 7, timeout=9)
    assert torchs.calls == [(url, 7, {"timeout": 9})]
    told = contract.PHASE_PLAIN_TORCH if is_told else contract.PHASE_UNKNOWN
    assert phases(board) == [contract.PHASE_UNKNOWN, told, contract.PHASE_UNKNOWN]


def test_record_that_the_runtime_keeps_is_left_alone(board, torchs):
    ProgressRecord(os.environ[contract.MSRUN_PROGRESS], 1).enter_phase(contract.PHASE_JOINED)
    torchs._rendezvous_handlers["env"]("env://")
    assert board.read(1).phase == contract.PHASE_JOINED


@pytest.mark.parametrize("name", [contract.MSRUN_PROGRESS, contract.RANK, contract.WORLD_SIZE])
def test_program_that_has_removed_a_variable_meets_all_the_same(board, torchs, monkeypatch, name):
    monkeypatch.delenv(name)
    torchs._rendezvous_handlers["env"]("env://")
    assert len(torchs.calls) == 1 and phases(board) == [contract.PHASE_UNKNOWN] * 3


def test_torch_that_is_imported_later_is_watched_from_then_on_and_only_once(board, tmp_path, monkeypatch):
    (tmp_path / "another.py").touch()
    (tmp_path / "played_rendezvous.py").write_text("_rendezvous_handlers = {'env': lambda url: iter(())}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(joining, "RENDEZVOUS", "played_rendezvous")
    before = list(sys.meta_path)
    joining.watch_joining()
    assert len(sys.meta_path) == len(before) + 1
    importlib.import_module("another")
    played = importlib.import_module("played_rendezvous")
    assert sys.meta_path == before
    played._rendezvous_handlers["env"]("env://")
    assert board.read(1).phase == contract.PHASE_PLAIN_TORCH


def test_threads_that_keep_a_process_are_named_with_their_place():
    is_over, stands = threading.Event(), threading.Barrier(3)

    def upload():
        stands.wait()
        is_over.wait()

    threads = [threading.Thread(target=upload, name=name) for name in ("upload", "second")]
    threads.insert(0, threading.Thread(target=is_over.wait, name="daemon", daemon=True))
    for thread in threads:
        thread.start()
    stands.wait()
    found = describe_wait()
    is_over.set()
    for thread in threads:
        thread.join()
    assert found.startswith("thread upload at test_agent_child.py:") and found.endswith(" in upload and 1 more")
    is_over.clear()
    alone = threading.Thread(target=is_over.wait, name="of a library")
    alone.start()
    found = describe_wait()
    is_over.set()
    alone.join()
    assert found == "thread of a library"


@pytest.mark.parametrize(
    ("status", "limit", "code", "after_s"),
    [
        (7, "7.5", 7, 14.0),
        (-signal.SIGINT, "8", 130, 14.0),
        (0, "7.5", None, 5.0),
        (7, "0", None, 5.0),
        (7, "", 7, 306.0),
    ],
)
def test_process_whose_program_has_failed_is_ended_after_the_limit(
    board, monkeypatch, capfd, status, limit, code, after_s
):
    """It works for a second after the first look, which is a sign of life."""
    clock, ended = FakeClock(), mock.Mock()
    begin = clock.now
    monkeypatch.setattr(main_module.time, "sleep", clock.advance)
    monkeypatch.setattr(main_module.time, "monotonic", clock)
    monkeypatch.setattr(main_module.time, "process_time", lambda: min(1.0, (clock.now - begin) / 6.0))
    monkeypatch.setattr(main_module, "describe_wait", lambda: "thread é")
    monkeypatch.setenv(contract.MSRUN_EXIT_TIME_OUT, limit)
    monkeypatch.setattr(os, "_exit", ended)
    main_module.watch_end(status, begin)
    assert clock.now == begin + after_s
    assert [call.args[0] for call in ended.call_args_list] == [code] * (code is not None)
    first, *rest = filter(None, capfd.readouterr().err.splitlines())
    option = f"--exit_time_out {float(limit or 300):g}"
    assert first == f"msrun: the program has ended with exit code {status}, the process waits for thread é ({option})"
    assert len(rest) == len(ended.call_args_list)
    assert board.read(1) == Progress(name="thread é", ended_at=-begin if status else begin)


RUN_EACH = """
import sys
sys.path.remove("")
import os, threading, wsgiref.util
from msrun.agent.processes.main_module import Main
from msrun.planning.program import Program
def refuse(): raise KeyError("of the end")
for number in range(int(sys.argv[1])):
    if not (pid := os.fork()):
        for descriptor in (1, 2):
            os.dup2(os.open(f"{number}.{descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
        main = Main(Program("script", f"{number}.py"))
        if not number:
            threading._shutdown = refuse
        try:
            main.take_call()()
        except BaseException as error:
            main.error = error
        main.leave()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
FLUSH = "import io\nclass Out:\n    def flush(self): raise io.UnsupportedOperation('of the end')\nsys.stdout = Out()"
ENDS = [
    # a program after `import sys`; its exit code, what it writes, and how what it says ends
    (
        "import wsgiref; print(wsgiref.OWN, 'wsgiref.util' in sys.modules)",
        0,
        "1 False\n",
        "KeyError: 'of the end'\n",
    ),
    ("sys.exit(300)", 44, "", ""),
    ("sys.exit(-1)", 255, "", ""),
    ("sys.exit((1 << 63) - 2)", 254, "", ""),
    ("sys.exit(1 << 63)", 255, "", ""),
    ("import json; json.kept = open(1, 'wb', closefd=False); json.kept.write(b'kept')", 0, "kept", ""),
    (FLUSH, 120, "", "\nio.UnsupportedOperation: of the end\n"),
    (FLUSH + "; sys.exit(7)", 7, "", "\nio.UnsupportedOperation: of the end\n"),
    ("sys.stderr = None", 0, "", ""),
]


def test_end_is_that_of_the_interpreter(tmp_path):
    """Of programs that hide a module of the interpreter's, or whose threads and streams fail in the end."""
    texts = {str(number): f"import sys\n{row[0]}" for number, row in enumerate(ENDS)}
    for name, text in {"wsgiref": "OWN = 1", **texts}.items():
        (tmp_path / f"{name}.py").write_text(text)
    words = [sys.executable, "-c", RUN_EACH, str(len(ENDS))]
    done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.stderr == ""
    for number, (row, code) in enumerate(zip(ENDS, done.stdout.split(), strict=True)):
        written, said = ((tmp_path / f"{number}.{stream}").read_text() for stream in (1, 2))
        assert (row[0], int(code), written) == row[:3] and said.endswith(row[3]) and bool(said) == bool(row[3])
        assert said.startswith("Exception ignored in: <" * bool(said)) and "main_module" not in said


def test_without_such_threads_it_is_what_the_main_thread_does(monkeypatch):
    monkeypatch.setattr(main_module.threading, "enumerate", lambda: [threading.main_thread()])
    assert describe_wait().endswith(" in test_without_such_threads_it_is_what_the_main_thread_does")
