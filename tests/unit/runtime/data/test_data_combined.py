"""Datasets made of others: their columns, their samples, parts of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from msrun.errors import UsageError
from msrun.runtime.data import NumpySlicesDataset, vision
from msrun.runtime.data.torch_loaders import begin_epoch


def numbered(first, count, name="x", **parameters):
    return NumpySlicesDataset({name: np.arange(first, first + count)}, shuffle=False, **parameters)


def values(dataset):
    return [[column.tolist() for column in step] for step in dataset]


def test_columns_are_chosen_ordered_and_renamed():
    dataset = NumpySlicesDataset({"a": [1, 2], "b": [3, 4], "c": [5, 6]}, shuffle=False)
    chosen = dataset.map(lambda b: b + 1, "b").project(["c", "b"]).rename("b", "label")
    assert chosen.get_col_names() == ["c", "label"]
    assert values(chosen) == [[5, 4], [6, 5]]
    assert values(chosen.map(lambda x: -x, "label")) == [[5, -4], [6, -5]]


def test_a_map_may_make_more_or_fewer_columns():
    dataset = NumpySlicesDataset({"a": [1, 2], "b": [3, 4], "c": [5, 6]}, shuffle=False)
    halves = dataset.map(lambda b: (b - 1, b + 1), "b", output_columns=["low", "high"])
    assert halves.get_col_names() == ["a", "low", "high", "c"]
    assert values(halves) == [[1, 2, 4, 5], [2, 3, 5, 6]]
    joined = dataset.map(lambda c, a: c * 10 + a, ["c", "a"], "ca")
    assert joined.get_col_names() == ["ca", "b"]
    assert values(joined.batch(2)) == [[[51, 62], [3, 4]]]


def test_zipped_datasets_read_the_same_row_of_each():
    left = numbered(0, 6).map(lambda x: x * 2)
    both = left.zip(numbered(100, 5, "y"))
    assert both.get_col_names() == ["x", "y"]
    assert values(both.batch(5)) == [[[0, 2, 4, 6, 8], [100, 101, 102, 103, 104]]]
    shuffled = NumpySlicesDataset({"x": np.arange(6)}, seed=3).zip([numbered(0, 6, "y"), numbered(0, 6, "z")])
    assert all(x == y == z for x, y, z in shuffled)


def test_joined_datasets_have_all_samples_each_with_its_own_maps():
    joined = numbered(0, 3).map(lambda x: -x) + numbered(10, 2)
    assert values(joined) == [[0], [-1], [-2], [10], [11]]
    order = NumpySlicesDataset({"x": np.arange(40)}, seed=1).concat([numbered(40, 9), numbered(49, 11)]).batch(20)
    first, second = values(order), values(order)
    assert first != second
    assert sorted(x for (step,) in first for x in step) == list(range(60))


def test_random_transforms_of_a_joined_dataset_stay_those_of_its_samples():
    images = np.arange(40 * 6, dtype=np.uint8).reshape(40, 1, 6, 1)
    flipped = NumpySlicesDataset({"x": images}, shuffle=False).map(vision.RandomHorizontalFlip())
    alone = values(flipped.batch(40))
    assert values((flipped + flipped).batch(40)) == [alone[0], alone[0]]


@pytest.mark.parametrize("sizes", [[9, 3], [0.75, 0.25]])
def test_parts_of_a_split_are_disjoint_and_complete(sizes):
    train, validate = (values(part) for part in numbered(0, 12).split(sizes))
    assert (len(train), len(validate)) == (9, 3)
    assert sorted(train + validate) == [[i] for i in range(12)]
    assert validate != [[9], [10], [11]]
    assert values(numbered(0, 12).split(sizes, randomize=False)[1]) == [[9], [10], [11]]
    assert values(numbered(0, 12).split(sizes)[0]) == train, "the same for every process"


def test_a_combined_dataset_is_read_in_parts_like_any_other():
    data = [numbered(0, 4, num_shards=2, shard_id=shard) + numbered(4, 4) for shard in range(2)]
    assert [values(part.batch(2))[0] for part in data] == [[[0, 1]], [[2, 3]]]


def test_shapes_and_types_are_those_of_a_step():
    dataset = NumpySlicesDataset({"x": np.zeros((8, 3), np.float32), "y": np.zeros(8, np.int32)}).batch(4)
    assert dataset.output_shapes() == [[4, 3], [4]]
    assert dataset.output_types() == [np.float32, np.int32]
    assert dataset.state_dict()["epoch"] == 0


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda: numbered(0, 3).batch(2).zip(numbered(0, 3, "y")), "zip: after shuffle, take, skip, repeat or batch"),
        (lambda: numbered(0, 3).concat(numbered(0, 3).take(1)), "concat: after shuffle, take"),
        (lambda: numbered(0, 3).zip(numbered(0, 3)), "more than one dataset has a column 'x'; rename it"),
        (lambda: numbered(0, 3) + numbered(0, 3, "y"), "concat: columns y beside x; rename"),
        (lambda: numbered(0, 3).rename("x", ["a", "b"]), "for 1 of x; give one name for each"),
        (lambda: numbered(0, 3).project("z"), "project: no column 'z'; there are x"),
        (lambda: numbered(0, 3).split([1, 1]), "split: sizes=[1, 1]; give integers that add up to 3"),
        (lambda: numbered(0, 3).split([0.5, 0.4]), "or shares that add up to 1"),
        (lambda: numbered(0, 3).split(3.0), "split: sizes=3.0"),
        (lambda: numbered(0, 3).map(abs, "x", []), "map: output_columns=[]; name at least one"),
        (lambda: list(numbered(0, 3).map(abs, "x", ["a", "b"])), "abs returned 1 value, not 2"),
        (lambda: numbered(0, 3).batch(4).output_shapes(), "the dataset has no step"),
    ],
)
def test_misuse_is_refused_in_one_line(misuse, words):
    with pytest.raises(UsageError) as caught:
        misuse()
    assert words in str(caught.value)


class Streamed(IterableDataset):
    epoch = None

    def __iter__(self):
        return iter(())

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_samplers_and_datasets_of_a_torch_loader_are_told_the_epoch():
    data = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(data, 2, 0)
    begin_epoch(DataLoader(data, 2, sampler=sampler), 3)
    assert sampler.epoch == 3
    inner = DistributedSampler(data, 2, 0)
    begin_epoch(DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(inner, 2, drop_last=True)), 4)
    assert inner.epoch == 4
    streamed = Streamed()
    begin_epoch(DataLoader(streamed), 5)
    assert streamed.epoch == 5
    begin_epoch([1, 2], 6)


def test_a_torch_dataset_has_no_batches():
    with pytest.raises(UsageError, match=r"TensorDataset is a torch Dataset, .* GeneratorDataset\(TensorDataset"):
        begin_epoch(TensorDataset(torch.arange(8)), 0)
