"""Files that are no plain files: pipes, links, devices, closed input. Each gives one line, never a wait without end."""

import io
import os
import subprocess
import sys
import threading

import pytest

from ranktable import build_table, encode_table, read_table, validate_file
from ranktable import files as pipe
from ranktable.errors import ReadError

TABLE = build_table([("10.0.0.1", 8)])
TEXT = encode_table(TABLE).encode()


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "t.json"
    os.mkfifo(path)
    return path


def test_a_pipe_that_is_written_to_is_read(fifo):
    writer = threading.Thread(target=fifo.write_bytes, args=(TEXT,))
    writer.start()
    assert read_table(fifo) == TABLE
    writer.join()


def test_a_pipe_without_a_writer_is_refused(fifo, monkeypatch):
    monkeypatch.setattr(pipe, "WAIT_FOR_WRITER_S", 0)
    with pytest.raises(ReadError, match="it is a pipe that nothing has written to for 0 s"):
        read_table(fifo)


def test_a_pipe_whose_writer_is_slow_is_waited_for(fifo, monkeypatch):
    monkeypatch.setattr(pipe, "WAIT_FOR_WRITER_S", 0)
    writer = os.open(fifo, os.O_RDWR)
    set_blocking, waits, read = os.set_blocking, threading.Event(), []
    monkeypatch.setattr(os, "set_blocking", lambda *arguments: waits.set() or set_blocking(*arguments))
    reader = threading.Thread(target=lambda: read.append(read_table(fifo)))
    reader.start()
    assert waits.wait(30), "the reader has given up on a pipe that has a writer"
    os.write(writer, TEXT)
    os.close(writer)
    reader.join()
    assert read == [TABLE]


def test_links_in_a_circle_and_into_nothing_are_named(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "dangling.json").symlink_to("gone.json")
    with pytest.raises(ReadError, match=r"too many levels.*lead in a circle"):
        read_table(tmp_path / "loop.json")
    with pytest.raises(ReadError, match=r"it is a symbolic link to gone\.json, which is not there"):
        read_table(tmp_path / "dangling.json")


def test_a_link_is_a_warning_on_ascend_as_a_mounted_configmap_is_one(tmp_path):
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "hccl.json").write_bytes(TEXT)
    (tmp_path / "hccl.json").symlink_to("..data/hccl.json")
    assert read_table(tmp_path / "hccl.json") == TABLE
    on_ascend = [problem.message for problem in validate_file(tmp_path / "hccl.json", chip="a2").problems]
    assert [message[:45] for message in on_ascend] == ["the file is a symbolic link, as in a mounted "]
    assert validate_file(tmp_path / "hccl.json", device_target="gpu").problems == ()
    assert validate_file(tmp_path / "..data" / "hccl.json", chip="a2").problems == ()


def test_endless_devices_are_refused():
    with pytest.raises(ReadError, match="larger than 64 MiB"):
        read_table("/dev/zero")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "the name is empty"),
        ("n" * 5000, "file name too long"),
        ("/dev/null/t.json", "not a directory"),
    ],
)
def test_odd_names_are_refused_in_one_short_line(name, says):
    with pytest.raises(ReadError, match=says) as caught:
        read_table(name)
    assert len(str(caught.value)) < 400


def test_standard_input_may_be_closed_or_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ReadError, match="standard input is closed"):
        read_table("-")
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stdin", closed)
    with pytest.raises(ReadError, match="standard input is closed"):
        read_table("-")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_of_another_user_is_refused(tmp_path):
    secret = tmp_path / "t.json"
    secret.write_bytes(TEXT)
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    program = """
import os
from ranktable.cli import main
main(["validate", "missing.json"])  # imports everything while the interpreter can still be read
os.setgid(65534), os.setuid(65534)
raise SystemExit(main(["validate", "t.json"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    last = "ranktable: error: cannot read t.json: permission denied; make it readable for this user"
    assert done.stderr.splitlines()[1:] == [last]
