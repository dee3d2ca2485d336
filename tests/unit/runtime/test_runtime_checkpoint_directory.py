"""Checkpoint directories: what counts as complete, which is the newest, what goes and what stays."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.directory import (
    MANIFEST,
    Manifest,
    Position,
    checkpoint_name,
    choose_surplus,
    complete_directory,
    find_checkpoints,
    give_name,
    read_manifest,
    recover,
    recover_all,
    remove_checkpoint,
    start_writing,
    sweep,
)


def write(final: Path, content: bytes = b"x" * 100, position: Position | None = None) -> Path:
    """Write a small checkpoint as save_checkpoint does."""
    temporary, serial = start_writing(final, is_file=False)
    (temporary / "data").write_bytes(content)
    complete_directory(temporary, Manifest(position or Position(), 4, serial, time.time()))
    give_name(temporary, final)
    return final


def names(directory: Path, prefix: str | None = None) -> list[str]:
    return [path.name for path, _ in find_checkpoints(directory, prefix)]


def test_written_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    final = write(tmp_path / "new" / "a", position=Position(2, 3, 19))
    manifest = read_manifest(final)
    assert manifest is not None
    assert (manifest.position, manifest.world_size, manifest.serial) == (Position(2, 3, 19), 4, 1)
    assert manifest.files == {"data": 100}
    assert sorted(path.name for path in final.parent.iterdir()) == ["a"]


def test_checkpoint_has_no_name_before_it_is_finished(tmp_path: Path) -> None:
    write(tmp_path / "a")
    temporary, _ = start_writing(tmp_path / "b", is_file=False)
    (temporary / "data").write_bytes(b"half")
    assert names(tmp_path) == ["a"]
    shutil.copy(tmp_path / "a" / MANIFEST, temporary)
    (temporary / "data").write_bytes(b"x" * 100)
    assert read_manifest(temporary) is None, "whatever is in it"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "damage", ["missing", "shorter", "longer", "no manifest", "manifest cut off", "manifest empty"]
)
def test_damaged_checkpoint_is_not_found(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "a")
    broken = write(tmp_path / "b")
    if damage == "missing":
        (broken / "data").unlink()
    elif damage == "shorter":
        os.truncate(broken / "data", 99)
    elif damage == "longer":
        (broken / "data").write_bytes(b"x" * 101)
    elif damage == "no manifest":
        (broken / MANIFEST).unlink()
    else:
        text = (broken / MANIFEST).read_text()
        (broken / MANIFEST).write_text(text[: len(text) // 2] if damage == "manifest cut off" else "{}")
    assert names(tmp_path) == ["a"]


def test_other_things_in_the_directory_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("MindSpore's")
    (tmp_path / "folder").mkdir()
    assert names(tmp_path) == []
    assert names(tmp_path / "missing") == []


def test_newest_is_the_one_written_last_whatever_its_name_and_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([500.0, 100.0, 300.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    for name, step in (("CKP-9_1.ckpt", 90), ("CKP-10_1.ckpt", 100), ("CKP-1_1.ckpt", 1)):
        write(tmp_path / name, position=Position(step=step))
    assert names(tmp_path) == ["CKP-9_1.ckpt", "CKP-10_1.ckpt", "CKP-1_1.ckpt"]


def test_prefix_finds_its_own_only(tmp_path: Path) -> None:
    for name in ("a-1_1.ckpt", "a-1_2.ckpt", "ab-1_1.ckpt", "a-1_1", "a.b-1_1.ckpt", "aXb-1_1.ckpt"):
        write(tmp_path / name)
    assert names(tmp_path, "a") == ["a-1_1.ckpt", "a-1_2.ckpt"]
    assert names(tmp_path, "a.b") == ["a.b-1_1.ckpt"]
    assert len(names(tmp_path)) == 6


def test_name_is_mindspores() -> None:
    assert checkpoint_name("CKP", 2, 32) == "CKP-2_32.ckpt"


def test_writing_again_replaces_the_whole_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "last", b"old")
    temporary, serial = start_writing(tmp_path / "last", is_file=False)
    assert (tmp_path / "last" / "data").read_bytes() == b"old", "until the new one is complete"
    (temporary / "other").write_bytes(b"new")
    complete_directory(temporary, Manifest(Position(), 1, serial, 0.0))
    give_name(temporary, tmp_path / "last")
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == [MANIFEST, "other"]
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.parametrize("kind", ["file", "folder", "mindspore"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, kind: str) -> None:
    taken = tmp_path / "home"
    if kind == "folder":
        taken.mkdir()
        (taken / "thesis.tex").write_text("years")
    else:
        taken.write_text("years")
    with pytest.raises(CheckpointError, match="home exists and is no checkpoint: it is left alone"):
        start_writing(taken, is_file=False)
    assert taken.exists()


def test_empty_directory_may_become_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_rest_of_an_interrupted_attempt_is_overwritten(tmp_path: Path) -> None:
    temporary, _ = start_writing(tmp_path / "a", is_file=False)
    (temporary / "__7_0.distcp").write_bytes(b"of a rank that is no more")
    write(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [MANIFEST, "data"]


def test_checkpoint_is_recovered_when_its_successor_was_cut_off_between_the_renames(tmp_path: Path) -> None:
    write(tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / "last.replaced")
    assert names(tmp_path) == []
    recover_all(tmp_path)
    assert names(tmp_path) == ["last"]


def test_replaced_checkpoint_does_not_come_back_over_its_successor(tmp_path: Path) -> None:
    write(tmp_path / "last", b"old")
    shutil.copytree(tmp_path / "last", tmp_path / "last.replaced")
    write(tmp_path / "last", b"new")
    shutil.copytree(tmp_path / "last", tmp_path / "last.replaced", dirs_exist_ok=True)
    recover(tmp_path / "last")
    assert (tmp_path / "last" / "data").read_bytes() == b"new"


def test_removed_checkpoint_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is cut off leaves nothing that could be taken for a checkpoint."""
    write(tmp_path / "a")
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_settings: None)
    remove_checkpoint(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a.removing"]
    assert names(tmp_path) == []


def test_sweep_removes_what_an_interrupted_job_left_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "CKP-1_1.ckpt")
    write(tmp_path / "CKP-1_2.ckpt").rename(tmp_path / "CKP-1_2.ckpt.replaced")
    for name in ("CKP-1_3.ckpt.saving", "CKP-1_4.ckpt.removing", "mine.saving", "CKP2-1_1.ckpt.saving", "CKP-x.saving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    sweep(tmp_path, "CKP")
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["CKP-1_1.ckpt", "CKP-1_2.ckpt", "mine.saving", "CKP2-1_1.ckpt.saving", "CKP-x.saving"]
    )


