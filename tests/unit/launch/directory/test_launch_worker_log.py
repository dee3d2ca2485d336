"""Excerpts and losses from logs of any content, and following a log over its rotations: every byte once, in order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.agent.logs.rotated_log import LogRotation, RotatedLog
from msrun.agent.watch.progress_board import Progress
from msrun.launch.directory.worker_log import (
    EXCERPT_LINES,
    GAP,
    MAX_LINE_CHARS,
    LogReader,
    read_excerpt,
    read_log_end,
    read_tail,
)

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "    f()",
    "ValueError: wrong",
]


OF_RANK = ["[rank2]: Traceback (most recent call last):", "[rank2]:   File ...", "[rank2]: ValueError: no"]
LONG = [TRACEBACK[0], *[f"  frame {number}" for number in range(200)], "RecursionError: deep"]
CRASH = [
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f (most recent call first):",
    '  File "/home/me/train.py", line 4 in step',
    '  File "<string>", line 3 in <module>',
    "",
    "Thread 0x00007e (most recent call first):",
    '  File "/opt/lib/msrun/agent/processes/main_module.py", line 41 in _watch',
]


def uncaught(first: str, prefix: str) -> list[str]:
    """Return what the runtime writes of an error."""
    words = (first, "    raise ValueError", "  called at train.py:14, in <module>")
    return [f"{prefix}{line}" for line in words]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker_0.log"


@pytest.mark.parametrize(
    ("lines", "excerpt"),
    [
        ([f"{number}" for number in range(100)], [f"{number}" for number in range(100 - EXCERPT_LINES, 100)]),
        (["before"] * 50 + [*TRACEBACK, "after"], [*TRACEBACK, "after"]),
        ([*TRACEBACK, "between", *TRACEBACK[:-1], "KeyError: 'last'"], [*TRACEBACK[:-1], "KeyError: 'last'"]),
        (LONG, [*LONG[:2], "  ... 162 lines left out ...", *LONG[-(2 * EXCERPT_LINES - 2) :]]),
        (["before", *OF_RANK], OF_RANK),
        (["loss is 3", *CRASH], [*CRASH[:4], *CRASH[5:7]]),
        (["x" * 1_000_000, "last"], ["x" * MAX_LINE_CHARS + " ...", "last"]),
        *(
            (["step 1", "an uncaught fish", *uncaught(first, prefix), ""], uncaught(first, prefix))
            for first in ("uncaught ValueError at train.py:11: three rows", "uncaught ValueError")
            for prefix in ("", "[rank2]: ")
        ),
    ],
)
def test_excerpt_is_what_was_raised_or_the_last_lines(log: Path, lines: list[str], excerpt: list[str]) -> None:
    log.write_text("\n".join(lines))
    assert read_excerpt(log) == excerpt


def test_bytes_that_are_no_text_are_shown_escaped(log: Path) -> None:
    log.write_bytes(b"good \xff\xfe bad\nnul \0 here\n\xe2\x98\x83")
    assert read_excerpt(log) == ["good \\xff\\xfe bad", "nul \0 here", "☃"]


def test_log_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert read_excerpt(tmp_path / "no.log") == []
    assert read_tail(tmp_path, 10) == b""


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("epoch 1, loss: 0.25\n", "0.25"),
        ("loss=2.5 loss=2.4", "2.4"),
        ("train_loss: 7", "7"),
        ("lossless: yes", ""),
        ("", ""),
    ],
)
def test_newest_loss_is_found(log: Path, text: str, loss: str) -> None:
    log.write_text(text)
    assert read_log_end(log).loss_text == loss


@pytest.mark.parametrize(
    ("told", "step", "loss"),
    [(Progress(), 7, 0.25), (Progress(steps=9, loss=0.125), 9, 0.125), (Progress(steps=9), 9, 0.25)],
)
def test_what_a_worker_reports_goes_before_its_log(log: Path, told: Progress, step: int, loss: float) -> None:
    log.write_text("step: 7, loss: 0.25\n")
    end = read_log_end(log).with_reported(told)
    assert (end.step, end.loss) == (step, loss)


KEEP = 300


def write(log: RotatedLog, data: bytes) -> None:
    log.write(bytearray(data), len(data))


def read_all(reader: LogReader, size_bytes: int = 7) -> bytes:
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
    reader = LogReader(path, KEEP)
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
    lines = [b"%d %s\n" % (number, b"x" * (number % 50)) for number in range(3_000)]
    path, keep = str(tmp_path / "log"), sum(map(len, lines)) // 4096 + 1  # all: a reader may miss what is removed
    log, reader = RotatedLog(path, LogRotation(4096, keep)), LogReader(path, keep)

    def flood() -> None:
        for begin in range(0, len(lines), 7):
            write(log, b"".join(lines[begin : begin + 7]))

    writer = threading.Thread(target=flood)
    writer.start()
    found = b""
    while writer.is_alive():
        found += read_all(reader, 1 << 16)
    writer.join()
    found += read_all(reader, 1 << 16)
    reader.close()
    log.close()
    assert found == b"".join(lines)


def test_files_that_came_and_went_between_two_reads_are_told(tmp_path: Path) -> None:
    log = RotatedLog(str(tmp_path / "log"), LogRotation(2, 2))
    reader = LogReader(str(tmp_path / "log"), 2)
    write(log, b"0\n")
    assert read_all(reader) == b"0\n"
    write(log, b"".join(b"%d\n" % number for number in range(1, 10)))
    assert read_all(reader) == GAP + b"7\n8\n9\n"
    log.close()
    reader.close()


def test_log_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    reader = LogReader(str(tmp_path / "log"), 2)
    assert reader.read(10) == b""
    (tmp_path / "log").write_bytes(b"here\n")
    assert read_all(reader) == b"here\n"
    reader.close()


def test_log_that_is_not_rotated_stays_the_same_file_under_any_name(tmp_path: Path) -> None:
    log, reader = tmp_path / "log", LogReader(str(tmp_path / "log"))
    log.write_bytes(b"old\n")
    assert read_all(reader) == b"old\n"
    log.rename(tmp_path / "kept")
    log.write_bytes(b"new\n")
    assert read_all(reader) == b"" and reader.is_renamed()
    reader.hold()
    assert read_all(reader) == b""
    reader.close()


def test_end_of_a_log_reaches_into_its_older_files(tmp_path: Path) -> None:
    log = RotatedLog(str(tmp_path / "log"), LogRotation(10, 50))
    for number in range(100, 200):
        write(log, b"line %d\n" % number)
    log.close()
    assert len((tmp_path / "log").read_bytes()) < 10
    assert read_excerpt(tmp_path / "log") == [f"line {number}" for number in range(180, 200)]
    assert read_tail(tmp_path / "log", 20) == b"97\nline 198\nline 199\n"[-20:]
