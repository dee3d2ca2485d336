"""Worker processes of a dataset: how they are started, what they are sent, and where a dataset is."""

import multiprocessing
import os
import sys
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.data import GeneratorDataset, NumpySlicesDataset, config, vision, workers, write_idx
from msrun.data.config import Shard, find_world_shard
from msrun.data.mnist import read_idx
from msrun.data.order import Samples, Shuffled
from msrun.data.source import ColumnParts
from msrun.data.workers import StepLoader
from msrun.errors import DataError, UsageError
from msrun.runtime import world


@pytest.fixture(autouse=True)
def config_as_before():
    yield
    config.set_seed(0)
    config.set_num_parallel_workers(0)
    config.set_prefetch_size(2)
    config.set_multiprocessing_start_method("auto")


@pytest.fixture
def set_world(monkeypatch):
    """Sets a world, so that no process group is needed."""

    def set_to(rank, size):
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_group_size", size)):
            monkeypatch.setattr(world, name, lambda value=value: value)

    return set_to


@pytest.fixture
def forking():
    config.set_multiprocessing_start_method("fork")


def pairs(**parameters):
    return NumpySlicesDataset({"x": np.arange(12), "y": np.arange(12) * 10}, **parameters).batch(4)


def process_id(value):
    return value * 0 + os.getpid()


def used_workers(dataset):
    return sorted({int(pid) for x, _ in dataset for pid in x})


def test_the_largest_number_of_workers_in_a_pipeline_counts(forking):
    dataset = pairs(num_parallel_workers=1).map(process_id, "x", num_parallel_workers=2)
    first = used_workers(dataset)
    assert len(first) == 2
    assert os.getpid() not in first
    assert used_workers(dataset) == first, "workers live as long as the dataset"
    assert used_workers(pairs().map(process_id, "x")) == [os.getpid()]


def test_config_holds_for_datasets_that_do_not_say(forking):
    config.set_num_parallel_workers(1)
    config.set_prefetch_size(1)
    config.set_seed(5)
    assert os.getpid() not in used_workers(pairs().map(process_id, "x"))
    assert [x.tolist() for x, _ in pairs(num_parallel_workers=0)] == [x.tolist() for x, _ in pairs(seed=5)]
    assert (config.get_num_parallel_workers(), config.get_prefetch_size(), config.get_seed()) == (1, 1, 5)


def test_a_worker_without_shared_memory_says_so_instead_of_waiting_for_ever(forking, monkeypatch):
    def share_memory_(tensor):
        raise RuntimeError("unable to allocate shared memory: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", share_memory_)
    with pytest.raises(DataError, match=r"finds no shared memory for a step \(unable .* give the container more"):
        list(pairs(num_parallel_workers=1))


def test_arrays_of_numpy_and_text_come_out_of_workers_as_they_went_in(forking):
    data = {"x": np.arange(4), "name": np.array(["a", "b", "c", "d"])}
    dataset = NumpySlicesDataset(data, shuffle=False, num_parallel_workers=1).batch(2)
    steps = list(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
    assert [step["name"].tolist() for step in steps] == [["a", "b"], ["c", "d"]]
    assert [step["x"].tolist() for step in steps] == [[0, 1], [2, 3]]
    with pytest.raises(UsageError, match="column 'name' has dtype <U1, which torch cannot hold"):
        list(dataset)


def test_a_torch_dataset_and_what_it_draws_are_read_like_any_other():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.rand(2), index

    def epoch(batch_size):
        return torch.cat([x for x, _ in GeneratorDataset(Noisy(), shuffle=False).batch(batch_size)])

    assert torch.equal(epoch(2), epoch(3))
    assert GeneratorDataset(Noisy()).get_col_names() == ["column_0", "column_1"]
    assert len({*epoch(6).ravel().tolist()}) == 12


def test_items_may_be_dictionaries():
    items = [{"x": i, "y": 2.0 * i, "note": "no number"} for i in range(3)]
    assert GeneratorDataset(items).get_col_names() == ["x", "y", "note"]
    chosen = GeneratorDataset(items, ["y", "x"], shuffle=False).batch(3)
    assert [column.tolist() for (*columns,) in chosen for column in columns] == [[0, 2, 4], [0, 1, 2]]
    with pytest.raises(DataError, match="item 0 of list failed: KeyError: 'z'"):
        list(GeneratorDataset(items, ["z"], shuffle=False))


def test_a_worker_that_dies_is_one_line_and_the_next_loop_starts_others(forking, tmp_path):
    def dies_once(value):
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(3)
        return value

    dataset = pairs(num_parallel_workers=1).map(dies_once, "x")
    with pytest.raises(DataError, match=r"DataLoader worker .* use fewer num_parallel_workers") as caught:
        list(dataset)
    assert "\n" not in str(caught.value)
    assert len(list(dataset)) == 3


def test_a_failing_item_is_named_with_the_line_that_raised():
    class Failing:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return 1 // (index - 2)

    words = r"test_data_workers.py:\d+: GeneratorDataset: item 2 of Failing failed: ZeroDivisionError"
    with pytest.raises(DataError, match=words):
        list(GeneratorDataset(Failing(), "x", shuffle=False))


def test_state_says_where_the_loop_is():
    dataset = pairs(seed=2)
    assert dataset.state_dict() == {**STATE, "step": 0, "seed": 2}
    steps = iter(dataset)
    seen = []
    for _ in range(3):
        next(steps)
        seen.append((dataset.state_dict()["epoch"], dataset.state_dict()["step"]))
    assert seen == [(0, 1), (0, 2), (1, 0)], "behind the last step the next epoch begins"
    first, second = iter(dataset), iter(dataset)
    next(first)
    next(second)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["step"]) == (2, 1), "of two loops the later one counts"
    iterator = pairs(seed=2).create_dict_iterator(num_epochs=2)
    iterator.load_state_dict({**STATE, "epoch": 1, "seed": 2})
    assert [len(list(iterator)), len(list(iterator))] == [2, 0]
    assert iterator.state_dict()["epoch"] == 2


