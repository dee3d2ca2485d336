"""What several tests of the agent start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from msrun import contract
from msrun.agent.watch.progress_board import PROGRESS_BOARD, ProgressBoard


@pytest.fixture
def board_of_rank_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressBoard]:
    """The board of three workers; this process is rank 1."""
    board = ProgressBoard(tmp_path / PROGRESS_BOARD, 3)
    board.create()
    monkeypatch.setenv(contract.MSRUN_PROGRESS, str(tmp_path / PROGRESS_BOARD))
    monkeypatch.setenv(contract.RANK, "1")
    monkeypatch.setenv(contract.WORLD_SIZE, "3")
    yield board
    board.close()
