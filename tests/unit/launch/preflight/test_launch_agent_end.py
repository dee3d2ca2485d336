"""An agent that ended is explained in one line with a remedy. The texts are what real shells and interpreters said."""

import subprocess
import sys
from pathlib import Path

import pytest

from msrun.launch.preflight.fleet_checks import explain_agent_end
from msrun.launch.transport.pipe import agent_command, opening
from msrun.planning.hosts import HostEntry

H3 = HostEntry("h3", 8, tuple(range(8)), python="/opt/py/bin/python")
OTHER = "name another Python by --python, or by python= in the hostfile"

PYTHON = "/opt/py/bin/python"
NOT_FOUND = [
    "bash: line 1: /opt/py/bin/python: No such file or directory",
    "dash: 1: exec: /opt/py/bin/python: not found",
    "zsh:1: no such file or directory: /opt/py/bin/python",
    "ksh: exec: /opt/py/bin/python: not found",
    "sh: exec: line 0: /opt/py/bin/python: not found",
]


def test_shell_that_says_more_is_quoted_where_it_names_python():
    fish = f"fish: Unknown command: {PYTHON}\nfish: \nexec {PYTHON} -c 'import sys\n     ^~~~~~~~~~^\n"
    assert f": fish: Unknown command: {PYTHON}; install" in str(explain_agent_end(127, fish, H3))


@pytest.mark.parametrize("text", NOT_FOUND)
def test_missing_python_is_named_with_what_the_shell_said(text):
    said = str(explain_agent_end(127, f"{text}\n", H3))
    assert said == f"h3: there is no {PYTHON}: {text}; install it there, or {OTHER}"


IMPORT = 'Traceback (most recent call last):\n  File "<string>", line 11, in <module>\n'
NO_MODULE = f"{IMPORT}ModuleNotFoundError: No module named"
NO_NAME = f"{IMPORT}ImportError: cannot import name"
NO_LIBRARY = "libpython3.11.so.1.0: cannot open shared object file: No such file or directory"
NO_ENCODINGS = """\
Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding
Python runtime state: core initialized
ModuleNotFoundError: No module named 'encodings'

Current thread 0x00007fede9823040 (most recent call first):
  <no Python frame>
"""
NO_FUTURE = f"""\
{IMPORT}  File "/m/msrun/launch/host_look.py", line 3
    from __future__ import annotations
    ^
SyntaxError: future feature annotations is not defined
"""
ANOTHER = f"another version of msrun is installed for {PYTHON}; "
TOO_OLD = f"{PYTHON} is too old: msrun needs Python 3.11 or newer; "
TEXTS = [
    # exit status, stderr, explanation
    (126, f"zsh:1: permission denied: {PYTHON}\n", f"{PYTHON} cannot be run: zsh:1: permission denied"),
    (126, f"bash: {PYTHON}: cannot execute binary file: Exec format error\n", f"{PYTHON} cannot be run (is it for ano"),
    (126, f"zsh:1: exec format error: {PYTHON}\n", f"{PYTHON} cannot be run (is it for another kind of processor?): "),
    (127, f"{PYTHON}: error while loading shared libraries: {NO_LIBRARY}\n", f"{PYTHON} lacks the library libpython3."),
    (1, f"{NO_MODULE} 'msrun'\n", f"msrun is not installed for {PYTHON}; install it there, {OTHER}, or send it along"),
    (1, f"{NO_MODULE} 'msrun.launch.remote'\n", f"{ANOTHER}install this one there, or send it along with --ship"),
    (1, f"{NO_NAME} 'AgentPart' from 'msrun.launch.job' (/opt/py/msrun/job.py)\n", ANOTHER),
    (1, f"{NO_MODULE} 'psutil'\n", f"{PYTHON} lacks the module psutil; install"),
    (1, NO_ENCODINGS, f"{PYTHON} finds no library of its own; unset PYTHONHOME there, or {OTHER}"),
    (1, f"{IMPORT}TypeError: file() takes at most 3 arguments (4 given)\n", TOO_OLD),
    (1, NO_FUTURE, TOO_OLD),
    (1, f"{IMPORT}TypeError: dataclass() got an unexpected keyword argument 'kw_only'\n", TOO_OLD),
    (1, f"{NO_NAME} 'Self' from 'typing' (/usr/lib/python3.10/typing.py)\n", TOO_OLD),
    (1, f"{IMPORT}OSError: [Errno 28] No space left on device: '/tmp/msrun-x'\n", "a disk there is full; make room, o"),
    (1, f"{IMPORT}OSError: [Errno 122] Disk quota exceeded\n", "the user's disk quota there is used up; make room"),
    (1, f"{IMPORT}MemoryError\n", "there is not enough memory there; "),
    (254, "bash: fork: Resource temporarily unavailable\n", "the user may not start more processes there; raise ulimi"),
    (1, f"{IMPORT}RuntimeError: can't start new thread\n", "the user may not start more processes there; "),
    (1, "This account is currently not available.\n", "the user has no shell there; give another user by --ssh_user"),
    (142, 'Please login as the user "ubuntu" rather than the user "root".\n\n', "that user may not log in there; give"),
    (1, "WARNING: Your password has expired.\nPassword change required.\n", "the user's password there has expired"),
    (1, "msrun agent: what came through the pipe is damaged\n", "what came through the pipe is damaged"),
    (69, "motd\nmsrun agent: no agent of this job runs here any more (gone)\n", "no agent of this job runs here any m"),
    (137, "", "the agent was ended by SIGKILL; somebody, or the kernel for want of memory, has ended it"),
    (139, "Fatal Python error: Segmentation fault\n", "the agent was ended by SIGSEGV: Fatal Python error: Segmentati"),
    (0, "", "its login shell ended before it started the agent; look for exit or exec in its start-up files, such "),
    (0, "This service allows sftp connections only.\n", "the agent ended with exit code 0: This service allows sftp"),
    (5, "", "the agent ended with exit code 5, and said nothing"),
    (5, "one\n\x1b[31mtwo\x07\n\n", "the agent ended with exit code 5: two\\x07"),
]


