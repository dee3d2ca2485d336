"""The private names of the interpreter that running a script as __main__ leans on."""

from __future__ import annotations

import atexit
import runpy
import threading

import pytest

from msrun.agent.processes.main_module import _exit_status


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
