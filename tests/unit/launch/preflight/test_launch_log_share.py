"""Whether another host sees the launcher's log directory is proved by a word in a file, not by equal paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msrun.launch.preflight.host_look import sees_word, shown_word


@pytest.mark.parametrize("name", [".", "logs", "logs/of/today"])
def test_host_that_reads_the_word_shares_the_directory(tmp_path: Path, name: str) -> None:
    with shown_word(tmp_path / name) as shown:
        assert sees_word(shown)
        (file,) = list(tmp_path.iterdir())
        assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []
    assert not sees_word(shown)


def test_host_with_a_directory_of_that_name_and_another_word_does_not(tmp_path: Path) -> None:
    with shown_word(tmp_path) as shown:
        Path(shown["path"]).write_text("f" * 64)
        assert not sees_word(shown)


def test_word_is_never_the_same_twice(tmp_path: Path) -> None:
    with shown_word(tmp_path) as first, shown_word(tmp_path) as second:
        assert first["path"] != second["path"] and first["word"] != second["word"]
        assert not sees_word({**first, "path": second["path"]})


def test_launcher_that_cannot_write_there_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with shown_word(tmp_path / "file") as shown:
        assert shown == {}
    assert not sees_word({})


def test_word_is_taken_away_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), shown_word(tmp_path):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_word_that_was_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    with shown_word(tmp_path) as shown:
        Path(shown["path"]).unlink()


def test_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    """A host reads nothing but a file; a missing one is enough to say no."""
    assert not sees_word({"path": str(tmp_path / "none"), "word": "x"})
    assert not sees_word({"path": str(tmp_path), "word": "x"})
