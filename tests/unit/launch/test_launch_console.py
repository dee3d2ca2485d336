"""What a console of workers shows, and how: lines, bars, lines of all ranks once, and how far a rank is."""

import os
import re
import tempfile
import time
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_spec

from msrun.agent.observer import OwnFaults
from msrun.agent.processes.progress_board import PROGRESS_BOARD, ProgressBoard
from msrun.agent.processes.terminal import find_way_out
from msrun.cluster.membership import Membership
from msrun.launch import output
from msrun.launch.console import Console, ProgressLine, describe_progress
from msrun.launch.directory.worker_log import MAX_HELD_BYTES, STATE_S, Cutter, LineCutter, LogTail, RawLineCutter
from msrun.launch.output import one_line, printable, printable_bytes
from msrun.planning.build import build_plan
from msrun.planning.placement.host import HostFacts

ProgressRecord = pytest.importorskip("msrun.runtime.progress", exc_type=ImportError).ProgressRecord

ERASE = output.ERASE_LINE.decode()


class Screen:
    """A console of two workers whose logs the test writes, and what it prints."""

    def __init__(self, folder, monkeypatch, **options):
        spec = small_spec(folder, 2, **{"tail_ranks": (0, 1), **options})
        facts = HostFacts("h", "127.0.0.1", (0,))
        plan = self.plan = build_plan(spec, facts, caller={}, job_id="J", run_dir="/tmp/r", master_port=1)
        self.folder = folder
        self.lines = []
        self.text = ""
        self.said = []
        self.written = []
        monkeypatch.setattr(output, "write", lambda place, data, **__: self._write(place, data.decode()))
        monkeypatch.setattr(output, "say_lines", self.said.append)
        self.console = Console(spec, plan, OwnFaults(folder, self.said.append, found_in=""), quiet=False)

    def _write(self, place, text):
        self.written.append((place, text))
        self.text += text
        self.lines += text.splitlines()

    def raw(self):
        """Return what a moment shows, with the control sequences."""
        self.text = ""
        self.shown()
        return self.text

    def write(self, rank, text):
        with (self.folder / f"worker_{rank}.log").open("a") as file:
            file.write(text)

    def run(self):
        """All workers run: from here on there may be a live line."""
        self.console.note("running", {})

    def shown(self):
        self.lines.clear()
        self.console.tick(Membership(range(2)))
        return list(self.lines)

    def close(self):
        for tail in self.console._tails:
            tail.close()


@pytest.fixture
def screen(tmp_path, monkeypatch):
    with closing(Screen(tmp_path, monkeypatch)) as screen:
        yield screen


def test_lines_of_workers_are_shown_with_their_rank_as_they_come_until_nobody_reads_them(screen, monkeypatch):
    screen.write(0, "a\nb")
    screen.write(1, "c\n")
    assert sorted(screen.shown()) == ["[h:0] a", "[h:1] c"]
    screen.write(0, "b\n")
    assert screen.shown() == ["[h:0] bb"]
    assert screen.shown() == []
    with monkeypatch.context() as patch:
        patch.setattr(output.Place, "is_open", lambda *_: False)
        screen.write(0, "c\n")
        assert screen.shown() == []
    assert screen.shown() == [], "msrun ... | head has enough"


def test_last_lines_of_an_attempt_come_before_those_of_the_next(screen):
    screen.write(0, "last, without an end")
    screen.console.note("restarting", {"reason": "rank 1 failed", "delay_s": 1.0, "attempt": 1, "global_ranks": [1]})
    assert screen.lines == ["[h:0] last, without an end"]
    said = "\n".join(screen.said)
    assert "rank 1 failed; starting all workers again in 1 s, restart 1" in said
    assert f"  rank 1, log: {screen.folder}/worker_1.attempt_0.log" in said
    (screen.folder / "worker_0.log").rename(screen.folder / "worker_0.attempt_0.log")
    screen.write(0, "first of the next\n")
    assert screen.shown() == ["[h:0] first of the next"]


def test_log_that_grows_on_after_a_restart_until_it_is_renamed_is_shown_once(screen):
    """Logs of other hosts come over the network, and are renamed when the next attempt's first bytes are there."""
    screen.write(0, "early\n")
    screen.write(1, "early\n")
    screen.shown()
    screen.console.note("restarting", {"reason": "rank 1 failed", "delay_s": 1.0, "attempt": 1, "global_ranks": [1]})
    assert screen.shown() == []
    screen.write(0, "late\n")
    assert screen.shown() == ["[h:0] late"]
    screen.write(0, "last\n")
    (screen.folder / "worker_0.log").rename(screen.folder / "worker_0.attempt_0.log")
    screen.write(0, "again\n")
    assert screen.shown() == ["[h:0] last", "[h:0] again"]
    screen.lines.clear()
    screen.console.pause()
    assert screen.lines == [], "rank 1 wrote nothing more"


