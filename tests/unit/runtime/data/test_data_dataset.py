"""The pipeline: epochs, iterators, map, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrun.errors import UsageError
from msrun.runtime.data import NumpySlicesDataset, transforms, vision


def pairs(num_samples=12, **parameters):
    data = {"image": np.arange(num_samples, dtype=np.uint8), "label": np.arange(num_samples) * 10}
    return NumpySlicesDataset(data, **parameters)


def first_column(steps):
    return [step[0].tolist() for step in steps]


def test_every_epoch_has_its_own_permutation_that_the_seed_repeats():
    dataset = pairs(seed=3).batch(4)
    three_epochs = [first_column(dataset) for _ in range(3)]
    assert len({str(epoch) for epoch in three_epochs}) == 3
    assert [first_column(again) for again in [pairs(seed=3).batch(4)] for _ in range(3)] == three_epochs
    assert first_column(pairs(seed=4).batch(4)) != three_epochs[0]


def test_set_epoch_resumes_where_an_earlier_run_was():
    dataset = pairs().batch(4)
    second = [first_column(dataset) for _ in range(2)][1]
    resumed = pairs().batch(4)
    resumed.set_epoch(1)
    assert first_column(resumed) == second


def test_unshuffled_data_comes_in_file_order_every_epoch():
    dataset = pairs(shuffle=False).batch(5)
    assert first_column(dataset) == first_column(dataset) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert first_column(pairs(shuffle=False).batch(5, drop_remainder=False))[-1] == [10, 11]


def test_an_epoch_counts_when_its_loop_starts():
    dataset, again = pairs().batch(12), pairs().batch(12)
    first, second = iter(dataset), iter(dataset)
    assert first_column(second) != first_column(first)
    next(iter(again))
    again.set_epoch(0)
    assert first_column(again) == first_column(pairs().batch(12))


def test_changing_the_pipeline_leaves_the_old_dataset_as_it_was():
    dataset = pairs(shuffle=False)
    changed = dataset.map(lambda image: image + 1, "image").batch(3).repeat(2)
    assert len(dataset) == 12
    assert next(iter(dataset))[0].item() == 0
    assert len(changed) == 8
    assert (dataset.get_batch_size(), changed.get_batch_size()) == (1, 3)
    assert changed.get_col_names() == ["image", "label"]


def test_columns_stay_in_step_and_keep_their_dtypes():
    for images, labels in pairs().batch(4):
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert (images * 10 == labels).all()


def test_repeat_draws_a_new_permutation_for_each_pass():
    steps = first_column(pairs().batch(12).repeat(2))
    assert sorted(steps[0]) == sorted(steps[1]) == list(range(12))
    assert steps[0] != steps[1]
    joined = first_column(pairs(5).repeat(2).batch(10))
    assert sorted(joined[0]) == sorted([*range(5), *range(5)])


def test_functions_get_samples_before_batch_and_batches_after_it():
    shapes = []

    def note(value):
        shapes.append(value.shape)
        return value

    list(pairs().map(note, "image").batch(6))
    assert shapes == [()] * 12
    shapes.clear()
    list(pairs().batch(6).map(note, "image"))
    assert shapes == [(6,)] * 2


def test_functions_of_several_columns_return_as_many():
    dataset = pairs(shuffle=False).map(lambda image, label: (image + 1, label - 1), ["image", "label"])
    images, labels = next(iter(dataset.batch(3)))
    assert (images.tolist(), labels.tolist()) == ([1, 2, 3], [-1, 9, 19])
    swapped = pairs(shuffle=False).batch(2).map(lambda label, image: (label + image, image), ["label", "image"])
    assert next(iter(swapped))[1].tolist() == [0, 11]


def test_any_object_with_apply_batch_is_a_transform():
    class Doubler:
        def apply_batch(self, batch):
            return batch * 2

    dataset = pairs(shuffle=False).map([Doubler(), lambda image: image + 1]).batch(3)
    assert next(iter(dataset))[0].tolist() == [1, 3, 5]


def test_results_that_are_not_plain_arrays_still_become_tensors():
    dataset = pairs(shuffle=False).batch(2).map(lambda _: np.broadcast_to(np.array([1.0], ">f4"), (2, 3)))
    images, _ = next(iter(dataset))
    assert (images.dtype, images.shape) == (torch.float32, (2, 3))
    images += 1


def test_random_transforms_differ_between_epochs_and_passes_but_not_between_runs():
    def build():
        data = np.arange(40 * 8, dtype=np.uint8).reshape(40, 1, 8, 1)
        dataset = NumpySlicesDataset({"image": data}, shuffle=False)
        return dataset.map(vision.RandomHorizontalFlip(0.5), "image").batch(40).repeat(2)

    def flips(dataset):
        return [(images[:, 0, 0, 0] > images[:, 0, 7, 0]).tolist() for (images,) in dataset]

    dataset = build()
    drawn = flips(dataset) + flips(dataset)
    assert len({str(draw) for draw in drawn}) == 4
    assert flips(build()) == drawn[:2]


@pytest.mark.parametrize("is_one_map", [True, False])
def test_two_random_transforms_do_not_share_their_draws(is_one_map):
    dataset = NumpySlicesDataset({"image": np.arange(64 * 8).reshape(64, 1, 8, 1)}, shuffle=False)
    flip = vision.RandomHorizontalFlip(0.5)
    twice = dataset.map([flip, flip]) if is_one_map else dataset.map(flip).map(flip)
    ((images,),) = twice.batch(64)
    is_mirrored = images[:, 0, 0, 0] > images[:, 0, 7, 0]
    assert 10 < is_mirrored.sum() < 54


def test_a_tuple_iterator_starts_an_epoch_per_loop_and_ends_after_num_epochs():
    expected = [first_column(dataset) for dataset in [pairs().batch(4)] for _ in range(2)]
    iterator = pairs().batch(4).create_tuple_iterator(num_epochs=2)
    assert [first_column(iterator) for _ in range(3)] == [*expected, []]
    assert next(pairs().batch(4).create_tuple_iterator())[0].tolist() == expected[0][0]


def test_iterators_give_numpy_and_dictionaries_on_request():
    (step,) = pairs(shuffle=False).batch(12).create_dict_iterator(num_epochs=1, output_numpy=True)
    assert list(step) == ["image", "label"]
    assert isinstance(step["label"], np.ndarray)
    images, _ = next(pairs().batch(2).create_tuple_iterator(output_numpy=True))
    assert isinstance(images, np.ndarray)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.batch(0), "batch_size=0; it must be an integer of at least 1"),
        (lambda d: d.batch(2.5), "batch_size=2.5; it must be an integer"),
        (lambda d: d.batch(2).batch(2), "batched already; call batch once"),
        (lambda d: d.shuffle(1), "buffer_size=1; it must be an integer of at least 2"),
        (lambda d: d.repeat(-1), "count=-1; it must be an integer of at least 1"),
        (lambda d: d.skip(-1), "count=-1; it must be an integer of at least 0"),
        (lambda d: d.set_epoch(-1), "epoch=-1"),
        (lambda d: d.create_tuple_iterator(0), "num_epochs=0"),
        (lambda d: d.map(abs, "imgae"), "no column 'imgae' (did you mean image?); there are image, label"),
        (lambda d: d.map(abs, []), "name at least one column, each once"),
        (lambda d: d.map(abs, ["image", "image"]), "name at least one column, each once"),
        (lambda d: d.map([], "image"), "the list of operations is empty"),
        (lambda d: d.map(3, "image"), "3 is not callable"),
        (lambda d: d.map(vision.HWC2CHW, "image"), "HWC2CHW is a class; pass an object, HWC2CHW(...)"),
        (lambda d: d.map(transforms.OneHot(3), ["image", "label"]), "OneHot works on one column, not 2"),
        (
            lambda d: list(d.map(lambda i, b: i, ["image", "label"])),
            "returned 1 value, not 2; return one value for each output column",
        ),
        (lambda d: list(d.map(lambda i: np.zeros(i), "image").batch(2)), "samples of different shapes"),
        (lambda d: list(d.batch(2).map(lambda i: i[:1], "image")), "made shape (1,) of a batch of 2 samples"),
        (lambda d: list(d.batch(2).map(lambda i: i.sum(), "image")), "made shape () of a batch of 2 samples"),
        (lambda d: list(d.map(lambda i: "text", "image").batch(2)), "column 'image' has dtype <U4, which torch cannot"),
    ],
)
def test_misuse_is_refused_in_one_line(change, words):
    with pytest.raises(UsageError) as caught:
        change(pairs(shuffle=False))
    assert words in str(caught.value)