@pytest.mark.parametrize(("status", "stderr", "text"), TEXTS)
def test_end_is_explained_by_what_was_said(status, stderr, text):
    error = explain_agent_end(status, f"Welcome to h3!\n{stderr}", H3) if stderr else explain_agent_end(status, "", H3)
    assert str(error).startswith(f"h3: {text}")
    assert "\n" not in str(error) and error.exit_code == 3


def test_long_noise_before_the_reason_is_left_out():
    error = explain_agent_end(5, "noise\n" * 1_000_000 + "x" * 10_000, H3)
    assert len(str(error)) < 400


def test_host_without_a_python_of_its_own_has_the_launchers():
    assert f"there is no {sys.executable}" in str(explain_agent_end(127, "", HostEntry("h1", 1, (0,))))


REAL = [
    # interpreter, what it is to run, explanation
    ("/no/such/python", b"", "h3: there is no /no/such/python: "),
    ("/", b"", "h3: / cannot be run: "),
    (__file__, b"", f"h3: {__file__} cannot be run: "),
    (
        sys.executable,
        # an editable installation is found by a finder of its own, behind the three of the interpreter
        b"import sys; del sys.meta_path[3:]; sys.path[:] = [p for p in sys.path if p.endswith('.zip')]\nimport msrun",
        "h3: msrun is not installed for ",
    ),
    (sys.executable, b"import msrun.of_a_later_version", "h3: another version of msrun is installed for "),
    (sys.executable, b"from msrun.errors import OfALaterVersion", "h3: another version of msrun is installed for "),
    (sys.executable, b"import os; os.kill(os.getpid(), 9)", "h3: the agent was ended by SIGKILL"),
    (sys.executable, b"open('/dev/full', 'w').write('x' * 100_000)", "h3: a disk there is full"),
]


@pytest.mark.parametrize(("python", "code", "text"), REAL)
def test_real_shell_and_interpreter_are_understood(python, code, text):
    entry = HostEntry("h3", 1, (0,), python=python)
    done = subprocess.run(
        ["sh", "-c", agent_command(python)],
        input=opening(code),
        capture_output=True,
        cwd="/",
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[4]), "PYTHONNOUSERSITE": "1"},
        timeout=60,
        check=False,
    )
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    assert str(explain_agent_end(status, done.stderr.decode(), entry)).startswith(text)
