"""How far a rank is, in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msrun.agent.watch.progress_board import PROGRESS_BOARD, ProgressBoard
from msrun.launch.console import ProgressLine, describe_progress
from msrun.runtime.progress import ProgressRecord


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((21, 40, 10.0, "0.048"), "step 21/40 [##########----------] 52 %, 10 steps/s, loss 0.048, 1.9 s left"),
        ((1, 40, None, ""), "step 1/40 [--------------------] 2 %"),
        ((40, 40, 10.0, ""), "step 40/40 [####################] 100 %, 10 steps/s"),
        ((41, 40, 10.0, ""), "step 41/40 [####################] 100 %, 10 steps/s"),
        ((7200, 10800, 1.0, "1"), "step 7200/10800 [#############-------] 66 %, 1 steps/s, loss 1, 1 h 0 min left"),
        ((12345, 0, 0.01234, "nan"), "step 12345, 0.0123 steps/s, loss nan"),
    ],
)
def test_line_tells_what_is_known(given: tuple[Any, ...], line: str) -> None:
    assert describe_progress(*given) == line


def line_of(folder: Path, global_rank: int) -> ProgressLine:
    worker = SimpleNamespace(global_rank=global_rank, log_path=str(folder / "worker.log"))
    plan: Any = SimpleNamespace(run_dir=str(folder), workers=(worker,))
    return ProgressLine(plan)


def test_what_the_rank_reports_goes_before_its_log(tmp_path: Path) -> None:
    line = line_of(tmp_path, 2)
    assert line.text(0.0) == ""
    (tmp_path / "worker.log").write_text("step: 7, loss: 0.5\n")
    assert line.text(10.0) == "rank 2: step 7, loss 0.5"
    (tmp_path / "worker.log").write_text("step: 27, loss: 0.25\n")
    assert line.text(20.0) == "rank 2: step 27, 2 steps/s, loss 0.25"
    (tmp_path / "worker.log").write_text("step: 1, loss: 2\n")  # of the next attempt
    assert line.text(21.0) == "rank 2: step 1, loss 2"
    board = ProgressBoard(tmp_path / PROGRESS_BOARD, 4)
    board.create()
    record = ProgressRecord(str(tmp_path / PROGRESS_BOARD), 2)
    record.begin_step(30)
    record.note_loss(0.125)
    record.note_total(60)
    assert line.text(22.0) == "rank 2: step 30/60 [##########----------] 50 %, loss 0.125"
    board.close()
