"""The sharding law: the shards' batches, put together, are the batches of one process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.data import NumpySlicesDataset, vision
from msrun.data.config import Shard, find_world_shard
from msrun.data.order import Samples, Shuffled
from msrun.errors import UsageError

CHANGES_BEFORE_BATCH = [
    lambda dataset: dataset.shuffle(4),
    lambda dataset: dataset.shuffle(1000),
    lambda dataset: dataset.repeat(2),
    lambda dataset: dataset.skip(3),
    lambda dataset: dataset.take(11),
]
CHANGES_AFTER_BATCH = [
    lambda dataset: dataset.shuffle(2),
    lambda dataset: dataset.repeat(3),
    lambda dataset: dataset.take(2),
]


def numbers(num_samples, **parameters):
    return NumpySlicesDataset({"id": np.arange(num_samples)}, **parameters)


def images(num_samples, **parameters):
    pixels = np.arange(num_samples * 12, dtype=np.float32).reshape(num_samples, 2, 3, 2)
    dataset = NumpySlicesDataset({"image": pixels, "id": np.arange(num_samples)}, **parameters)
    return dataset.map([vision.RandomCrop((2, 2), 1), vision.RandomHorizontalFlip()], "image")


def epochs(dataset, num_epochs):
    return [list(dataset) for _ in range(num_epochs)]


@given(
    num_samples=st.integers(1, 70),
    batch_size=st.integers(1, 5),
    num_shards=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    before=st.lists(st.sampled_from(CHANGES_BEFORE_BATCH), max_size=2),
    after=st.lists(st.sampled_from(CHANGES_AFTER_BATCH), max_size=2),
    make=st.sampled_from([numbers, images]),
)
def test_shards_together_read_global_batches(num_samples, batch_size, num_shards, seed, shuffle, before, after, make):
    def build(local_batch, **parameters):
        dataset = make(num_samples, seed=seed, shuffle=shuffle, **parameters)
        for change in before:
            dataset = change(dataset)
        dataset = dataset.batch(local_batch)
        for change in after:
            dataset = change(dataset)
        return dataset

    whole = build(batch_size * num_shards, num_shards=1)
    shards = [build(batch_size, num_shards=num_shards, shard_id=r) for r in range(num_shards)]
    assert {len(shard) for shard in shards} == {len(whole)}
    if not before and not after:
        assert len(whole) == num_samples // (batch_size * num_shards)
    if len(whole) == 0:
        return
    expected = epochs(whole, 3)
    found = [epochs(shard, 3) for shard in shards]
    for epoch in range(3):
        assert len(expected[epoch]) == len(whole)
        for step in range(len(whole)):
            for column, global_batch in enumerate(expected[epoch][step]):
                parts = [found[r][epoch][step][column] for r in range(num_shards)]
                assert torch.equal(torch.cat(parts), global_batch)


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 6), num_shards=st.integers(1, 4))
def test_a_kept_rest_is_shared_evenly_or_refused(num_samples, batch_size, num_shards):
    remainder = num_samples % (batch_size * num_shards)
    shards = [numbers(num_samples, num_shards=num_shards, shard_id=r) for r in range(num_shards)]
    if remainder % num_shards:
        with pytest.raises(UsageError, match=f"last batch has {remainder} samples, which {num_shards} shards"):
            shards[0].batch(batch_size, drop_remainder=False)
        return
    steps = [list(shard.batch(batch_size, drop_remainder=False)) for shard in shards]
    read = torch.cat([torch.cat([ids for (ids,) in step]) for step in zip(*(map(list, s) for s in steps), strict=True)])
    assert sorted(read.tolist()) == list(range(num_samples))
    whole = list(numbers(num_samples, num_shards=1).batch(batch_size * num_shards, drop_remainder=False))
    assert torch.equal(read, torch.cat([ids for (ids,) in whole]))


@given(num_samples=st.integers(4, 40), num_shards=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_without_batch_the_shards_take_turns(num_samples, num_shards):
    whole = [int(sample) for (sample,) in numbers(num_samples, num_shards=1)]
    parts = [[int(s) for (s,) in numbers(num_samples, num_shards=num_shards, shard_id=r)] for r in range(num_shards)]
    num_steps = num_samples // num_shards
    assert [len(part) for part in parts] == [num_steps] * num_shards
    assert [part[step] for step in range(num_steps) for part in parts] == whole[: num_steps * num_shards]


def test_the_initialised_world_is_the_default_shard(set_world):
    whole = list(numbers(16).batch(8))
    for rank in range(4):
        set_world(rank, 4)
        assert find_world_shard() == Shard(4, rank)
        for (part,), (global_batch,) in zip(numbers(16).batch(2), whole, strict=True):
            assert torch.equal(part, global_batch[2 * rank : 2 * rank + 2])


def test_a_dataset_made_before_init_follows_the_world_when_it_is_read(set_world):
    dataset, with_rest = numbers(16).batch(2), numbers(9).batch(2, drop_remainder=False)
    assert len(dataset) == 8
    set_world(3, 4)
    assert len(dataset) == 2
    assert len(numbers(16, num_shards=1).batch(2)) == 8, "one shard reads everything on every rank"
    with pytest.raises(UsageError, match="last batch has 1 samples, which 4 shards cannot share evenly"):
        list(with_rest)


def test_too_few_samples_for_one_step_are_an_error_not_an_empty_epoch():
    dataset = numbers(7, num_shards=4, shard_id=0).batch(2)
    assert len(dataset) == 0
    with pytest.raises(UsageError, match="no step: too few samples for a batch of 2 on each of 4 shards"):
        iter(dataset)


@given(num_samples=st.integers(1, 50), buffer_size=st.integers(2, 60), seed=st.integers(0, 99))
def test_a_shuffle_buffer_hands_out_everything_and_nothing_too_early(num_samples, buffer_size, seed):
    order = Shuffled(Samples(num_samples, seed, is_shuffled=False), buffer_size, seed, depth=1)
    handed_out = order.draw(0, 1)[:, 1]
    assert sorted(handed_out) == list(range(num_samples))
    assert all(item < place + buffer_size for place, item in enumerate(handed_out))


def test_permutations_are_pinned_for_good():
    draws = [Samples(8, 0, is_shuffled=True).draw(pass_number, 1)[:, 1].tolist() for pass_number in range(2)]
    assert draws == [[6, 3, 5, 0, 7, 2, 1, 4], [3, 1, 0, 4, 5, 6, 7, 2]]
