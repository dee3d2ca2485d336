"""The private names of the interpreter that running a script as __main__ leans on."""

from __future__ import annotations

import atexit
import json
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from msrun.agent.processes.main_module import _exit_status
from msrun.agent.processes.server_handle import RUN_PROGRAM

REPOSITORY = Path(__file__).resolve().parents[4]


def test_private_names_of_the_interpreter_are_where_they_are_looked_for() -> None:
    assert callable(threading._shutdown)  # type: ignore[attr-defined]
    assert callable(atexit._run_exitfuncs)
    assert callable(runpy._run_module_as_main)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (7, 7), (256, 0), (-1, 255), (True, 1), ("text", 1), ((1, 2), 1), ("", 1)]
)
def test_exit_status_is_the_interpreters(code: object, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status(SystemExit(code)) == status
    printed = capsys.readouterr().err
    assert printed == ("" if code is None or isinstance(code, int) else f"{code}\n")


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


def test_module_runs_as_the_interpreter_runs_it(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    shown = json.loads(run("module", "show", tmp_path).stdout)
    assert shown[0] == str(tmp_path)
    assert shown[1] == [str(tmp_path / "show.py"), "a", "-b"]
    assert shown[3] == "__main__"


@pytest.mark.parametrize(
    ("source", "code"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1), ("import sys; sys.stdout.close()", 0)],
)
def test_status_is_that_of_the_interpreter(tmp_path: Path, source: str, code: int) -> None:
    (tmp_path / "x.py").write_text(source)
    done = run("script", str(tmp_path / "x.py"), tmp_path)
    assert done.returncode == code
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)
    assert "main_module.py" not in done.stderr
