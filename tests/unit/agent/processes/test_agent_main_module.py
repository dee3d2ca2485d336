"""A script runs as the interpreter runs it, and a process that goes on after it says what it waits for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from job_runner import REPOSITORY

from msrun.agent.processes import main_module
from msrun.agent.processes.main_module import describe_wait
from msrun.agent.processes.server_handle import RUN_PROGRAM

SHOW = (
    "import json, sys; print(json.dumps([sys.path[0], sys.argv, sys.orig_argv, __name__, globals().get('__file__')]))"
)
RUN = (
    """
import sys
sys.path.insert(0, sys.argv[1])
from msrun.agent.processes.main_module import Main
from msrun.planning.program import Program
sys.path.pop(0)
program = Main(Program(sys.argv[2], sys.argv[3], ("a", "-b")))
"""
    + RUN_PROGRAM
)


def run(kind: str, target: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", RUN, str(REPOSITORY), kind, target]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_script_runs_as_the_interpreter_runs_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "show.py"
    script.write_text(SHOW)
    found = run("script", str(script), tmp_path).stdout
    plain = subprocess.run([sys.executable, str(script), "a", "-b"], cwd=tmp_path, capture_output=True, text=True)
    shown, right = json.loads(found), json.loads(plain.stdout)
    assert shown[:2] == right[:2] == [str(tmp_path / "sub"), [str(script), "a", "-b"]]
    assert shown[2][1:] == right[2][1:]
    assert shown[3:] == right[3:] == ["__main__", str(script)]


EXITS = [("7", 7), ("256", 0), ("-1", 255), ("True", 1), ("'text'", 1)]
ENDS = [("pass", 0), ("1 / 0", 1), ("import sys; sys.stdout.close()", 0)]


@pytest.mark.parametrize(("source", "code"), [*ENDS, *((f"raise SystemExit({value})", code) for value, code in EXITS)])
def test_status_is_that_of_the_interpreter(tmp_path: Path, source: str, code: int) -> None:
    (tmp_path / "x.py").write_text(source)
    done = run("script", str(tmp_path / "x.py"), tmp_path)
    assert done.returncode == code
    assert ("ZeroDivisionError" in done.stderr) == (source == "1 / 0") and ("text" in done.stderr) == ("text" in source)
    assert "main_module.py" not in done.stderr


def test_threads_that_keep_a_process_are_named_with_their_place() -> None:
    is_over, stands = threading.Event(), threading.Barrier(3)

    def upload() -> None:
        stands.wait()
        is_over.wait()

    threads = [threading.Thread(target=upload, name=name) for name in ("upload", "second")]
    daemon = threading.Thread(target=is_over.wait, name="daemon", daemon=True)
    for thread in (daemon, *threads):
        thread.start()
    stands.wait()
    try:
        found = describe_wait()
    finally:
        is_over.set()
        for thread in (daemon, *threads):
            thread.join()
    assert found.startswith("thread upload at test_agent_main_module.py:") and found.endswith(" in upload and 1 more")


def test_without_such_threads_it_is_what_the_main_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module.threading, "enumerate", lambda: [threading.main_thread()])
    assert describe_wait().endswith(" in test_without_such_threads_it_is_what_the_main_thread_does")
