"""A place to write to whose reader may pause, be slow or go."""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from job_runner import wait_until

from msrun.agent.observer import OwnFaults
from msrun.launch import output
from msrun.launch.terminal import describe_unread_input, is_in_background

PIPE_BYTES = 4096


@pytest.fixture
def pipe(monkeypatch):
    """A full pipe: its ends, with a place of its own."""
    monkeypatch.setattr(output, "STALL_S", 0.05)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writer, b"." * PIPE_BYTES)
    place = output.Place()
    monkeypatch.setattr(output, "place", lambda _: place)
    yield reader, writer
    os.set_blocking(reader, False)
    wait_until(lambda: place.is_idle() or drained(reader), "everything was written")
    place.end()
    os.close(reader)
    os.close(writer)


def drained(reader):
    """Read what there is; return nothing, so that somebody who waits goes on."""
    with contextlib.suppress(BlockingIOError):
        os.read(reader, 1 << 20)
    return b""


def read(reader, size):
    text = b""
    while len(text) < size:
        text += os.read(reader, size - len(text))
    return text


def test_a_reader_who_pauses_holds_up_nobody_and_misses_nothing(pipe):
    reader, writer = pipe
    for count in range(100):
        output.write(writer, b"%03d\n" % count)
    assert not output.place(writer).is_idle()
    text = read(reader, PIPE_BYTES + 400)
    assert text == b"." * PIPE_BYTES + b"".join(b"%03d\n" % count for count in range(100))
    wait_until(lambda: output.place(writer).is_idle(), "everything was written")


def test_what_does_not_fit_is_dropped_and_said(pipe):
    reader, writer = pipe
    piece = b"x" * (output.MAX_WAITING_BYTES // 4)
    for _ in range(6):
        output.write(writer, piece)
    assert not output.place(writer).has_room()
    said = f"msrun: {2 * len(piece)} bytes were left out here: nobody read them\n".encode()
    text = read(reader, PIPE_BYTES + 4 * len(piece) + len(said))
    assert text.endswith(piece + said)


def test_a_reader_who_has_gone_gets_no_more_and_another_all_of_its_own(monkeypatch):
    place = output.Place()
    monkeypatch.setattr(output, "place", lambda _: place)
    (reader, writer), (other, to_other) = os.pipe(), os.pipe()
    os.write(writer, b"." * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES))
    for descriptor in (writer, writer, to_other):
        output.write(descriptor, b"written once")
    os.close(reader)
    wait_until(lambda: not output.place(writer).is_open(writer), "noticed")
    output.write(writer, b"into nothing")
    wait_until(lambda: output.place(writer).is_idle(), "everything was written")
    assert os.read(other, 1 << 10) == b"written once"
    place.end()
    for descriptor in (writer, to_other, other):
        os.close(descriptor)


def test_end_waits_for_what_is_still_to_be_written():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    output.write(writer, b"." * 3 * PIPE_BYTES)
    place, slow = output.place(writer), threading.Timer(0.05, read, (reader, 3 * PIPE_BYTES))
    slow.start()
    output.close()
    assert place.is_idle()
    slow.join()
    os.close(reader)
    os.close(writer)


def test_a_pipe_that_does_not_block_waits_for_its_reader_without_end(pipe, monkeypatch):
    reader, writer = pipe
    os.set_blocking(writer, False)
    waits = []

    def poll(_):
        if len(waits) > 2 * sys.getrecursionlimit():
            time.sleep(output.STALL_S)
        waits.append(1)

    fake = SimpleNamespace(register=lambda *_: None, poll=poll)
    monkeypatch.setattr(output, "select", SimpleNamespace(poll=lambda: fake, POLLOUT=4))
    output.write(writer, b"whole")
    wait_until(lambda: len(waits) > 2 * sys.getrecursionlimit(), "it has waited often")
    assert read(reader, PIPE_BYTES + 5).endswith(b"whole")