@pytest.mark.parametrize("is_seen", [True, False])
def test_line_of_a_new_attempt_waits_for_its_end_and_comes_without_one_at_the_end(screen, is_seen):
    screen.write(0, "early")
    screen.console.note("restarting", {"reason": "rank 1 failed", "delay_s": 1.0, "attempt": 1, "global_ranks": [1]})
    (screen.folder / "worker_0.log").rename(screen.folder / "worker_0.attempt_0.log")
    screen.write(0, "")
    if is_seen:
        assert screen.shown() == []
        screen.write(0, "la")
        assert screen.shown() == []
        screen.write(0, "te")
    else:
        screen.write(0, "late")
    screen.lines.clear()
    screen.console.pause()
    assert screen.lines == ["[h:0] late"]


BAR = "\r 5%|#   |\r10%|##  |"


def test_bar_among_several_ranks_is_a_line_of_its_own_now_and_then(screen, monkeypatch):
    screen.write(0, BAR)
    assert screen.shown() == [], "short bars show their last state alone"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + STATE_S)
    assert screen.shown() == ["[h:0] 10%|##  |"]
    assert screen.shown() == [], "it has not changed"
    screen.write(0, "\n")
    assert screen.shown() == [], "nor has it at its end"
    screen.write(0, "\r15%|### |")
    assert screen.shown() == [], "it is not time"
    screen.write(0, "\r99%|####|\nnext\n")
    assert screen.shown() == ["[h:0] 99%|####|", "[h:0] next"], "its last state always"
    screen.write(0, BAR)
    screen.shown()
    screen.console.pause()
    assert screen.lines[-1] == "[h:0] 10%|##  |", "at the end, too"


def test_raw_pieces_of_several_ranks_stay_whole(tmp_path, monkeypatch):
    with closing(Screen(tmp_path, monkeypatch, is_raw_tail=True)) as screen:
        screen.write(0, "a\r\nb")
        screen.write(1, "5%\r10%")
        assert screen.raw() in ("[h:0] a\r\n[h:1] 5%\r", "[h:1] 5%\r[h:0] a\r\n")
        screen.text = ""
        screen.console.pause()
        assert screen.text == "[h:0] b[h:1] 10%"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((21, 40, 10.0, "0.048"), "step 21/40 [##########----------] 52 %, 10 steps/s, loss 0.048, 1.9 s left"),
        ((1, 1, 1.0, ""), "step 1/1 [####################] 100 %, 1 steps/s"),
        ((1, 40, None, ""), "step 1/40 [--------------------] 2 %"),
        ((40, 40, 10.0, ""), "step 40/40 [####################] 100 %, 10 steps/s"),
        ((41, 40, 10.0, ""), "step 41/40 [####################] 100 %, 10 steps/s"),
        ((7200, 10800, 1.0, "1"), "step 7200/10800 [#############-------] 66 %, 1 steps/s, loss 1, 1 h 0 min left"),
        ((12345, 0, 0.01234, "nan"), "step 12345, 0.0123 steps/s, loss nan"),
    ],
)
def test_line_tells_what_is_known(given, line):
    assert describe_progress(*given) == line


def line_of(folder, global_rank):
    worker = SimpleNamespace(global_rank=global_rank, log_path=str(folder / "worker.log"))
    plan = SimpleNamespace(run_dir=str(folder), workers=(worker,))
    return ProgressLine(plan)


def test_what_the_rank_reports_goes_before_its_log(tmp_path):
    line = line_of(tmp_path, 2)
    assert line.text(1000.0) == ""
    (tmp_path / "worker.log").write_text("step: 7, loss: 0.5\n")
    assert line.text(1010.0) == line.text(1015.0) == "rank 2: step 7, loss 0.5"
    (tmp_path / "worker.log").write_text("step: 27, loss: 0.25\n")
    assert line.text(1020.0) == "rank 2: step 27, 2 steps/s, loss 0.25"
    (tmp_path / "worker.log").write_text("step: 1, loss: 2\n")  # of the next attempt
    assert line.text(1021.0) == "rank 2: step 1, loss 2"
    board = ProgressBoard(tmp_path / PROGRESS_BOARD, 4)
    board.create()
    record = ProgressRecord(str(tmp_path / PROGRESS_BOARD), 2)
    record.begin_step(30)
    record.note_loss(0.125)
    record.note_total(60)
    assert line.text(1022.0) == "rank 2: step 30/60 [##########----------] 50 %, loss 0.125"
    board.close()


