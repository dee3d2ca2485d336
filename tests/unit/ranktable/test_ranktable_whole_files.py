"""Output files that a user names: a plain file is replaced whole, what is no plain file stays what it is."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from ranktable import files
from ranktable.files import replace_file, write_whole

OLD, NEW = b"old", b"new"


def make_null(path):
    """A node like /dev/null, of the test's own."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes device nodes")


def test_a_device_is_written_into_and_stays_one(tmp_path):
    make_null(tmp_path / "null")
    write_whole(tmp_path / "null", NEW)
    assert stat.S_ISCHR((tmp_path / "null").lstat().st_mode)
    assert list(tmp_path.iterdir()) == [tmp_path / "null"]


@pytest.mark.parametrize("size", [3, 1_000_000])
def test_a_pipe_gets_all_to_its_reader_and_stays_one(tmp_path, size):
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write_whole(fifo, b"x" * size)
    reader.join()
    assert read == [b"x" * size]
    assert fifo.is_fifo()


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WAIT_FOR_READER_S", 0)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        write_whole(tmp_path / "fifo", NEW)
    stuck = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="it is a pipe that nobody reads"):
            write_whole(tmp_path / "fifo", b"x" * 1_000_000)
    finally:
        os.close(stuck)


def test_who_may_not_wait_waits_for_no_reader(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        write_whole(tmp_path / "fifo", NEW, may_wait=False)


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_chain_of_links_the_target_is_written(tmp_path, is_there):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    if is_there:
        target.write_bytes(OLD)
    (tmp_path / "folder" / "second").symlink_to("target")
    (tmp_path / "first").symlink_to("folder/second")
    write_whole(tmp_path / "first", NEW)
    assert target.read_bytes() == NEW and not target.is_symlink()
    assert os.readlink(tmp_path / "first") == "folder/second"
    assert sorted(os.listdir(tmp_path / "folder")) == ["second", "target"]


def test_links_in_a_circle_are_an_error(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        write_whole(tmp_path / "loop", NEW)
    assert (tmp_path / "loop").is_symlink()


def test_standard_output_by_its_name_in_dev_is_written_into(tmp_path):
    """A pipe or a file that the shell has opened has no name that could be replaced, and keeps what stands in it."""
    program = "from ranktable.files import write_whole; write_whole('/dev/stdout', b'new')"
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert piped.stdout == NEW
    with (tmp_path / "out").open("wb") as out:
        out.write(OLD)
        out.flush()
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_bytes() == OLD + NEW


def test_permissions_are_those_given_or_those_that_were_there(tmp_path):
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        write_whole(path, OLD)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write_whole(path, NEW)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
        write_whole(path, NEW, mode=0o646)
        assert stat.S_IMODE(path.stat().st_mode) == 0o646
    finally:
        os.umask(before)


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(KeyboardInterrupt), files.open_whole(path) as stream:
        stream.write(NEW)
        raise KeyboardInterrupt
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["link", "fifo", "device", "file"])
def test_in_a_folder_of_ours_whatever_somebody_has_put_there_is_replaced(tmp_path, kind):
    victim, path = tmp_path / "victim", tmp_path / "report.json"
    victim.write_bytes(OLD)
    {"link": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path), "device": lambda: make_null(path)}.get(
        kind, lambda: path.write_bytes(OLD)
    )()
    replace_file(path, NEW, mode=0o600)
    assert stat.S_ISREG(path.lstat().st_mode) and stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert (path.read_bytes(), victim.read_bytes()) == (NEW, OLD)