def test_thread_that_fails_tells_and_goes_on(pipe, monkeypatch, tmp_path):
    reader, writer = pipe
    read(reader, PIPE_BYTES)
    place = output.place(writer)
    write_some = place._write_some
    monkeypatch.setattr(place, "_write_some", lambda *_: {}["slip"])
    said = []
    with OwnFaults(tmp_path, said.append, found_in=str(tmp_path)):
        output.write(writer, b"lost")
        wait_until(lambda: output.place(writer).is_idle(), "it is past the slip")
        monkeypatch.setattr(place, "_write_some", write_some)
        output.write(writer, b"more")
        assert read(reader, 4) == b"more"
    assert len(said) == 1 and "msrun-output" in said[0] and "KeyError: 'slip'" in said[0]
    assert "Traceback" in (tmp_path / "scheduler.log").read_text()


@pytest.mark.parametrize(("more", "has_room"), [(-1, True), (0, False)])
def test_room_ends_at_its_limit_and_comes_back_with_the_reader(pipe, more, has_room):
    reader, writer = pipe
    output.write(writer, b"x" * (output.ROOM_BYTES + more))
    assert output.place(writer).has_room() is has_room
    read(reader, output.ROOM_BYTES)
    wait_until(lambda: output.place(writer).has_room(), "room")


def test_discarded_output_is_written_nowhere_and_without_an_error():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        output.discard_output(stream)
        stream.write("into nothing")


def test_thread_ends_once_nothing_waits_and_holds_up_nobody_while_something_does(pipe):
    reader, writer = pipe
    place = output.place(writer)
    output.write(writer, b"not read yet")
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "msrun-output")
    place.end()
    assert thread.is_alive() and thread.daemon
    read(reader, PIPE_BYTES + len(b"not read yet"))
    wait_until(lambda: output.place(writer).is_idle(), "everything was written")
    place.end()
    assert not thread.is_alive()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_standard_stream(tmp_path, closed):
    program = (
        "import os, subprocess, sys; from msrun.launch import output; output.open_standard_streams();"
        "file = open('found', 'w'); assert None not in (sys.stdin, sys.stdout, sys.stderr);"
        "child = subprocess.run(['readlink', '/proc/self/fd/0', '/proc/self/fd/1', '/proc/self/fd/2'],"
        "close_fds=False); file.write(f'{child.returncode} {file.fileno()}')"
    )
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program], cwd=tmp_path, check=True)
    status, number = (tmp_path / "found").read_text().split()
    assert (status, int(number) > 2) == ("0", True)


@pytest.fixture
def standard_input(tmp_path):
    """Puts a file with these bytes in the place of standard input, read up to a position, or a pipe that holds them."""
    before = os.dup(0)

    def give(kind, data, position=0):
        if kind == "pipe":
            reader, writer = os.pipe()
            os.write(writer, data)
            os.close(writer)
        else:
            (tmp_path / "input").write_bytes(data)
            reader = os.open(tmp_path / "input", os.O_RDONLY)
            os.lseek(reader, position, os.SEEK_SET)
        os.dup2(reader, 0)
        os.close(reader)
        if kind == "nothing":
            os.close(0)

    yield give
    os.dup2(before, 0)
    os.close(before)


@pytest.mark.parametrize(
    ("given", "is_said"),
    [
        *((("pipe", b"x"), True), (("pipe", b""), False), (("file", b"xy", 1), True), (("file", b"xy", 2), False)),
        (("nothing", b""), False),
    ],
)
def test_input_that_nobody_will_read_is_said(standard_input, given, is_said):
    standard_input(*given)
    assert bool(describe_unread_input()) == is_said and not is_in_background()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abcdef", "abcd"),
        ("\x1b[31mabcdef\x1b[0m gh", "\x1b[31mabcd\x1b[0m"),
        ("日本語", "日本"),
        ("e\u0301tude", "e\u0301tud"),
        ("abc", "abc"),
    ],
)
def test_a_line_is_cut_to_what_a_terminal_of_four_columns_shows(text, shown):
    assert output.fit(text, 4) == shown
