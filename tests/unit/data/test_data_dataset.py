"""Datasets: epochs, iterators, map, datasets made of others, the user's own data, and what is refused."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from msrun.data import GeneratorDataset, NumpySlicesDataset, transforms, vision
from msrun.data.order import SampleDraws
from msrun.data.transforms import OneHot, TypeCast
from msrun.errors import DataError, UsageError
from msrun.train.run_context import begin_epoch


def pairs(num_samples=12, **parameters):
    data = {"image": np.arange(num_samples, dtype=np.uint8), "label": np.arange(num_samples) * 10}
    return NumpySlicesDataset(data, **parameters)


def first_column(steps):
    return [step[0].tolist() for step in steps]


def test_every_epoch_has_its_own_permutation_that_the_seed_repeats():
    dataset = pairs(seed=3).batch(4)
    epochs = [list(dataset) for _ in range(3)]
    assert len({str(first_column(epoch)) for epoch in epochs}) == 3
    assert [first_column(again) for again in [pairs(seed=3).batch(4)] for _ in range(3)] == [*map(first_column, epochs)]
    assert first_column(pairs(seed=4).batch(4)) != first_column(epochs[0])
    for images, labels in epochs[0]:
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert (images * 10 == labels).all(), "columns stay in step"


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
    assert (len(dataset), len(changed)) == (12, 8)
    assert next(iter(dataset))[0].item() == 0
    assert (dataset.get_batch_size(), changed.get_batch_size()) == (1, 3)


def test_a_changed_dataset_begins_at_its_first_epoch():
    dataset = pairs(seed=3)
    assert len(list(dataset)) == 12
    assert first_column(dataset.batch(4)) == first_column(pairs(seed=3).batch(4))


def test_repeat_draws_a_new_permutation_for_each_pass():
    steps = first_column(pairs().batch(12).repeat(2))
    assert sorted(steps[0]) == sorted(steps[1]) == list(range(12))
    assert steps[0] != steps[1]
    joined = first_column(pairs(5).repeat(2).batch(10))
    assert sorted(joined[0]) == sorted([*range(5), *range(5)])


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
        (lambda d: list(d.map(lambda i, b: i, ["image", "label"])), "returned 1 value, not 2; return one value for"),
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


def numbered(first, count, name="x", **parameters):
    return NumpySlicesDataset({name: np.arange(first, first + count)}, shuffle=False, **parameters)


def values(dataset):
    return [[column.tolist() for column in step] for step in dataset]


def three_columns():
    return NumpySlicesDataset({"a": [1, 2], "b": [3, 4], "c": [5, 6]}, shuffle=False)


def test_columns_are_chosen_ordered_and_renamed():
    chosen = three_columns().map(lambda b: b + 1, "b").project(["c", "b"]).rename("b", "label")
    assert chosen.get_col_names() == ["c", "label"]
    assert values(chosen) == [[5, 4], [6, 5]]
    assert values(chosen.map(lambda x: -x, "label")) == [[5, -4], [6, -5]]


def test_a_map_may_make_more_or_fewer_columns():
    halves = three_columns().map(lambda b: (b - 1, b + 1), "b", output_columns=["low", "high"])
    assert halves.get_col_names() == ["a", "low", "high", "c"]
    assert values(halves) == [[1, 2, 4, 5], [2, 3, 5, 6]]
    joined = three_columns().map(lambda c, a: c * 10 + a, ["c", "a"], "ca")
    assert joined.get_col_names() == ["ca", "b"]
    assert values(joined.batch(2)) == [[[51, 62], [3, 4]]]


def test_zipped_datasets_read_the_same_row_of_each():
    both = numbered(0, 6).map(lambda x: x * 2).zip(numbered(100, 5, "y"))
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


class Streamed(IterableDataset):
    epoch = None

    def __iter__(self):
        return iter(())

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_samplers_and_datasets_of_a_torch_loader_are_told_the_epoch():
    data, streamed = TensorDataset(torch.arange(8)), Streamed()
    sampler = DistributedSampler(data, 2, 0)
    begin_epoch(DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=True)), 4)
    begin_epoch(DataLoader(streamed), 5)
    assert (sampler.epoch, streamed.epoch) == (4, 5)
    begin_epoch([1, 2], 6)


STARTS = []


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
    assert [value.item() for (value,) in GeneratorDataset([3.0, 4.0], "x", shuffle=False)] == [3.0, 4.0]
    once = GeneratorDataset(iter([(1.0,), (2.0,)]), "x")
    assert [x.item() for (x,) in once] == [1.0, 2.0]
    with pytest.raises(DataError, match="0 samples in epoch 2, 2 in the first; give the function that returns"):
        list(once)


def broken():
    yield 1.0
    raise ValueError("no such row")


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
        (lambda: GeneratorDataset(broken, "x"), "the samples of broken failed: ValueError: no such row"),
        (lambda: GeneratorDataset(count_up, "x", shuffle=True), "function gives samples in its own order only"),
        (lambda: GeneratorDataset([1], []), "give at least one name, each once"),
        (lambda: list(GeneratorDataset([(1, 2)], "x")), "item 0 has 2 values for 1 columns (x)"),
        (lambda: NumpySlicesDataset({"x": [1, 2], "y": [1]}), "columns have lengths {'x': 2, 'y': 1}"),
        (lambda: NumpySlicesDataset({}), "at least one column"),
        (lambda: NumpySlicesDataset({"x": [1]}, "x"), "its keys are the names"),
        (lambda: NumpySlicesDataset(([1], [2]), "x"), "for 2 arrays; give one name per array"),
        (lambda: NumpySlicesDataset(3), "the first axis must be the samples"),
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
def test_sources_and_columns_that_cannot_be_are_refused_in_one_line(misuse, words):
    with pytest.raises((UsageError, DataError)) as caught:
        misuse()
    assert words in str(caught.value)


# -- transforms: MindSpore's arithmetic in fp32 on batches and on single images, casts and one-hot labels -------------

BATCH = np.random.RandomState(0).randint(0, 256, (3, 4, 6, 2)).astype(np.uint8)
KEYS = np.array([[0, 4], [0, 9], [1, 4]])


def draws_of(num_samples, seed=0):
    return SampleDraws(seed, 0, np.stack([np.zeros(num_samples, np.int64), np.arange(num_samples)], axis=1))


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (vision.Rescale(1 / 255, 0), BATCH / 255),
        (vision.Rescale(2, -1), BATCH * 2.0 - 1),
        (vision.Normalize((0.5, 100), (2, 3)), (BATCH - np.array([0.5, 100])) / np.array([2, 3])),
        (vision.Normalize((0.1307,), (0.3081,)), (BATCH - 0.1307) / 0.3081),
    ],
)
def test_arithmetic_is_the_formula_in_float32(transform, expected):
    result = transform.apply_batch(BATCH)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(transform(BATCH[0]), result[0])


def test_normalize_takes_channel_first_images_when_told():
    transform = vision.Normalize((1, 2), (3, 4), is_hwc=False)
    expected = vision.Normalize((1, 2), (3, 4)).apply_batch(BATCH)
    np.testing.assert_array_equal(transform.apply_batch(BATCH.transpose(0, 3, 1, 2)), expected.transpose(0, 3, 1, 2))


def test_hwc2chw_moves_the_channel_and_keeps_the_dtype():
    result = vision.HWC2CHW().apply_batch(BATCH)
    assert (result.dtype, result.shape) == (np.uint8, (3, 2, 4, 6))
    assert result[1, 1, 2, 3] == BATCH[1, 2, 3, 1]
    assert vision.HWC2CHW()(BATCH[0]).shape == (2, 4, 6)


@pytest.mark.parametrize(
    ("size", "shape"), [((8, 3), (8, 3)), (2, (2, 3)), (8, (8, 12)), ([4, 6], (4, 6)), (np.int64(4), (4, 6))]
)
def test_resize_gives_the_asked_shape_and_keeps_integer_dtypes(size, shape):
    result = vision.Resize(size).apply_batch(BATCH)
    assert (result.dtype, result.shape) == (np.uint8, (3, *shape, 2))
    assert shape != (4, 6) or np.array_equal(result, BATCH)


def torch_resize(images, size, mode="bilinear"):
    planes = torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float32))
    how = {} if mode == "nearest" else {"align_corners": False}
    return interpolate(planes, size, mode=mode, **how).numpy().transpose(0, 2, 3, 1)


@pytest.mark.parametrize(("source", "size"), [((32, 32), (224, 224)), ((9, 7), (5, 20)), ((40, 60), (32, 21))])
def test_resize_has_the_numbers_of_torch(source, size):
    images = np.random.RandomState(1).randint(0, 256, (2, *source, 3)).astype(np.uint8)
    right = torch_resize(images, size)
    np.testing.assert_allclose(vision.Resize(size).apply_batch(images.astype(np.float32)), right, rtol=0, atol=6e-4)
    rounded = vision.Resize(size).apply_batch(images)
    is_tie = np.abs(right % 1 - 0.5) < 6e-4
    np.testing.assert_array_equal(rounded[~is_tie], np.rint(right)[~is_tie])
    assert is_tie.mean() < 0.02


def test_nearest_takes_pixels_as_torch_does():
    images = np.random.RandomState(1).randint(0, 256, (2, 9, 7, 3)).astype(np.uint8)
    found = vision.Resize((5, 20), vision.Inter.NEAREST).apply_batch(images)
    np.testing.assert_array_equal(found, torch_resize(images, (5, 20), "nearest"))
    assert vision.Inter.BILINEAR is vision.Inter.LINEAR


def gradient(num_samples, height, width):
    """Return images whose first channel is the row and whose second is the column of each pixel."""
    places = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1).astype(np.float32)
    return np.repeat(places[None], num_samples, axis=0)


def test_center_crop_cuts_the_middle_and_to_tensor_is_rescale_and_channels_first():
    np.testing.assert_array_equal(vision.CenterCrop((2, 3)).apply_batch(BATCH), BATCH[:, 1:3, 1:4])
    np.testing.assert_array_equal(vision.CenterCrop(4)(BATCH[0]), BATCH[0][:, 1:5])
    np.testing.assert_allclose(vision.ToTensor()(BATCH[0]), BATCH[0].transpose(2, 0, 1) / 255, rtol=1e-6)


def test_a_resized_crop_is_a_window_of_the_asked_area_and_ratio():
    images = vision.RandomResizedCrop(16, (0.2, 0.5), (0.5, 2)).apply_random_batch(gradient(300, 60, 80), draws_of(300))
    assert images.shape == (300, 16, 16, 2)
    heights = (images[:, -1, 0, 0] - images[:, 0, 0, 0]) * 16 / 15
    widths = (images[:, 0, -1, 1] - images[:, 0, 0, 1]) * 16 / 15
    for found, least, most, spread in ((heights * widths / 4800, 0.17, 0.55, 0.05), (widths / heights, 0.45, 2.2, 0.2)):
        assert (found.min() > least, found.max() < most, found.std() > spread) == (True, True, True)
    assert images[:, 0, 0, 0].min() < 4
    assert images[:, -1, 0, 0].max() > 55


def test_a_crop_that_never_fits_is_the_largest_one_in_the_middle():
    images = vision.RandomResizedCrop((4, 4), (1, 1), (1, 1)).apply_random_batch(gradient(3, 8, 16), draws_of(3))
    right = vision.Resize((4, 4)).apply_batch(gradient(3, 8, 16)[:, :, 4:12])
    np.testing.assert_array_equal(images, right)


@pytest.mark.parametrize(
    ("flip", "right"),
    [
        (vision.RandomHorizontalFlip(1), BATCH[:, :, ::-1]),
        (vision.RandomVerticalFlip(1), BATCH[:, ::-1]),
        (vision.RandomVerticalFlip(0), BATCH),
    ],
)
def test_flips_mirror_their_axis(flip, right):
    np.testing.assert_array_equal(flip.apply_random_batch(BATCH, draws_of(3)), right)


def test_transforms_leave_their_input_as_it_was():
    images = BATCH.astype(np.float32)
    for transform in (vision.Rescale(2, 1), vision.Normalize((1,), (2,)), vision.Resize(3), vision.HWC2CHW()):
        before = images.copy()
        transform.apply_batch(images)
        np.testing.assert_array_equal(images, before)


def test_random_crop_cuts_windows_of_the_padded_image_at_every_place():
    transform = vision.RandomCrop((3, 4), (1, 2, 3, 4))
    padded = np.pad(BATCH, ((0, 0), (2, 4), (1, 3), (0, 0)))
    for image, result in zip(padded, transform.apply_random_batch(BATCH, draws_of(3)), strict=True):
        windows = [image[top : top + 3, left : left + 4] for top in range(8) for left in range(7)]
        assert any(np.array_equal(result, window) for window in windows)
    pixels = np.tile(np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1), (200, 1, 1, 1))
    assert set(vision.RandomCrop(1).apply_random_batch(pixels, draws_of(200)).ravel()) == {0, 1, 2, 3}


def test_draws_belong_to_the_sample_whatever_the_batch():
    together = SampleDraws(7, 3, KEYS)
    for place in range(3):
        alone = SampleDraws(7, 3, KEYS[place : place + 1])
        assert alone.uniform(5)[0] == together.uniform(5)[place]
    assert len({*together.uniform(0), *together.uniform(1), *SampleDraws(7, 4, KEYS).uniform(0)}) == 9
    assert len({*together.uniform(0), *SampleDraws(8, 3, KEYS).uniform(0)}) == 6


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda: vision.Normalize((0, 0), (1,)), "give one value per channel in both"),
        (lambda: vision.Normalize((0,), (0,)), "every value must be greater than 0"),
        (lambda: vision.Normalize((0, 0, 0), (1, 1, 1)).apply_batch(BATCH), "mean and std have 3 values"),
        (lambda: vision.HWC2CHW().apply_batch(BATCH[0]), "needs images with 3 axes (height, width, channel)"),
        (lambda: vision.Resize((2, 0)), "Resize: size=(2, 0); give 1 or 2 integers of at least 1"),
        (lambda: vision.Resize("big"), "Resize: size='big'"),
        (lambda: vision.RandomCrop(None), "RandomCrop: size=None"),
        (lambda: vision.RandomCrop(3, (1, 2, 3)), "RandomCrop: padding=(1, 2, 3)"),
        (lambda: vision.RandomCrop(9).apply_random_batch(BATCH, draws_of(3)), "(9, 9) does not fit"),
        (lambda: vision.RandomHorizontalFlip(1.5), "prob=1.5; it must be in 0..1"),
        (lambda: vision.RandomVerticalFlip(-1), "RandomVerticalFlip: prob=-1"),
        (lambda: vision.Resize(3, "linear"), "Resize: interpolation='linear'; give Inter.LINEAR or Inter.NEAREST"),
        (lambda: vision.CenterCrop(5)(BATCH[0]), "CenterCrop: a window of (5, 5) does not fit an image of (4, 6)"),
        (lambda: vision.RandomResizedCrop(5, (0.5, 0.1)), "scale=(0.5, 0.1); give the smallest and the largest"),
        (lambda: vision.RandomResizedCrop(5, ratio=(0, 1)), "ratio=(0, 1)"),
        (lambda: OneHot(0), "OneHot: num_classes=0; it must be an integer of at least 1"),
        (lambda: OneHot(3).apply_batch(np.array([1, 3])), "label 3 with num_classes=3; labels must be in 0..2"),
        (lambda: OneHot(3).apply_batch(np.array([-1])), "label -1 with num_classes=3"),
        (lambda: OneHot(3).apply_batch(np.array([1.0])), "labels have dtype float64"),
        (lambda: TypeCast(torch.bfloat16), "use one like torch.float32"),
        (lambda: TypeCast("no such type"), "use one like torch.float32"),
        (lambda: TypeCast(object), "use one like torch.float32"),
    ],
)
def test_misuse_names_the_transform_and_the_value(misuse, words):
    with pytest.raises(UsageError) as caught:
        misuse()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.float16, torch.bool, np.float64, np.dtype("int8"), "uint8", float]
)
def test_typecast_takes_torch_and_numpy_dtypes(dtype):
    result = TypeCast(dtype).apply_batch(np.array([0, 1, 2]))
    assert result.dtype == (str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
    assert TypeCast(dtype)(np.int64(1)) == 1


def test_onehot_keeps_the_dtype():
    result = OneHot(3).apply_batch(np.array([2, 0], np.int32))
    assert result.dtype == np.int32
    assert result.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert OneHot(2)(np.int64(1)).tolist() == [0, 1]
