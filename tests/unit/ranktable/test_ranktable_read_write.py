"""Files in and out: what is in the way is named, and nothing half-written is left."""

import io
import sys

import pytest

from ranktable import build_table, encode_table, read_table, write_table
from ranktable import files as read_module
from ranktable.errors import NotReadyError, ReadError, WriteError

TABLE = build_table([("10.0.0.1", 8), ("10.0.0.2", 8)])
TEXT = encode_table(TABLE).encode()


def test_a_written_table_is_read_again(tmp_path):
    path = tmp_path / "with space 'and quote'.json"
    write_table(path, TABLE)
    assert read_table(path) == TABLE
    assert path.read_bytes() == TEXT


def test_writing_names_what_is_in_the_way(tmp_path):
    with pytest.raises(WriteError, match=r"it is a directory; name a file in it"):
        write_table(tmp_path, TABLE)
    with pytest.raises(WriteError, match=r"create the folder .*missing first"):
        write_table(tmp_path / "missing" / "t.json", TABLE)


def test_reading_names_what_is_in_the_way(tmp_path):
    with pytest.raises(ReadError, match="it is a directory"):
        read_table(tmp_path)
    with pytest.raises(ReadError, match="no such file or directory; check the path"):
        read_table(tmp_path / "missing.json")
    with pytest.raises(ReadError):
        read_table("nul\0byte")


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(read_module, "MAX_BYTES", 1024**2)
    path = tmp_path / "large.json"
    path.write_bytes(b" " * (1024**2 + 1))
    with pytest.raises(ReadError, match="larger than 1 MiB"):
        read_table(path)


def test_a_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT)))
    assert read_table("-") == TABLE


@pytest.mark.parametrize(
    "text",
    [TEXT.replace(b"completed", b"initializing"), b'{"version": "1.0", "status": "initializing", "server_list": []}'],
)
def test_a_table_in_the_making_is_not_ready(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(NotReadyError) as caught:
        read_table(path)
    assert caught.value.exit_code == 3