def test_moments_of_a_job_are_told_in_words(screen):
    moments = {
        "preparing": {},
        "ready": {"reason": "libuv runs"},
        "started": {"global_rank": 0},
        "waiting": {"text": "for a lock"},
        "signal": {"name": "SIGUSR1", "global_ranks": [0]},
        "hang": {},
        "lingering": {"global_rank": 1, "what": "a thread"},
        "stopping": {"reason": "rank 1 failed"},
        "over": {"reason": "all have ended"},
    }
    for kind, fields in moments.items():
        screen.console.note(kind, fields)
    screen.console.note("ready", {"reason": "asked for"})
    screen.console.say("a note")
    assert screen.console.observers == (screen.console,)
    screen.console.finish(None, Membership(range(2)), 3)
    *said, last = screen.said
    assert said == [
        f"msrun: 2 workers on h, logs in {screen.folder}",
        *(f"msrun: {note}" for note in screen.plan.notes),
        "msrun: workers start by exec, not by fork: libuv runs",
        "msrun: for a lock",
        "msrun: signal SIGUSR1 passed on to 1 worker",
        "msrun: the job is stuck: asking every worker for its stacks",
        "msrun: the program of rank 1 has ended, its process waits for a thread",
        "msrun: stopping all workers: rank 1 failed",
        "msrun: a note",
    ]
    assert last.startswith("msrun: all 2 workers finished successfully after restart 3 in 0."), last


def test_live_line_tells_states_and_bars_and_gives_way_to_lines(tmp_path, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "50")
    with closing(Screen(tmp_path, monkeypatch, tail_ranks=(1,))) as screen:

        def shown():
            screen.written.clear()
            screen.shown()
            return screen.written

        assert shown() == [], "nothing runs yet"
        screen.run()
        state = f"{ERASE}msrun: 0 of 2 up, 0 running, 0 done, 0 s"
        assert shown() == [(2, state)]
        assert shown() == [], "it has not changed"
        screen.write(0, "step 3, loss: 0.5\n")
        screen.write(1, "line\n")
        assert shown() == [(2, ERASE), (1, "line\n"), (2, f"{state}, loss 0.")]
        screen.write(1, "\r\x1b[32m##\t" + 60 * "#")
        assert shown() == [(2, ERASE), (1, f"{ERASE}\x1b[32m## {46 * '#'}\x1b[0m")], "as much as there is room for"
        screen.write(1, "\rend\n")
        screen.console.note("stopping", {"reason": "SIGTERM"})
        assert screen.written[-1] == (1, ERASE)
        assert shown() == [(1, "end\n")]
        screen.run()
        shown()
        screen.console.pause()
        assert screen.written[-1] == (2, ERASE)


PIECES = st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([b"\r", b"\n", b"\r\n", b"ab\r"])), max_size=12)


@given(PIECES)
def test_lines_come_whole_however_the_file_grows(pieces):
    with tempfile.NamedTemporaryFile() as file, closing(LogTail(0, file.name, LineCutter)) as tail:
        lines = []
        for piece in pieces:
            file.write(piece)
            file.flush()
            lines += tail.read()
        tail.end()
        lines += tail.read()
    whole = b"".join(pieces)
    expected = whole.split(b"\n") if not whole.endswith(b"\n") else whole.split(b"\n")[:-1]
    last_states = [line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in expected]
    assert lines == (last_states if whole else [])


@given(PIECES, st.sampled_from([Cutter, RawLineCutter]))
def test_raw_bytes_are_those_of_the_file(pieces, cutter):
    with tempfile.NamedTemporaryFile() as file, closing(LogTail(0, file.name, cutter)) as tail:
        shown = []
        for piece in pieces:
            file.write(piece)
            file.flush()
            shown += tail.read()
            assert cutter is not Cutter or file.tell() == sum(map(len, shown)), "nothing is held back"
        tail.end()
        shown += tail.read()
    assert b"".join(shown) == b"".join(pieces)
    if cutter is RawLineCutter:
        assert all(piece.endswith((b"\r", b"\n")) for piece in shown[:-1]), "others may write between"
        assert not any(first.endswith(b"\r") and then.startswith(b"\n") for first, then in pairwise(shown))


@pytest.mark.parametrize("bar", [b"\r 5%\r10%", b" 5%\r10%\r", b"\r 5%\r10%\r\r"])
def test_unfinished_bar_has_a_state(bar):
    cutter = LineCutter()
    assert cutter.feed(b"epoch 1\n") == [b"epoch 1\n"]
    assert cutter.feed(bar) == []
    assert cutter.state == b"10%"


