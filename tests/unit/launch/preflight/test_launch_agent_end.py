"""An agent that ended is explained in one line with a remedy. The texts are what real shells and interpreters said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from msrun.launch.preflight.host_report import explain_agent_end
from msrun.launch.transport.pipe import agent_command, opening
from msrun.planning.hosts.host_entry import HostEntry

H3 = HostEntry("h3", 8, tuple(range(8)), python="/opt/py/bin/python")
OTHER = "name another Python by --python, or by python= in the hostfile"

NOT_FOUND = [
    "bash: line 1: /opt/py/bin/python: No such file or directory",
    "dash: 1: exec: /opt/py/bin/python: not found",
    "zsh:1: no such file or directory: /opt/py/bin/python",
    "ksh: exec: /opt/py/bin/python: not found",
    "sh: exec: line 0: /opt/py/bin/python: not found",
]


def test_shell_that_says_more_is_quoted_where_it_names_python() -> None:
    fish = (
        "fish: Unknown command: /opt/py/bin/python\nfish: \nexec /opt/py/bin/python -c 'import sys\n     ^~~~~~~~~~^\n"
    )
    assert ": fish: Unknown command: /opt/py/bin/python; install" in str(explain_agent_end(127, fish, H3))


@pytest.mark.parametrize("text", NOT_FOUND)
def test_missing_python_is_named_with_what_the_shell_said(text: str) -> None:
    assert str(explain_agent_end(127, f"{text}\n", H3)) == (
        f"h3: there is no /opt/py/bin/python: {text}; install it there, or {OTHER}"
    )


IMPORT = 'Traceback (most recent call last):\n  File "<string>", line 11, in <module>\n'
LIBRARY = "libpython3.11.so.1.0: cannot open shared object file: No such file or directory"
ANOTHER = "another version of msrun is installed for /opt/py/bin/python; "
TEXTS: list[tuple[int, str, str]] = [
    # exit status, stderr, explanation
    (
        126,
        "zsh:1: permission denied: /opt/py/bin/python\n",
        "/opt/py/bin/python cannot be run: zsh:1: permission denied",
    ),
    (
        126,
        "bash: /opt/py/bin/python: cannot execute binary file: Exec format error\n",
        "/opt/py/bin/python cannot be run (is it for another kind of processor?): bash: /opt/py",
    ),
    (126, "zsh:1: exec format error: /opt/py/bin/python\n", "/opt/py/bin/python cannot be run (is it for another kind"),
    (
        127,
        f"/opt/py/bin/python: error while loading shared libraries: {LIBRARY}\n",
        f"/opt/py/bin/python lacks the library libpython3.11.so.1.0; {OTHER}",
    ),
    (
        1,
        f"{IMPORT}ModuleNotFoundError: No module named 'msrun'\n",
        f"msrun is not installed for /opt/py/bin/python; install it there, {OTHER}, or send it along with --ship",
    ),
    (
        1,
        f"{IMPORT}ModuleNotFoundError: No module named 'msrun.launch.remote'\n",
        f"{ANOTHER}install this one there, or send it along with --ship",
    ),
    (
        1,
        f"{IMPORT}ImportError: cannot import name 'AgentPart' from 'msrun.launch.job' (/opt/py/msrun/job.py)\n",
        "another version of msrun is installed for ",
    ),
    (
        1,
        f"{IMPORT}ModuleNotFoundError: No module named 'psutil'\n",
        "/opt/py/bin/python lacks the module psutil; install",
    ),
    (
        1,
        (
            "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding\n"
            "Python runtime state: core initialized\nModuleNotFoundError: No module named 'encodings'\n\n"
            "Current thread 0x00007fede9823040 (most recent call first):\n  <no Python frame>\n"
        ),
        f"/opt/py/bin/python finds no library of its own; unset PYTHONHOME there, or {OTHER}",
    ),
    (
        1,
        f"{IMPORT}TypeError: file() takes at most 3 arguments (4 given)\n",
        "/opt/py/bin/python is too old: msrun needs",
    ),
    (
        1,
        (
            f'{IMPORT}  File "/m/msrun/launch/host_look.py", line 3\n    from __future__ import annotations\n    ^\n'
            "SyntaxError: future feature annotations is not defined\n"
        ),
        "/opt/py/bin/python is too old: msrun needs Python 3.11 or newer; ",
    ),
    (
        1,
        f"{IMPORT}TypeError: dataclass() got an unexpected keyword argument 'kw_only'\n",
        "/opt/py/bin/python is too old: msrun needs Python 3.11 or newer; ",
    ),
    (
        1,
        f"{IMPORT}ImportError: cannot import name 'Self' from 'typing' (/usr/lib/python3.10/typing.py)\n",
        "/opt/py/bin/python is too old: msrun needs Python 3.11 or newer; ",
    ),
    (
        1,
        f"{IMPORT}OSError: [Errno 28] No space left on device: '/tmp/msrun-x'\n",
        "a disk there is full; make room, or set",
    ),
    (1, f"{IMPORT}OSError: [Errno 122] Disk quota exceeded\n", "the user's disk quota there is used up; make room"),
    (1, f"{IMPORT}MemoryError\n", "there is not enough memory there; "),
    (
        254,
        "bash: fork: retry: Resource temporarily unavailable\nbash: fork: Resource temporarily unavailable\n",
        "the user may not start more processes there; raise ulimit -u",
    ),
    (1, f"{IMPORT}RuntimeError: can't start new thread\n", "the user may not start more processes there; "),
    (1, "This account is currently not available.\n", "the user has no shell there; give another user by --ssh_user"),
    (
        142,
        'Please login as the user "ubuntu" rather than the user "root".\n\n',
        "that user may not log in there; give --ssh_user ubuntu",
    ),
    (
        1,
        "WARNING: Your password has expired.\nPassword change required but no TTY available.\n",
        "the user's password there has expired",
    ),
    (1, "msrun agent: what came through the pipe is damaged\n", "what came through the pipe is damaged"),
    (
        69,
        "motd\nmsrun agent: no agent of this job runs here any more (gone)\n",
        "no agent of this job runs here any more (gone)",
    ),
    (137, "", "the agent was ended by SIGKILL; somebody, or the kernel for want of memory, has ended it"),
    (
        139,
        "Fatal Python error: Segmentation fault\n",
        "the agent was ended by SIGSEGV: Fatal Python error: Segmentation",
    ),
    (
        0,
        "",
        "its login shell ended before it started the agent; look for exit or exec in its start-up files, such ",
    ),
    (0, "This service allows sftp connections only.\n", "the agent ended with exit code 0: This service allows sftp"),
    (5, "", "the agent ended with exit code 5, and said nothing"),
    (5, "one\n\x1b[31mtwo\x07\n\n", "the agent ended with exit code 5: \\x1b[31mtwo\\x07"),
]


@pytest.mark.parametrize(("status", "stderr", "text"), TEXTS)
def test_end_is_explained_by_what_was_said(status: int, stderr: str, text: str) -> None:
    error = explain_agent_end(status, f"Welcome to h3!\n{stderr}", H3) if stderr else explain_agent_end(status, "", H3)
    assert str(error).startswith(f"h3: {text}")
    assert "\n" not in str(error) and error.exit_code == 3


def test_long_noise_before_the_reason_is_left_out() -> None:
    error = explain_agent_end(5, "noise\n" * 1_000_000 + "x" * 10_000, H3)
    assert len(str(error)) < 400


def test_host_without_a_python_of_its_own_has_the_launchers() -> None:
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
def test_real_shell_and_interpreter_are_understood(python: str, code: bytes, text: str) -> None:
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
