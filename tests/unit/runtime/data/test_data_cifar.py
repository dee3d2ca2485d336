"""Reading CIFAR-10's binary files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrun.errors import DataError
from msrun.runtime.data import Cifar10Dataset, transforms, vision

LABELS = {f"data_batch_{i}.bin": [i, i + 4] for i in range(1, 6)} | {"test_batch.bin": [0, 1, 2]}


def record_image(label):
    return np.random.RandomState(label).randint(0, 256, (3, 32, 32)).astype(np.uint8)


def write_cifar(folder, names=tuple(LABELS)):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"".join(bytes([n]) + record_image(n).tobytes() for n in LABELS[name]))


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
@pytest.mark.parametrize(
    ("usage", "labels"),
    [
        ("train", [1, 5, 2, 6, 3, 7, 4, 8, 5, 9]),
        ("test", [0, 1, 2]),
        ("all", [1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 0, 1, 2]),
    ],
)
def test_records_are_read_in_file_order_as_height_width_channel(tmp_path, place, usage, labels):
    write_cifar(tmp_path / place)
    samples = list(Cifar10Dataset(tmp_path, usage, shuffle=False))
    assert [label.item() for _, label in samples] == labels
    for image, label in samples:
        assert (image.dtype, image.shape, label.dtype) == (torch.uint8, (32, 32, 3), torch.int64)
        assert np.array_equal(image.numpy(), record_image(int(label)).transpose(1, 2, 0))


def test_the_documented_augmentation_program_runs(tmp_path):
    write_cifar(tmp_path)
    dataset = Cifar10Dataset(tmp_path, num_shards=2, shard_id=1)
    dataset = dataset.map(operations=transforms.TypeCast(torch.int32), input_columns="label")
    augmentation = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip(), vision.Resize((48, 48))]
    normalization = [
        vision.Rescale(1.0 / 255.0, 0.0),
        vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)),
        vision.HWC2CHW(),
    ]
    dataset = dataset.map(operations=augmentation + normalization, input_columns="image")
    dataset = dataset.shuffle(buffer_size=10).batch(batch_size=2, drop_remainder=True).repeat(3)
    steps = list(dataset)
    assert len(steps) == len(dataset) == 6
    assert all(images.shape == (2, 3, 48, 48) and images.dtype == torch.float32 for images, _ in steps)


def test_missing_batches_are_listed(tmp_path):
    write_cifar(tmp_path, ["data_batch_1.bin", "data_batch_3.bin"])
    with pytest.raises(
        DataError, match=r"missing data_batch_2\.bin, data_batch_4\.bin, data_batch_5\.bin, here and in"
    ):
        Cifar10Dataset(tmp_path)


def test_the_python_version_of_the_data_is_recognised(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"pickle")
    with pytest.raises(DataError, match="Python version of the data, fetch the binary one"):
        Cifar10Dataset(tmp_path)


@pytest.mark.parametrize("size_bytes", [0, 3072, 3074])
def test_a_partial_record_is_refused(tmp_path, size_bytes):
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes(size_bytes))
    with pytest.raises(DataError, match=f"{size_bytes} bytes, but the file must be one or more records of 3073 bytes"):
        Cifar10Dataset(tmp_path, "test")
