"""Logs as files: every byte is written or counted, whatever the disk does, and what is too old takes no disk."""

import errno
import os
import selectors
import signal
import termios
import tty
from contextlib import closing
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.agent import log_file
from msrun.agent.log_file import BoundedLog, LogFile, LogLimit
from msrun.agent.processes import terminal as rank_terminal
from msrun.agent.processes.server_handle import ProcessSpec
from msrun.agent.processes.terminal import RankTerminal
from msrun.launch.directory.log_directory import BoundedLogs

BLOCK = 4096


class Disk:
    """Stands for os.write: takes so many bytes and is full then."""

    def __init__(self, room):
        self.room = room
        self._write = os.write

    def write(self, descriptor, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(0)
    monkeypatch.setattr(log_file.os, "write", disk.write)
    monkeypatch.setattr(log_file, "RETRY_S", 0.0)
    return disk


@pytest.fixture
def log(tmp_path):
    with closing(LogFile(str(tmp_path / "log"))) as made:
        yield made


def test_log_goes_on_with_the_next_line_and_says_what_is_missing_when_there_is_room_again(tmp_path, log, disk):
    disk.room = 6
    for piece in (b"one\ntwo\nthr", b"ee\nfour"):
        log.write(piece)
    disk.room = 1000
    for piece in (b" and\nfive\n", b"six\n"):
        log.write(piece)
    lost = len(b"o\nthree\nfour and\n")
    marker = f"\n[msrun: {lost} bytes of this log were lost: No space left on device]\n".encode()
    assert (tmp_path / "log").read_bytes() == b"one\ntw" + marker + b"five\nsix\n"
    assert log.lost_bytes == lost


def test_line_that_comes_after_a_whole_one_was_lost_is_written(tmp_path, log, disk):
    log.write(b"one\n")
    disk.room = 1000
    log.write(b"two\n")
    assert (tmp_path / "log").read_bytes().endswith(b" 4 bytes of this log were lost: No space left on device]\ntwo\n")


def test_disk_that_was_full_is_left_alone_for_a_while(tmp_path, log, disk, monkeypatch):
    monkeypatch.setattr(log_file, "RETRY_S", 3600.0)
    log.write(b"one\n")
    disk.room = 1000
    log.write(b"two\n")
    assert (tmp_path / "log").read_bytes() == b"" and log.lost_bytes == 8


@settings(deadline=None, max_examples=50)
@given(pieces=st.lists(st.binary(max_size=20), max_size=12), room=st.integers(0, 200))
def test_every_byte_is_written_or_counted(tmp_path_factory, pieces, room):
    path = tmp_path_factory.mktemp("log") / "worker_0.log"
    with pytest.MonkeyPatch.context() as patch, closing(LogFile(str(path))) as log:
        patch.setattr(log_file.os, "write", Disk(room).write)
        for piece in pieces:
            log.write(piece)
    whole = b"".join(pieces)
    assert log.lost_bytes == max(0, len(whole) - room)
    assert path.read_bytes() == whole[:room]


@pytest.mark.parametrize(("max_bytes", "keep", "blocks"), [(BLOCK, 1, 1), (BLOCK, 3, 3), (BLOCK + 1, 2, 3)])
def test_newest_bytes_stay_and_the_others_take_no_disk(tmp_path, max_bytes, keep, blocks):
    path, refused = tmp_path / "log", list[str]()
    log = BoundedLog(str(path), LogLimit(max_bytes, keep), refused.append)
    data = os.urandom(10 * BLOCK).replace(b"\0", b"1")
    log.look()
    for size in (BLOCK, 6 * BLOCK, 10 * BLOCK):
        path.write_bytes(data[:size])
        log.look()
    found = path.read_bytes()
    assert not refused and len(found) == len(data) and found[-keep * max_bytes :] == data[-keep * max_bytes :]
    assert 512 * path.stat().st_blocks == blocks * BLOCK
    assert found.count(0, 0, -blocks * BLOCK) == len(found) - blocks * BLOCK and 0 not in found[-blocks * BLOCK :]
    log.end()
    kept = path.rename(tmp_path / "log.attempt_4.log")
    path.write_bytes(data[:BLOCK])
    assert data.endswith(kept.read_bytes().lstrip(b"\0")) and path.read_bytes() == data[:BLOCK]
    log.look()
    assert path.read_bytes() == data[:BLOCK], "what was freed was of the other file"


def test_log_stays_whole_where_nothing_can_be_freed_and_that_is_told_once(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(log_file, "change", refuse)
    path, refused = tmp_path / "log", list[str]()
    log = BoundedLog(str(path), LogLimit(BLOCK, 1), refused.append)
    for size in (3, 5):
        path.write_bytes(b"x" * size * BLOCK)
        log.look()
    log.end()
    assert refused == ["not here"] and path.read_bytes() == b"x" * 5 * BLOCK


def test_what_cannot_be_freed_is_an_error_and_behind_the_end_is_no_data(tmp_path):
    with (tmp_path / "log").open("wb") as file, pytest.raises(OSError, match="Invalid argument"):
        log_file.change(file.fileno(), log_file.FREE, 1, 0)
    with (tmp_path / "log").open("rb") as file:
        assert log_file.find_data(file.fileno(), 7) == 7


def test_logs_of_a_job_are_bounded_attempt_after_attempt(tmp_path, monkeypatch):
    path, kept, said = tmp_path / "worker_0.log", tmp_path / "worker_0.attempt_2.log", list[str]()
    logs = BoundedLogs([str(path)], LogLimit(BLOCK, 1), said.append)
    path.write_bytes(os.urandom(9 * BLOCK))
    logs.tick()
    assert 512 * path.stat().st_blocks == BLOCK
    logs.note("restarting", {"attempt": 1})
    path.rename(kept)
    path.write_bytes(os.urandom(3 * BLOCK))
    logs.tick()
    assert 512 * path.stat().st_blocks == 512 * kept.stat().st_blocks == BLOCK and said == []
    assert kept.stat().st_size in (BLOCK, 9 * BLOCK), "without its hole, where the file system can take it out"
    monkeypatch.setattr(log_file, "change", mock.Mock(side_effect=OSError(errno.EOPNOTSUPP, "not here")))
    path.write_bytes(os.urandom(9 * BLOCK))
    logs.end()
    assert said == ["--log_max_bytes: logs stay whole, for their file system cannot free part of a file (not here)"]


def test_keys_go_to_a_rank_and_what_it_writes_last_to_its_terminal_is_shown_and_logged(tmp_path, request, monkeypatch):
    """The loop has not looked at the terminal any more when the rank's end is told; a line's end may come in two."""
    before = signal.getsignal(signal.SIGWINCH)
    request.addfinalizer(lambda: signal.signal(signal.SIGWINCH, before))
    user, lost = mock.Mock(), mock.Mock()
    keys, typed = os.pipe()
    request.addfinalizer(lambda: os.close(keys))
    monkeypatch.setattr(rank_terminal, "STANDARD_INPUT", keys)
    monkeypatch.setattr(os, "kill", killed := mock.Mock())
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((91, 33)))
    log = tmp_path / "worker_0.log"
    log.touch()
    with selectors.SelectSelector() as selector:

        def look():
            for key, _ in selector.select(5.0):
                key.data()

        terminal = RankTerminal(0, str(log), user, on_lost=lost)
        terminal.register(selector)
        (spec, other) = terminal.given_to([ProcessSpec(0, str(log)), ProcessSpec(1, "")])
        assert user.take.call_count == 1 and other == ProcessSpec(1, "")
        rank = os.open(spec.terminal, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(rank)
        assert termios.tcgetwinsize(rank) == (33, 91)
        for said, count in ((b"ab\x1d\x1d", 0), (b"\x1d", 1)):
            os.write(typed, said)
            look()
            assert os.read(rank, 9) == said and killed.call_args_list == [mock.call(os.getpid(), signal.SIGINT)] * count
        os.close(typed)
        look()
        os.write(rank, b"step 1\r")
        look()
        os.write(rank, b"\nlast words\r")
        monkeypatch.setattr(os, "write", Disk(len("step 1") + 1).write)
        os.close(rank)
        terminal.end_attempt()
        assert not selector.get_map()
        assert terminal.given_to([spec])[0].terminal and user.take.call_count == 2, "another start"
        terminal.close()
    assert b"".join(call.args[0] for call in user.show.call_args_list) == b"step 1\r\nlast words\r"
    assert log.read_bytes() == b"step 1\nlast w"
    lost.assert_called_once_with(0, "No space left on device", len("ords\r"))