@pytest.mark.parametrize("held", [b"no carriage return", b"\r 50%\r    \r", b""])
def test_what_is_no_bar_or_a_bar_taken_away_has_no_state(held):
    cutter = LineCutter()
    cutter.feed(held)
    assert cutter.state == b"" and cutter.take_state(1e9) == []


def test_long_bar_is_not_held_whole():
    cutter = LineCutter()
    for _ in range(3):
        assert cutter.feed(b"\r" + b"x" * (MAX_HELD_BYTES // 2)) == []
    assert cutter.end() == [b"x" * (MAX_HELD_BYTES // 2) + b"\n"]


@pytest.mark.parametrize("cutter", [Cutter, RawLineCutter, LineCutter])
def test_endless_line_is_shown_in_pieces(tmp_path, cutter):
    size = 3 * MAX_HELD_BYTES
    (tmp_path / "log").write_bytes(b"x" * size)
    with closing(LogTail(0, str(tmp_path / "log"), cutter)) as tail:
        tail.end()
        assert b"".join(tail.read()).replace(b"\n", b"") == b"x" * size


HOSTILE = ("\x1b", "\x07", "\x9b", "\x90", "\x9d", "\x7f", "\r", "\x08", "\u202e", "\u2066", "\u2028")


@given(st.text() | st.lists(st.sampled_from([*HOSTILE, "a", "[31m", "]52;c;", "[2J", "\n", "\t"])).map("".join))
def test_nothing_that_a_terminal_obeys_is_left(text):
    shown = printable(text)
    assert not set(HOSTILE) & set(shown)
    assert printable(shown) == shown
    assert one_line(text).isprintable()


@given(st.lists(st.sampled_from([*HOSTILE, "a", "[31m", "\x1b[1;32m", "\x1b[m", "]52;c;", "[2J", "\n"])).map("".join))
def test_colours_alone_may_stay_and_end_with_their_line(text):
    for line in printable(text, keep_colours=True).split("\n"):
        *sequences, rest = line.split("\x1b")
        assert not sequences or rest == "[0m"
        assert all(piece.startswith("[") and "m" in piece for piece in line.split("\x1b")[1:])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünï ☃\tand\nlines", "plain, ünï ☃\tand\nlines"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("50%\x1b[2K\x1b[1G60%", "50%60%"),
        ("\x1b]52;c;YQ==\x07", "\\x1b]52;c;YQ==\\x07"),
        ("\x1bPq\x1b\\", "\\x1bPq\\x1b\\"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb", "a\\u202eb"),
        ("carriage\rreturn", "carriage\\rreturn"),
    ],
)
def test_what_becomes_of_text(text, shown):
    assert printable(text) == shown
    assert re.sub(r"\x1b\[\d*m", "", printable(f"\x1b[1m{text}", keep_colours=True)) == shown


def test_one_line_stays_one():
    assert one_line("a\nb\tc\x1b[2Jd") == "a\\nb\\tcd"


def test_bytes_become_what_text_becomes():
    """Bytes of which all are plain are not looked at one by one."""
    for number in range(256):
        data = bytes([number])
        assert printable_bytes(data) == printable(data.decode("utf-8", "backslashreplace")).encode(), number


@pytest.mark.parametrize(
    ("keys", "is_out"),
    [
        ([(0.0, b"\x1d\x1d\x1d")], True),
        ([(0.0, b"\x1d"), (0.5, b"\x1d"), (1.0, b"\x1d")], True),
        ([(0.0, b"\x1d"), (0.5, b"\x1d"), (1.1, b"\x1d")], False),
        ([(0.0, b"\x1d"), (0.9, b"\x1d"), (1.1, b"\x1d"), (1.2, b"\x1d")], True),
        ([(0.0, b"\x1d\x1da\x1d")], False),
        ([(0.0, b"\x03\x03\x03")], False),
    ],
)
def test_three_presses_within_a_second_are_the_way_out(keys, is_out):
    presses = []
    assert [find_way_out(pressed, presses, now) for now, pressed in keys][-1] is is_out


def test_unfinished_line_of_an_attempt_comes_before_the_lines_of_the_next(tmp_path):
    log = tmp_path / "worker_0.log"
    log.write_bytes(b"one\nhalf")
    with closing(LogTail(0, str(log), LineCutter)) as tail:
        assert tail.read() == [b"one\n"]
        log.rename(tmp_path / "worker_0.attempt_0.log")
        log.write_bytes(b"two\n")
        assert b"".join(tail.read()) == b"half\ntwo\n"
