"""Excerpts and losses from logs of any content, and following a log over its attempts: every byte once, in order."""

from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.agent.log_file import BoundedLog, LogLimit
from msrun.agent.processes.progress_board import Progress
from msrun.launch.directory.worker_log import (
    EXCERPT_LINES,
    GAP,
    MAX_LINE_CHARS,
    LogReader,
    read_excerpt,
    read_log_end,
    read_tail,
)

TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()", "ValueError: wrong"]


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


def uncaught(first, prefix):
    """Return what the runtime writes of an error."""
    words = (first, "    raise ValueError", "  called at train.py:14, in <module>")
    return [f"{prefix}{line}" for line in words]


@pytest.fixture
def log(tmp_path):
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
def test_excerpt_is_what_was_raised_or_the_last_lines(log, lines, excerpt):
    log.write_text("\n".join(lines))
    assert read_excerpt(log) == excerpt


def test_bytes_that_are_no_text_are_shown_escaped(log):
    log.write_bytes(b"good \xff\xfe bad\nnul \0 here\n\xe2\x98\x83")
    assert read_excerpt(log) == ["good \\xff\\xfe bad", "nul \0 here", "☃"]


def test_log_that_cannot_be_read_is_empty(tmp_path):
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
def test_newest_loss_is_found(log, text, loss):
    log.write_text(text)
    assert read_log_end(log).loss_text == loss


@pytest.mark.parametrize(
    ("told", "step", "loss"),
    [(Progress(), 7, 0.25), (Progress(steps=9, loss=0.125), 9, 0.125), (Progress(steps=9), 9, 0.25)],
)
def test_what_a_worker_reports_goes_before_its_log(log, told, step, loss):
    log.write_text("step: 7, loss: 0.25\n")
    end = read_log_end(log).with_reported(told)
    assert (end.step, end.loss) == (step, loss)


def read_all(reader, size_bytes=7):
    pieces = []
    while data := reader.read(size_bytes):
        assert len(data) <= size_bytes or data == GAP
        pieces.append(data)
    return b"".join(pieces)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["read", "hold", "rename", "a", "line\n"])))
def test_every_byte_of_every_attempt_is_read_once_and_in_order(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("log")
    path, written, found, attempts = folder / "log", b"", b"", 0
    with closing(LogReader(str(path))) as reader:
        for step in steps:
            if step == "read":
                found += read_all(reader)
            elif step == "hold":
                reader.hold()
            elif step != "rename":
                written += step.encode()
                with path.open("ab") as file:
                    file.write(step.encode())
            elif path.exists():  # who follows a log is told before
                reader.hold()
                attempts += 1
                path.rename(folder / f"attempt_{attempts}")
        found += read_all(reader)
        assert found == written
        assert reader.attempt == attempts - (attempts > 0 and not path.exists())


def test_bytes_that_were_freed_before_they_were_read_are_told(tmp_path):
    path = tmp_path / "log"
    refused = []
    log, data = BoundedLog(str(path), LogLimit(4096, 1), refused.append), bytes(range(1, 256)) * 100
    with closing(LogReader(str(path))) as reader:
        path.write_bytes(data[:100])
        assert read_all(reader, 99) == data[:100]
        path.write_bytes(data)
        log.look()
        assert read_all(reader, 99) == GAP + data[len(data) // 4096 * 4096 - 4096 :] and not refused
    assert read_tail(path, len(data)) == data[len(data) // 4096 * 4096 - 4096 :]


def test_log_that_is_not_there_yet_is_empty(tmp_path):
    with closing(LogReader(str(tmp_path / "log"))) as reader:
        assert reader.read(10) == b""
        (tmp_path / "log").write_bytes(b"\0\0here\n")
        assert read_all(reader, 1) == b"\0\0here\n", "what a worker writes, whatever it is"
        assert reader.skip_to_last(3) and read_all(reader) == b"re\n" and not reader.skip_to_last(7)
