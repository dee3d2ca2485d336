"""A folder of files is written whole or not at all."""

import pytest

from ranktable import WriteError
from ranktable.files import write_folder


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    write_folder(tmp_path / "new", [("a", b"1"), ("b", b"2")])
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == {"a": "1", "b": "2"}
    with pytest.raises(WriteError, match="the folder is not empty"):
        write_folder(tmp_path / "new", [("c", b"3")])
    with pytest.raises(WriteError):
        write_folder(tmp_path / "other", [("sub/c", b"3")])
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_an_empty_folder_is_filled_and_a_missing_parent_is_made(tmp_path):
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", [("c", b"3")])
    write_folder(tmp_path / "none" / "new", [("c", b"3")])
    assert sorted(path.name for path in tmp_path.rglob("c")) == ["c", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "none"]