def test_checkpoint_of_a_later_format_is_refused_and_not_overlooked(tmp_path: Path) -> None:
    final = write(tmp_path / "a")
    text = (final / MANIFEST).read_text()
    (final / MANIFEST).write_text(text.replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CheckpointError, match="has format 3, this msrun reads up to 2"):
        find_checkpoints(tmp_path)


def entries(minutes: list[int]) -> list[tuple[Path, Manifest]]:
    return [(Path(str(i)), Manifest(Position(), 1, i, minute * 60.0)) for i, minute in enumerate(minutes)]


@given(st.integers(1, 9), st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(0, 5))
def test_newest_ones_stay_up_to_the_maximum(keep_max: int, minutes: list[int], per_minutes: int) -> None:
    found = entries(minutes)
    surplus = choose_surplus(found, keep_max, per_minutes)
    kept = [path for path, _ in found if path not in surplus]
    assert kept == [path for path, _ in found][-keep_max:]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).map(sorted), st.integers(1, 60))
def test_one_in_so_many_minutes_stays_and_the_newest_always(minutes: list[int], per_minutes: int) -> None:
    found = entries(minutes)
    surplus = choose_surplus(found, 0, per_minutes)
    kept = [manifest.saved_at / 60 for path, manifest in found if path not in surplus]
    assert kept[-1] == minutes[-1]
    assert all(later - earlier >= per_minutes for earlier, later in itertools.pairwise(kept[:-1]))
    for path in surplus:
        minute = minutes[int(path.name)]
        assert any(0 <= minute - earlier < per_minutes for earlier in kept), "an older one stands for it"


def test_everything_stays_when_nothing_limits_it() -> None:
    assert choose_surplus(entries([1, 2, 3]), 0, 0) == []
