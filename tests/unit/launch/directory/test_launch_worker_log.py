"""Excerpts and losses from logs of any content."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.directory.worker_log import EXCERPT_LINES, MAX_LINE_CHARS, newest_loss, read_excerpt, read_tail

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "    f()",
    "ValueError: wrong",
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker_0.log"


def test_last_lines_are_the_excerpt_when_nothing_was_raised(log: Path) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert read_excerpt(log) == [f"line {number}" for number in range(100 - EXCERPT_LINES, 100)]


def test_traceback_is_the_excerpt_with_what_follows_it(log: Path) -> None:
    log.write_text("\n".join([*["before"] * 50, *TRACEBACK, "after"]))
    assert read_excerpt(log) == [*TRACEBACK, "after"]


def test_last_traceback_is_taken_when_there_are_several(log: Path) -> None:
    log.write_text("\n".join([*TRACEBACK, "between", *TRACEBACK[:-1], "KeyError: 'last'"]))
    assert read_excerpt(log)[-1] == "KeyError: 'last'"
    assert len(read_excerpt(log)) == len(TRACEBACK)


def test_long_traceback_keeps_its_begin_and_its_end(log: Path) -> None:
    log.write_text("\n".join([TRACEBACK[0], *[f"  frame {n}" for n in range(200)], "RecursionError: deep"]))
    excerpt = read_excerpt(log)
    assert excerpt[:2] == [TRACEBACK[0], "  frame 0"]
    assert excerpt[2] == "  ... 162 lines left out ..."
    assert excerpt[-1] == "RecursionError: deep"
    assert len(excerpt) == 2 * EXCERPT_LINES + 1


def test_bytes_that_are_no_text_are_shown_escaped(log: Path) -> None:
    log.write_bytes(b"good \xff\xfe bad\nnul \0 here\n\xe2\x98\x83")
    assert read_excerpt(log) == ["good \\xff\\xfe bad", "nul \0 here", "☃"]


def test_line_of_a_megabyte_is_cut(log: Path) -> None:
    log.write_bytes(b"x" * 1_000_000 + b"\nlast")
    first, last = read_excerpt(log)
    assert first == "x" * MAX_LINE_CHARS + " ..."
    assert last == "last"


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n"])
def test_empty_log_has_an_excerpt_of_no_words(log: Path, content: bytes) -> None:
    log.write_bytes(content)
    assert "".join(read_excerpt(log)) == ""


def test_log_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert read_excerpt(tmp_path / "no.log") == []
    assert read_tail(tmp_path, 10) == b""


@given(
    content=st.binary(max_size=2000)
    | st.lists(st.sampled_from([*TRACEBACK, "x" * 500, "\0", "é"])).map(lambda lines: "\n".join(lines).encode())
)
def test_excerpt_of_any_bytes_is_short_text(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    log = tmp_path_factory.getbasetemp() / "any.log"
    log.write_bytes(content)
    excerpt = read_excerpt(log)
    assert len(excerpt) <= 2 * EXCERPT_LINES + 1
    for line in excerpt:
        assert len(line) <= MAX_LINE_CHARS + 4
        assert "\n" not in line
        line.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("epoch 1, loss: 0.25\n", "0.25"),
        ("Loss is 1e-3", "1e-3"),
        ("loss=2.5 loss=2.4", "2.4"),
        ("step 3 loss: nan", "nan"),
        ("train_loss: 7", "7"),
        ("lossless: yes", ""),
        ("", ""),
    ],
)
def test_newest_loss_is_found(log: Path, text: str, loss: str) -> None:
    log.write_text(text)
    assert newest_loss(log) == loss


def test_crash_in_native_code_is_shown_from_its_begin_without_our_own_frames(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    log.write_text(
        "loss is 3\n"
        "Fatal Python error: Segmentation fault\n"
        "\n"
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/home/me/train.py", line 4 in step\n'
        '  File "/home/me/train.py", line 9 in <module>\n'
        '  File "<string>", line 3 in <module>\n'
        "\n"
        "Thread 0x00007e (most recent call first):\n"
        '  File "/opt/lib/msrun/agent/processes/main_module.py", line 41 in _watch\n'
    )
    assert read_excerpt(log) == [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        '  File "/home/me/train.py", line 4 in step',
        '  File "/home/me/train.py", line 9 in <module>',
        "",
        "Thread 0x00007e (most recent call first):",
    ]


def test_traceback_with_the_rank_before_each_line_is_found(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    words = ["[rank2]: Traceback (most recent call last):", "[rank2]:   File ...", "[rank2]: ValueError: no"]
    log.write_text("\n".join(["before", *words]) + "\n")
    assert read_excerpt(log) == words


@pytest.mark.parametrize("prefix", ["", "[rank2]: "])
@pytest.mark.parametrize("first", ["uncaught ValueError at train.py:11: three rows", "uncaught ValueError"])
def test_what_the_runtime_writes_of_an_error_is_the_excerpt(tmp_path: Path, first: str, prefix: str) -> None:
    log = tmp_path / "worker_0.log"
    words = [f"{prefix}{first}", f"{prefix}    raise ValueError", f"{prefix}  called at train.py:14, in <module>"]
    log.write_text("\n".join(["step 1", "an uncaught fish", *words, ""]))
    assert read_excerpt(log) == words
