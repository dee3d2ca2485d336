"""What a worker's log says of an exception that nobody caught: the user's line first, internal frames folded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import nn

from msrun import contract
from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, uncaught
from msrun.runtime.tensors.put_value import holding

HERE = "user/train.py"


@pytest.fixture
def raised_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a script of lines below the working directory and renders what it raises."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / HERE
    path.parent.mkdir()

    def run(*lines: str, is_debug: bool = False, **names: object) -> str:
        path.write_text("\n".join(lines))
        code = compile(path.read_text(), str(path), "exec")
        try:
            exec(code, dict(names))
        except BaseException as error:
            trace = error.__traceback__
            assert trace is not None
            return uncaught.render_uncaught(error, trace.tb_next, is_debug=is_debug)
        raise AssertionError("nothing was raised")

    return run


def test_the_error_and_the_users_innermost_line_come_first(raised_by: Callable[..., str]) -> None:
    text = raised_by(
        "class Net(nn.Module):",
        "    def forward(self, x):",
        "        raise ValueError('three rows')",
        "Net()(1)",
        nn=nn,
    )
    assert text.splitlines() == [
        f"uncaught ValueError at {HERE}:3: three rows",
        "    raise ValueError('three rows')",
        f"  called at {HERE}:4, in <module>",
        "    Net()(1)",
        "  2 frames inside libraries left out; MSRUN_DEBUG=1 shows them",
    ]


def test_an_error_of_torch_is_told_at_the_users_line(raised_by: Callable[..., str]) -> None:
    text = raised_by("net = nn.Linear(2, 2)", "net(torch.ones(3, 3))", nn=nn, torch=torch)
    first, line, left_out = text.splitlines()
    assert first.startswith(f"uncaught RuntimeError at {HERE}:2: mat1 and mat2 shapes cannot be multiplied")
    assert line == "    net(torch.ones(3, 3))"
    assert left_out.endswith("frames inside libraries left out; MSRUN_DEBUG=1 shows them")


def test_a_dry_run_says_why_there_are_no_values(raised_by: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.MSRUN_SIM_LEVEL, "1")
    text = raised_by("float(weight)", weight=torch.ones((), device="meta"))
    assert text.splitlines()[-1].endswith("before the first call of AutoParallel, or start with --sim_level 3")


def test_an_error_of_msrun_is_one_line_without_a_traceback(raised_by: Callable[..., str]) -> None:
    text = raised_by("", "AutoParallel(net).dataset_strategy('full')", AutoParallel=AutoParallel, net=nn.Linear(1, 1))
    assert text.startswith(
        f"uncaught StrategyError at {HERE}:2: dataset_strategy('full') (did you mean full_batch?): must be "
    )
    assert "\n" not in text


def test_an_error_of_msrun_is_told_at_the_line_that_it_names(raised_by: Callable[..., str]) -> None:
    error = CaptureError("Net cannot be captured", where="net.py:12")
    assert str(error) == "net.py:12: Net cannot be captured"
    assert raised_by("raise error", error=error) == "uncaught CaptureError at net.py:12: Net cannot be captured"


def test_an_error_of_msrun_that_was_made_of_the_users_is_told_where_that_was_raised(
    raised_by: Callable[..., str],
) -> None:
    text = raised_by(
        "def forward():",
        "    raise ValueError('odd')",
        "try:",
        "    forward()",
        "except ValueError as error:",
        "    raise CaptureError('not captured: odd') from error",
        CaptureError=CaptureError,
    )
    assert text == f"uncaught CaptureError at {HERE}:2: not captured: odd"




def test_causes_of_the_users_errors_follow_with_their_lines_and_notes(raised_by: Callable[..., str]) -> None:
    text = raised_by(
        "try:",
        "    {}['x']",
        "except KeyError as error:",
        "    wrong = ValueError('no x')",
        "    wrong.add_note('look at the file')",
        "    raise wrong from error",
    )
    assert text.splitlines() == [
        f"uncaught ValueError at {HERE}:6: no x",
        "look at the file",
        "    raise wrong from error",
        f"caused by KeyError at {HERE}:2: 'x'",
        "    {}['x']",
    ]


def test_debug_keeps_every_frame_below_the_first_line(raised_by: Callable[..., str]) -> None:
    text = raised_by("net = nn.Linear(2, 2)", "net(torch.ones(3, 3))", nn=nn, torch=torch, is_debug=True)
    assert text.startswith(f"uncaught RuntimeError at {HERE}:2: ")
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert "_call_impl" in text


def test_a_mistake_of_msrun_itself_keeps_its_traceback(raised_by: Callable[..., str]) -> None:
    """The log is all that a report of it can be made of."""
    text = raised_by("with holding([(1, 2)]):", "    pass", holding=holding)
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert "put_value.py" in text


@pytest.mark.parametrize("line", ["raise KeyboardInterrupt", "compile('if:', 'x.py', 'exec')"])
def test_the_interpreters_own_words_stay_where_they_are_best(raised_by: Callable[..., str], line: str) -> None:
    assert raised_by(line) == ""


def test_a_message_that_cannot_be_printed_does_not_hide_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    error = Odd()
    uncaught.print_uncaught(Odd, error, None)
    assert "Odd" in capsys.readouterr().err


def test_a_hook_of_the_program_stays_and_torchs_gives_way_to_ours_in_a_log_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def users(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        pass

    def torchs(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        pass

    torchs.__module__ = "torch.distributed.distributed_c10d"
    monkeypatch.delenv(contract.MSRUN_JOB_ID, raising=False)
    for hook, expected in ((sys.__excepthook__, uncaught.print_uncaught), (users, users), (torchs, torchs)):
        monkeypatch.setattr(sys, "excepthook", hook)
        uncaught.install()
        assert sys.excepthook is expected
    monkeypatch.setenv(contract.MSRUN_JOB_ID, "j")
    uncaught.install()
    assert sys.excepthook is uncaught.print_uncaught
