"""Following a log over its rotations: every byte once, in order."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.agent.logs.rotated_log import LogRotation, RotatedLog
from msrun.launch.directory.worker_log import GAP, RotatedReader, newest_loss, read_excerpt, read_tail
from msrun.launch.log_tail import LogTail

KEEP = 300


def write(log: RotatedLog, data: bytes) -> None:
    log.write(bytearray(data), len(data))


def read_all(reader: RotatedReader, size_bytes: int = 7) -> bytes:
    pieces = []
    while data := reader.read(size_bytes):
        assert len(data) <= size_bytes or data == GAP
        pieces.append(data)
    return b"".join(pieces)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.one_of(st.none(), st.lists(st.sampled_from([b"\n", b"a", b"line\n", b"\r"])).map(b"".join))),
    max_bytes=st.integers(1, 20),
)
def test_every_byte_is_read_once_and_in_order_however_the_log_grows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | None], max_bytes: int
) -> None:
    path = str(tmp_path_factory.mktemp("log") / "worker_0.log")
    log = RotatedLog(path, LogRotation(max_bytes, KEEP))
    reader = RotatedReader(path, KEEP)
    found = b""
    for step in steps:
        if step is None:
            found += read_all(reader)
        else:
            write(log, step)
    found += read_all(reader)
    assert found == b"".join(step for step in steps if step is not None)
    assert read_all(reader) == b""
    reader.close()
    log.close()


def test_every_byte_is_read_once_while_another_writes_and_rotates(tmp_path: Path) -> None:
    lines = [b"%d %s\n" % (number, b"x" * (number % 50)) for number in range(30_000)]
    path = str(tmp_path / "log")
    keep = len(b"".join(lines)) // 4096 + 1  # all of them: a reader that is held up may miss what is removed
    log = RotatedLog(path, LogRotation(4096, keep))
    over = threading.Event()

    def flood() -> None:
        for begin in range(0, len(lines), 7):
            write(log, b"".join(lines[begin : begin + 7]))
        over.set()

    writer = threading.Thread(target=flood)
    writer.start()
    reader = RotatedReader(path, keep)
    pieces = []
    while not over.is_set():
        pieces.append(read_all(reader, 1 << 16))
    writer.join()
    pieces.append(read_all(reader, 1 << 16))
    reader.close()
    log.close()
    assert b"".join(pieces) == b"".join(lines)


def test_files_that_came_and_went_between_two_reads_are_told(tmp_path: Path) -> None:
    log = RotatedLog(str(tmp_path / "log"), LogRotation(2, 2))
    reader = RotatedReader(str(tmp_path / "log"), 2)
    write(log, b"0\n")
    assert read_all(reader) == b"0\n"
    write(log, b"".join(b"%d\n" % number for number in range(1, 10)))
    assert read_all(reader) == GAP + b"7\n8\n9\n"
    log.close()
    reader.close()


def test_log_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    reader = RotatedReader(str(tmp_path / "log"), 2)
    assert reader.read(10) == b""
    (tmp_path / "log").write_bytes(b"here\n")
    assert read_all(reader) == b"here\n"
    reader.close()


def test_closed_reader_holds_nothing(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    log = RotatedLog(str(tmp_path / "log"), LogRotation(2, 5))
    write(log, b"a\nb\nc\n")
    log.close()
    reader = RotatedReader(str(tmp_path / "log"), 5)
    reader.read(1)
    reader.close()
    assert os.listdir("/proc/self/fd") == before


def test_tail_shows_lines_and_progress_bars_over_rotations(tmp_path: Path) -> None:
    log = RotatedLog(str(tmp_path / "log"), LogRotation(20, 50))
    tail = LogTail(0, str(tmp_path / "log"), rotated=50)
    lines = []
    for piece in (b"first\n10%\r", b"20%\r", b"30%\nsecond\nthird\n", b"fourth\nfifth\nsix", b"th\nno end"):
        write(log, piece)
        lines += tail.read()
    lines += tail.read(at_end=True)
    log.close()
    tail.close()
    assert len(list(tmp_path.iterdir())) > 2
    assert b"".join(lines) == b"first\n30%\nsecond\nthird\nfourth\nfifth\nsixth\nno end\n"


def test_end_of_a_log_reaches_into_its_older_files(tmp_path: Path) -> None:
    log = RotatedLog(str(tmp_path / "log"), LogRotation(10, 50))
    for number in range(100, 200):
        write(log, b"line %d\n" % number)
    log.close()
    assert len((tmp_path / "log").read_bytes()) < 10
    assert read_excerpt(tmp_path / "log") == [f"line {number}" for number in range(180, 200)]
    assert read_tail(tmp_path / "log", 20) == b"97\nline 198\nline 199\n"[-20:]


def test_newest_loss_is_found_right_after_a_rotation(tmp_path: Path) -> None:
    (tmp_path / "log.1").write_bytes(b"loss: 0.5\nloss: 0.25\n")
    (tmp_path / "log").write_bytes(b"saved\n")
    assert newest_loss(tmp_path / "log") == "0.25"
