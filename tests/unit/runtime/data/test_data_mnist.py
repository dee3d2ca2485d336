"""Reading MNIST's four files, wherever and however they were unpacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrun.errors import DataError, UsageError
from msrun.runtime.data import MnistDataset, transforms, vision, write_idx
from msrun.runtime.parallel.scaling import current_compat

TRAIN_IMAGES = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
TRAIN_LABELS = np.array([5, 0, 4, 1, 9, 2], np.uint8)
TEST_IMAGES = TRAIN_IMAGES[:2] + 100
TEST_LABELS = np.array([7, 3], np.uint8)


def write_mnist(folder, joint="-", suffix="", usages=("train", "test")):
    folder.mkdir(parents=True, exist_ok=True)
    for usage, prefix, images, labels in [
        ("train", "train", TRAIN_IMAGES, TRAIN_LABELS),
        ("test", "t10k", TEST_IMAGES, TEST_LABELS),
    ]:
        if usage in usages:
            write_idx(folder / f"{prefix}-images{joint}idx3-ubyte{suffix}", images)
            write_idx(folder / f"{prefix}-labels{joint}idx1-ubyte{suffix}", labels)


def read_all(dataset):
    images, labels = zip(*dataset, strict=True)
    return torch.stack(images).numpy(), torch.stack(labels).tolist()


@pytest.mark.parametrize("joint", ["-", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "MNIST/raw", "raw"])
def test_files_are_found_under_all_usual_names_and_places(tmp_path, joint, suffix, place):
    write_mnist(tmp_path / place, joint, suffix)
    images, labels = read_all(MnistDataset(tmp_path, "train", shuffle=False))
    assert images.dtype == np.uint8
    assert np.array_equal(images, TRAIN_IMAGES[..., None])
    assert labels == TRAIN_LABELS.tolist()


def test_train_and_test_may_lie_in_folders_of_their_own(tmp_path):
    write_mnist(tmp_path / "train", usages=("train",))
    write_mnist(tmp_path / "test", usages=("test",))
    images, labels = read_all(MnistDataset(tmp_path, "all", shuffle=False))
    assert np.array_equal(images, np.concatenate([TRAIN_IMAGES, TEST_IMAGES])[..., None])
    assert labels == [*TRAIN_LABELS, *TEST_LABELS]
    assert read_all(MnistDataset(tmp_path / "test", "test", shuffle=False))[1] == TEST_LABELS.tolist()


def test_without_usage_the_training_part_is_read_and_in_mindspores_meaning_all_that_is_there(tmp_path):
    write_mnist(tmp_path)
    write_mnist(tmp_path / "one", usages=("test",))
    assert read_all(MnistDataset(tmp_path, shuffle=False))[1] == TRAIN_LABELS.tolist()
    token = current_compat.set("mindspore")
    try:
        assert read_all(MnistDataset(tmp_path, shuffle=False))[1] == [*TEST_LABELS, *TRAIN_LABELS]
        assert read_all(MnistDataset(tmp_path / "one", shuffle=False))[1] == TEST_LABELS.tolist()
        with pytest.raises(DataError, match="the train images are missing"):
            MnistDataset(tmp_path / "one", "train")
    finally:
        current_compat.reset(token)


def test_the_documented_program_gives_float_images_and_cast_labels(tmp_path):
    write_mnist(tmp_path)
    dataset = MnistDataset(tmp_path)
    dataset = dataset.map(
        [vision.Rescale(1.0 / 255.0, 0), vision.Normalize(mean=(0.1307,), std=(0.3081,)), vision.HWC2CHW()], "image"
    )
    dataset = dataset.map(transforms.TypeCast(torch.int32), "label")
    dataset = dataset.batch(4)
    assert dataset.get_dataset_size() == len(dataset) == 1
    ((images, labels),) = dataset
    assert (images.dtype, images.shape) == (torch.float32, (4, 1, 4, 5))
    assert (labels.dtype, labels.shape) == (torch.int32, (4,))
    for image, label in zip(images, labels, strict=True):
        pixels = TRAIN_IMAGES[TRAIN_LABELS.tolist().index(label)]
        np.testing.assert_allclose(image[0].numpy(), (pixels / 255 - 0.1307) / 0.3081, rtol=1e-5, atol=1e-6)


def test_num_samples_keeps_the_first_ones(tmp_path):
    write_mnist(tmp_path)
    assert sorted(read_all(MnistDataset(tmp_path, num_samples=3))[1]) == [0, 4, 5]
    assert len(MnistDataset(tmp_path, num_samples=100)) == 6


def test_missing_files_are_listed_with_what_was_looked_for(tmp_path):
    with pytest.raises(DataError) as caught:
        MnistDataset(tmp_path)
    for word in ["train-images-idx3-ubyte", "train-images.idx3-ubyte", ".gz", "MNIST/raw", "data.digits"]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_and_labels_of_different_number_are_refused(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", TRAIN_LABELS[:-1])
    with pytest.raises(DataError, match="6 images, but train-labels-idx1-ubyte has 5 labels"):
        MnistDataset(tmp_path)


@pytest.mark.parametrize(
    "array", [TRAIN_LABELS, TRAIN_IMAGES.astype(np.int32), TRAIN_IMAGES[:0]], ids=["1-d", "int32", "empty"]
)
def test_a_file_with_other_content_is_refused(tmp_path, array):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", array)
    with pytest.raises(DataError, match="needs uint8 with 3 dimensions"):
        MnistDataset(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "error", "words"),
    [
        ({"usage": "trian"}, UsageError, "usage='trian' (did you mean train?); it must be 'train', 'test' or 'all'"),
        ({"dataset_dir": None}, DataError, "dataset_dir is None; set the environment variable"),
        ({"dataset_dir": "no/such/folder"}, DataError, "dataset_dir 'no/such/folder' is not a folder"),
        ({"num_samples": 0}, UsageError, "num_samples=0; it must be an integer of at least 1"),
        ({"num_shards": 0}, UsageError, "num_shards=0; it must be an integer of at least 1"),
        ({"num_shards": 2.0}, UsageError, "num_shards=2.0; it must be an integer"),
        ({"num_shards": 4}, UsageError, "num_shards=4 without shard_id; pass shard_id in 0..3"),
        ({"num_shards": 4, "shard_id": 4}, UsageError, "shard_id=4; it must be an integer in 0..3"),
        ({"num_shards": 4, "shard_id": -1}, UsageError, "shard_id=-1; it must be an integer in 0..3"),
        ({"shard_id": 1}, UsageError, "shard_id=1 without num_shards"),
        ({"seed": -1}, UsageError, "seed=-1; it must be an integer in 0.."),
        ({"seed": True}, UsageError, "seed=True; it must be an integer"),
    ],
)
def test_wrong_parameters_name_the_value_and_the_constraint(tmp_path, parameters, error, words):
    write_mnist(tmp_path)
    with pytest.raises(error) as caught:
        MnistDataset(**{"dataset_dir": tmp_path, **parameters})
    assert words in str(caught.value)