STATE = {"epoch": 0, "step": 1, "seed": 0, "global_batch_size": 4, "steps_per_epoch": 3}


def test_a_state_fits_any_number_of_ranks_with_the_same_global_batch():
    steps = iter(pairs(seed=2))
    next(steps)
    halves = []
    for shard_id in range(2):
        half = NumpySlicesDataset(np.arange(12), seed=2, num_shards=2, shard_id=shard_id).batch(2)
        half.load_state_dict({**STATE, "seed": 2})
        halves.append(next(iter(half))[0])
    assert torch.cat(halves).tolist() == next(steps)[0].tolist()


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (
            lambda: pairs().load_state_dict({**STATE, "seed": 1}),
            "seed=1, this dataset has seed=0; make it with the same",
        ),
        (
            lambda: pairs().load_state_dict({**STATE, "global_batch_size": 8}),
            "step 1 of an epoch with global_batch_size=8, here it is 4; make it of the",
        ),
        (lambda: pairs().load_state_dict({**STATE, "steps_per_epoch": 5}), "with steps_per_epoch=5, here it is 3"),
        (lambda: pairs().load_state_dict({**STATE, "step": "one"}), "step='one'; it must be an integer of at least 0"),
        (lambda: pairs().load_state_dict({**STATE, "epoch": None}), "epoch=None"),
        (
            lambda: pairs().load_state_dict({"global_batch_size": 4}),
            "no epoch, step, seed, steps_per_epoch; give what state_dict",
        ),
        (lambda: pairs(num_parallel_workers=-1), "num_parallel_workers=-1; it must be an integer of at least 0"),
        (lambda: pairs().map(process_id, num_parallel_workers=True), "num_parallel_workers=True"),
        (lambda: pairs().map(process_id, python_multiprocessing=False), "workers are always processes"),
        (lambda: config.set_multiprocessing_start_method("frok"), "'frok' (did you mean fork?); it must be one of"),
        (lambda: config.set_prefetch_size(0), "prefetch_size=0; it must be an integer of at least 1"),
        (lambda: config.set_seed(-1), "seed=-1"),
    ],
)
def test_states_of_other_datasets_and_settings_without_a_meaning_are_refused(misuse, words):
    with pytest.raises(UsageError) as caught:
        misuse()
    assert words in str(caught.value)


class OfScript:
    """Stands for a class of the script."""


OfScript.__module__ = "__main__"
inside_of_script = (lambda: lambda: 0)()
inside_of_script.__module__ = "__main__"


@pytest.mark.parametrize(
    ("reader", "obstacle", "is_of_script"),
    [
        ([process_id, np.zeros(3)], "", False),
        ([multiprocessing.get_context("forkserver").Lock(), torch.ones(2)], "", False),
        ([OfScript()], "OfScript, which only the script has,", True),
        ([lambda: 0], "<lambda>", False),
        ([inside_of_script], "<lambda>", False),  # which no process finds, whether it imports the script or not
        ([threading.Lock()], "lock", False),
    ],
)
def test_what_a_worker_cannot_get_is_found_before_it_starts(reader, obstacle, is_of_script):
    needs = workers.Needs(reader)
    assert obstacle in needs.obstacle
    assert bool(needs.obstacle) is bool(obstacle)
    assert needs.is_of_script is is_of_script
    assert (process_id.__module__ in needs.modules) is (process_id in reader)


@pytest.mark.parametrize(
    ("script", "expected"),
    [('if __name__ == "__main__":\n    run()\n', True), ("run()\n", False), ("if (\n", False), (None, False)],
)
def test_a_script_is_imported_only_if_it_looks_at_its_name(tmp_path, monkeypatch, script, expected):
    main = types.ModuleType("__main__")
    if script is not None:
        (tmp_path / "script.py").write_text(script)
        main.__file__ = str(tmp_path / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert workers.script_can_be_imported() is expected


def send_rows(columns, queue):
    queue.put([column.take(np.array([2, 0])).tolist() for column in columns])


@pytest.mark.slow
def test_columns_are_sent_as_places_in_files_and_shared_memory(tmp_path):
    write_idx(tmp_path / "bytes", np.arange(12, dtype=np.uint8).reshape(4, 3))
    mapped = read_idx(tmp_path / "bytes", should_map=True)[:, ::-1]
    arrays = [mapped, np.arange(12.0).reshape(3, 4).T, np.array(["a", "b", "c", "d"])]
    columns = [ColumnParts([array]) for array in arrays]
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    worker = context.Process(target=send_rows, args=(columns, queue))
    worker.start()
    assert queue.get() == [array[[2, 0]].tolist() for array in arrays]
    worker.join()
    assert columns[0]._shared[0].path == str(tmp_path / "bytes")
    assert columns[1]._shared[0].is_shared()
    assert columns[2]._shared == {}


def test_pinned_memory_is_asked_for_beside_an_accelerator(set_world, monkeypatch):
    asked = []

    def build(reader, num_workers, *, should_pin):
        asked.append(should_pin)
        return StepLoader(reader, num_workers, should_pin=False)

    monkeypatch.setattr("msrun.data.dataset.StepLoader", build)
    list(pairs())
    set_world(0, 1)
    for device in ("cpu", "cuda:0"):
        monkeypatch.setattr(world, "device", lambda device=device: torch.device(device))
        list(pairs())
    assert asked == [False, False, True]


# -- the sharding law: the shards' batches, put together, are the batches of one process ------------------------------

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
