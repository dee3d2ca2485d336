"""Transforms: MindSpore's arithmetic in fp32 on batches and on single images, casts and one-hot labels."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from msrun.data import vision
from msrun.data.order import SampleDraws
from msrun.data.transforms import OneHot, TypeCast
from msrun.errors import UsageError

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
