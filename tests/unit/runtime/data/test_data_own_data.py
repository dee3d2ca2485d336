"""Datasets of the user's own arrays and objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrun.errors import DataError, UsageError
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


STARTS: list[int] = []


def count_up():
    STARTS.append(len(STARTS))
    for number in range(6):
        yield np.float32(number), number + 100 * STARTS[-1]


class Countdown:
    def __iter__(self):
        return iter([(3.0, 3), (2.0, 2), (1.0, 1)])


def test_a_generator_function_is_run_through_once_for_each_epoch():
    STARTS.clear()
    dataset = GeneratorDataset(count_up, ["x", "y"]).map(lambda x: 2 * x, "x", num_parallel_workers=2).batch(3)
    assert dataset.get_dataset_size() == 2
    assert [[y.tolist() for _, y in dataset] for _ in range(2)] == [
        [[0, 1, 2], [3, 4, 5]],
        [[100, 101, 102], [103, 104, 105]],
    ]
    assert len(STARTS) == 2
    assert next(iter(dataset))[0].tolist() == [0, 2, 4]
    limited = GeneratorDataset(count_up, ["x", "y"], num_samples=2, num_shards=2, shard_id=1)
    assert [x.item() for x, _ in limited] == [1.0]


def test_an_iterable_is_a_source_and_an_iterator_only_for_one_epoch():
    assert [y.item() for _, y in GeneratorDataset(Countdown(), ["x", "y"])] == [3, 2, 1]
    once = GeneratorDataset(iter([(1.0,), (2.0,)]), "x")
    assert [x.item() for (x,) in once] == [1.0, 2.0]
    with pytest.raises(DataError, match="0 samples in epoch 2, 2 in the first; give the function that returns"):
        list(once)


def test_what_a_generator_function_raises_is_told_with_its_line():
    def broken():
        yield 1.0
        raise ValueError("no such row")

    with pytest.raises(DataError, match="the samples of broken failed: ValueError: no such row"):
        GeneratorDataset(broken, "x")


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
        (lambda: GeneratorDataset(5, "x"), "int has no __getitem__ and __len__, nor __iter__"),
        (lambda: GeneratorDataset(count_up, "x", shuffle=True), "function gives samples in its own order only"),
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
