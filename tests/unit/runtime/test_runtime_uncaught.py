"""What a worker's log says of an exception that nobody caught: the user's line first, internal frames folded."""

import sys

import pytest
import torch
from torch import nn

from msrun import contract
from msrun.errors import CaptureError
from msrun.runtime import AutoParallel, uncaught
from msrun.runtime.tensors.plain_tensors import holding

HERE = "user/train.py"


@pytest.fixture
def raised_by(tmp_path, monkeypatch):
    """Runs a script of lines below the working directory and renders what it raises."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / HERE
    path.parent.mkdir()

    def run(*lines, is_debug=False, **names):
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


def test_the_error_and_the_users_innermost_line_come_first(raised_by):
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


def test_a_dry_run_says_why_there_are_no_values(raised_by, monkeypatch):
    monkeypatch.setenv(contract.MSRUN_SIM_LEVEL, "1")
    text = raised_by("float(weight)", weight=torch.ones((), device="meta"))
    assert text.splitlines()[-1].endswith("before the first call of AutoParallel, or start with --sim_level 3")


WHERE = CaptureError("Net cannot be captured", where="net.py:12")
MADE_OF_ANOTHER = (
    "def forward():",
    "    raise ValueError('odd')",
    "try:",
    "    forward()",
    "except ValueError as error:",
    "    raise CaptureError('not captured: odd') from error",
)
WHILE_ANOTHER = ("try:", "    {}['x']", "except KeyError:", "    raise CaptureError('no')")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ("", "parallel.dataset_strategy('full')"),
            f"StrategyError at {HERE}:2: dataset_strategy('full') (did you mean",
        ),
        (("raise where",), "CaptureError at net.py:12: Net cannot be captured"),
        (MADE_OF_ANOTHER, f"CaptureError at {HERE}:2: not captured: odd"),
        (WHILE_ANOTHER, f"CaptureError at {HERE}:4: no"),
    ],
)
def test_an_error_of_msrun_is_one_line_and_told_where_its_cause_is(raised_by, lines, text):
    found = raised_by(*lines, parallel=AutoParallel(nn.Linear(1, 1)), where=WHERE, CaptureError=CaptureError)
    assert found.startswith(f"uncaught {text}")
    assert "\n" not in found


def test_causes_of_the_users_errors_follow_with_their_lines_and_notes(raised_by):
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


def test_an_error_of_torch_is_told_at_the_users_line_and_debug_keeps_every_frame(raised_by):
    for is_debug in (False, True):
        text = raised_by("net = nn.Linear(2, 2)", "net(torch.ones(3, 3))", nn=nn, torch=torch, is_debug=is_debug)
        first, line, *_, last = text.splitlines()
        assert first.startswith(f"uncaught RuntimeError at {HERE}:2: mat1 and mat2 shapes cannot be multiplied")
        assert line == ("Traceback (most recent call last):" if is_debug else "    net(torch.ones(3, 3))")
        assert ("_call_impl" in text) is is_debug
        assert is_debug or last.endswith("frames inside libraries left out; MSRUN_DEBUG=1 shows them")


def test_a_mistake_of_msrun_itself_keeps_its_traceback(raised_by):
    """The log is all that a report of it can be made of."""
    text = raised_by("with holding([(1, 2)]):", "    pass", holding=holding)
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert "plain_tensors.py" in text


@pytest.mark.parametrize("line", ["raise KeyboardInterrupt", "compile('if:', 'x.py', 'exec')"])
def test_the_interpreters_own_words_stay_where_they_are_best(raised_by, line):
    assert raised_by(line) == ""


def test_a_message_that_cannot_be_printed_does_not_hide_the_error(capsys):
    class Odd(Exception):
        def __str__(self):
            raise ValueError

    error = Odd()
    uncaught.print_uncaught(Odd, error, None)
    assert "Odd" in capsys.readouterr().err


def test_a_hook_of_the_program_stays_and_torchs_gives_way_to_ours_in_a_log_of_its_own(monkeypatch):
    def users(kind, error, trace):
        pass

    def torchs(kind, error, trace):
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
