"""Datasets of the user's own arrays and objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrun.errors import UsageError
from msrun.runtime.data import GeneratorDataset, NumpySlicesDataset


class Squares:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return np.full((2,), index, np.float32), index * index


def test_items_of_an_object_are_batched_and_sharded():
    for shard_id in range(2):
        dataset = GeneratorDataset(Squares(), ["x", "y"], shuffle=False, num_shards=2, shard_id=shard_id).batch(2)
        x, y = next(iter(dataset))
        assert (x.dtype, x.shape, y.dtype) == (torch.float32, (2, 2), torch.int64)
        assert y.tolist() == [[0, 1], [4, 9]][shard_id]


def test_a_plain_list_is_a_source_of_one_column():
    assert [value.item() for (value,) in GeneratorDataset([3.0, 4.0], "x", shuffle=False)] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("data", "names", "expected"),
    [
        (np.arange(3), None, ["column_0"]),
        ((np.arange(3), np.ones((3, 2))), None, ["column_0", "column_1"]),
        ((np.arange(3), [4, 5, 6]), ["a", "b"], ["a", "b"]),
        (torch.arange(3), "a", ["a"]),
        ({"x": np.arange(3)}, None, ["x"]),
    ],
)
def test_arrays_are_named_columns(data, names, expected):
    dataset = NumpySlicesDataset(data, names)
    assert (dataset.get_col_names(), len(dataset)) == (expected, 3)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda: GeneratorDataset(iter([1]), "x"), "list_iterator has no __getitem__ and __len__"),
        (lambda: GeneratorDataset([1], []), "give at least one name, each once"),
        (lambda: list(GeneratorDataset([(1, 2)], "x")), "item 0 has 2 values for 1 columns (x)"),
        (
            lambda: list(GeneratorDataset([np.zeros(1), np.zeros(2)], "x").batch(2)),
            "samples of different shapes cannot form a batch",
        ),
        (lambda: NumpySlicesDataset({"x": [1, 2], "y": [1]}), "columns have lengths {'x': 2, 'y': 1}"),
        (lambda: NumpySlicesDataset({}), "at least one column"),
        (lambda: NumpySlicesDataset({"x": [1]}, "x"), "its keys are the names"),
        (lambda: NumpySlicesDataset(([1], [2]), "x"), "for 2 arrays; give one name per array"),
        (lambda: NumpySlicesDataset(3), "the first axis must be the samples"),
    ],
)
def test_data_that_cannot_be_columns_is_refused(misuse, words):
    with pytest.raises(UsageError) as caught:
        misuse()
    assert words in str(caught.value)
