"""The progress board: what a worker writes is what the agent reads."""

import errno
import math
import os
import stat
import tempfile
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.agent.processes.progress_board import Progress, ProgressBoard, parse_record

ProgressRecord = pytest.importorskip("msrun.runtime.progress", exc_type=ImportError).ProgressRecord


@pytest.fixture
def board(tmp_path):
    with closing(ProgressBoard(tmp_path / "progress", 4)) as board:
        board.create()
        yield board


def test_board_is_private_and_empty_at_first(board, tmp_path):
    assert stat.S_IMODE((tmp_path / "progress").stat().st_mode) == 0o600
    assert not board.read(3).is_reported
    assert board.read(0).describe(1.0) == ""
    ended = Progress(ended_at=-5.0, name="thread upload")
    assert ended.describe(8.0) == "its program has ended, its process waits for thread upload for 3 s"


def test_board_for_which_there_is_no_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left"):
        ProgressBoard(tmp_path / "progress", 4).create()
    assert os.listdir("/proc/self/fd") == before


def test_each_worker_writes_its_own_record_only(board, tmp_path):
    record = ProgressRecord(str(tmp_path / "progress"), 2)
    record.enter_phase(contract.PHASE_JOINED)
    record.begin_step()
    record.begin_step()
    record.note_loss(0.5)
    record.begin_collective()
    record.begin_wait("all_reduce of 8 ranks")
    told = board.read(2)
    assert (told.phase, told.steps, told.loss, told.collectives) == (contract.PHASE_JOINED, 2, 0.5, 1)
    assert told.is_waiting
    assert told.describe(told.waiting_since + 3.0) == "step 2, waits in all_reduce of 8 ranks for 3.0 s"
    assert [board.read(rank).is_reported for rank in range(4)] == [False, False, True, False]
    record.end_wait()
    assert board.read(2).describe(0.0) == "step 2"


def test_steps_per_second_are_those_of_the_last_seconds_and_fall_while_a_step_is_overdue(board, tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    record = ProgressRecord(str(tmp_path / "progress"), 0)
    record.begin_step()
    assert board.read(0).steps_per_s(now) is None
    for _ in range(100):  # two a second
        now += 0.5
        record.begin_step()
        assert board.read(0).steps_per_s(now) == pytest.approx(2.0)
    for _ in range(100):  # then ten a second
        now += 0.1
        record.begin_step()
    told = board.read(0)
    assert told.steps_per_s(now) == pytest.approx(10.0)
    assert told.steps_per_s(now + 1000.0) == pytest.approx(0.1, rel=0.5)


def test_joining_counts_as_waiting_until_the_worker_has_joined(board, tmp_path):
    record = ProgressRecord(str(tmp_path / "progress"), 1)
    record.enter_phase(contract.PHASE_JOINING)
    joining = board.read(1)
    assert joining.is_waiting
    assert joining.describe(joining.waiting_since + 2.0) == "waits for the others in init() for 2.0 s"
    record.enter_phase(contract.PHASE_JOINED)
    assert not board.read(1).is_waiting
    assert board.read(1).describe(0.0) == "before its first step"
    record.enter_phase(contract.PHASE_LEFT)
    assert board.read(1).describe(0.0) == "before its first step, has left the world"


@given(name=st.text(max_size=200))
def test_names_of_any_length_and_script_come_through_cut(name):
    with tempfile.TemporaryDirectory() as folder, closing(ProgressBoard(Path(folder, "progress"), 1)) as board:
        board.create()
        ProgressRecord(f"{folder}/progress", 0).begin_wait(name.replace("\0", ""))
        told = board.read(0).name
    cut = name.replace("\0", "").encode("utf-8", "replace")[: contract.PROGRESS_NAME_BYTES - 1]
    whole = cut.decode("utf-8", "replace")
    assert told == "".join(char if char.isprintable() else ascii(char)[1:-1] for char in whole)


def test_board_that_a_worker_has_cut_off_is_empty_until_the_next_attempt(board, tmp_path):
    path = tmp_path / "progress"
    ProgressRecord(str(path), 3).enter_phase(contract.PHASE_JOINED)
    os.truncate(path, contract.PROGRESS_RECORD_BYTES // 2)
    assert [board.read(rank).has_come for rank in range(4)] == [False] * 4
    board.reset()
    ProgressRecord(str(path), 3).enter_phase(contract.PHASE_JOINED)
    assert board.read(3).has_come


def test_record_beyond_the_board_is_refused_to_a_worker_and_empty_to_a_reader(board, tmp_path):
    with pytest.raises(ValueError, match="no record of rank 4"):
        ProgressRecord(str(tmp_path / "progress"), 4)
    empty = parse_record(b"short", 0)
    assert (empty.phase, empty.steps) == (Progress().phase, 0)
    assert math.isnan(empty.loss)


def test_a_board_that_is_begun_again_is_empty_and_whole(board, tmp_path):
    for rank in range(4):
        ProgressRecord(str(tmp_path / "progress"), rank).enter_phase(contract.PHASE_JOINED)
    os.truncate(tmp_path / "progress", 7)
    board.reset()
    assert [board.read(rank) for rank in range(4)] == [Progress()] * 4
    assert not any((tmp_path / "progress").read_bytes())
    assert (tmp_path / "progress").stat().st_size == 4 * contract.PROGRESS_RECORD_BYTES
