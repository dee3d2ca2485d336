"""Click logs in Criteo's format: what is read of a line, and what a damaged one is called."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import DataError, UsageError
from msrun.runtime.data import CriteoDataset, write_clicks
from msrun.runtime.data.criteo import LineFile


def line(label: str = "1", integers: list[str] | None = None, categories: list[str] | None = None) -> str:
    return "\t".join([label, *(integers or ["3"] * 13), *(categories or ["0000000a"] * 26)])


def read(path: Path, hash_size: int = 100) -> list[torch.Tensor]:
    data = CriteoDataset(path, shuffle=False, hash_size=hash_size, num_shards=1)
    return [torch.stack(column) for column in zip(*data, strict=True)]


def test_integers_are_logarithms_and_categories_rows_of_one_table(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    integers = ["0", "", "-2", "6", *["1"] * 9]
    categories = ["", "00000000", "ffffffff", *["00000063"] * 23]
    path.write_text(line("0", integers, categories) + "\n" + line() + "\n")
    dense, ids, label = read(path)
    assert label.tolist() == [0, 1]
    assert (dense.dtype, ids.dtype, label.dtype) == (torch.float32, torch.int64, torch.float32)
    assert dense[0].tolist() == pytest.approx([0, 0, 0, math.log(7), *[math.log(2)] * 9])
    assert ids[0].tolist() == [0, 101, 200 + 1 + 0xFFFFFFFF % 99, *(100 * c + 1 for c in range(3, 26))]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 200), ends=st.booleans(), is_dos=st.booleans())
def test_every_line_is_read_by_its_number(
    tmp_path_factory: pytest.TempPathFactory, count: int, ends: bool, is_dos: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    texts = [f"line {number}" * (number % 5 + 1) for number in range(count)]
    end = "\r\n" if is_dos else "\n"
    path.write_bytes((end.join(texts) + (end if ends else "")).encode())
    file = LineFile(path)
    assert file.num_lines == count
    assert [file.read_line(number).decode() for number in range(count)] == texts


def test_ranks_read_the_global_batches_of_one_process(tmp_path: Path) -> None:
    folder = write_clicks(tmp_path, num_train=100, num_test=10)
    whole = list(CriteoDataset(folder, num_shards=1, seed=3).batch(32))
    parts = [list(CriteoDataset(folder, num_shards=4, shard_id=rank, seed=3).batch(8)) for rank in range(4)]
    assert len(whole) == 3
    for step, columns in enumerate(whole):
        for index, column in enumerate(columns):
            assert torch.equal(column, torch.cat([part[step][index] for part in parts]))


def test_usage_chooses_files_of_a_folder(tmp_path: Path) -> None:
    write_clicks(tmp_path, num_train=40, num_test=10)
    sizes = {usage: len(CriteoDataset(tmp_path, usage, num_shards=1)) for usage in ("train", "test", "all")}
    assert sizes == {"train": 40, "test": 10, "all": 50}
    assert len(CriteoDataset(tmp_path / "test.txt", num_shards=1)) == 10


@pytest.mark.slow
def test_worker_processes_read_the_same(tmp_path: Path) -> None:
    folder = write_clicks(tmp_path, num_train=64, num_test=1)
    own, other = (CriteoDataset(folder, num_shards=1, num_parallel_workers=count).batch(16) for count in (0, 1))
    for mine, theirs in zip(own, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\t2", "line 2 has 2 columns; it must have 40: the label, 13 integers, 26 categories"),
        (line("2"), "line 2, column 1 holds b'2'; it must be 0 or 1"),
        (line(""), "line 2, column 1 holds b''; it must be 0 or 1"),
        (line(integers=["x", *["1"] * 12]), "line 2, column 2 holds b'x'; it must be a whole number"),
        (line(categories=[*["a"] * 25, "g0"]), "line 2, column 40 holds b'g0'; it must be hexadecimal digits"),
    ],
)
def test_damaged_line_is_named_with_its_column(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(f"{line()}\n{text}\n{line()}\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {words}"


def test_files_that_cannot_be_read_by_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "packed").write_bytes(gzip.compress(line().encode()))
    for name, words in (("empty", "is empty"), ("packed", r"unpack it \(gunzip -k\)"), ("missing", "no such file")):
        with pytest.raises(DataError, match=words):
            CriteoDataset(tmp_path / name)
    with pytest.raises(DataError, match=r"train\.txt is missing"):
        CriteoDataset(tmp_path)
    with pytest.raises(UsageError, match="hash_size"):
        CriteoDataset(tmp_path, hash_size=1)


def test_clicks_are_always_the_same_and_can_be_predicted(tmp_path: Path) -> None:
    """A logistic regression on the true features of the made-up log separates its classes."""
    first, second = write_clicks(tmp_path / "a", 2000, 500), write_clicks(tmp_path / "b", 2000, 500)
    assert (first / "train.txt").read_bytes() == (second / "train.txt").read_bytes()
    _, ids, label = read(first, hash_size=4000)
    rates: dict[int, list[float]] = {}
    for row, click in zip(ids[:, 0].tolist(), label.tolist(), strict=True):
        rates.setdefault(row, []).append(click)
    of_values = [np.mean(clicks) for clicks in rates.values() if len(clicks) > 200]
    assert 0.1 < label.mean() < 0.4
    assert max(of_values) - min(of_values) > 0.05, "values of a category differ in how often they are clicked"
