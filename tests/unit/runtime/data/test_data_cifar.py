"""Reading CIFAR's files: binary and Python version, plain and gzipped, whole and damaged."""

from __future__ import annotations

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import DataError
from msrun.runtime.data import Cifar10Dataset, Cifar100Dataset, transforms, vision
from msrun.runtime.data.cifar import load_batch
from msrun.runtime.parallel.scaling import current_compat

LABELS = {f"data_batch_{i}.bin": [i, i + 4] for i in range(1, 6)} | {"test_batch.bin": [0, 1, 2]}
MARKER = "cifar_was_run"


def record_image(label):
    return np.random.RandomState(label).randint(0, 256, (3, 32, 32)).astype(np.uint8)


def pickled(labels, *, protocol=2):
    """Return a batch as CIFAR's authors have pickled theirs: with Python 2, so that all text is bytes."""
    images = np.stack([record_image(label).ravel() for label in labels])
    batch = {b"batch_label": b"a batch", b"labels": labels, b"data": images, b"filenames": [b"x.png"] * len(labels)}
    return pickle.dumps(batch, protocol)


def write_cifar(folder, names=tuple(LABELS), *, version="binary", suffix="", protocol=2):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if version == "binary":
            content = b"".join(bytes([n]) + record_image(n).tobytes() for n in LABELS[name])
        else:
            content = pickled(LABELS[name], protocol=protocol)
        name = name if version == "binary" else name.removesuffix(".bin")
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content, mtime=0) if suffix else content)


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_without_usage_mindspores_meaning_is_all_parts_that_are_there(tmp_path, place):
    write_cifar(tmp_path / "both" / place)
    write_cifar(tmp_path / "one" / place, ["test_batch.bin"])
    token = current_compat.set("mindspore")
    try:
        found = [
            [label.item() for _, label in Cifar10Dataset(tmp_path / name, shuffle=False)] for name in ("both", "one")
        ]
    finally:
        current_compat.reset(token)
    assert found == [[1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("place", "version"),
    [("", "binary"), ("cifar-10-batches-bin", "binary"), ("", "python"), ("cifar-10-batches-py", "python")],
)
@pytest.mark.parametrize(
    ("usage", "labels"),
    [("train", [1, 5, 2, 6, 3, 7, 4, 8, 5, 9]), ("all", [1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 0, 1, 2])],
)
def test_records_are_read_in_file_order_as_height_width_channel(tmp_path, place, version, suffix, usage, labels):
    write_cifar(tmp_path / place, version=version, suffix=suffix)
    samples = list(Cifar10Dataset(tmp_path, usage, shuffle=False))
    assert [label.item() for _, label in samples] == labels
    for image, label in samples:
        assert (image.dtype, image.shape, label.dtype) == (torch.uint8, (32, 32, 3), torch.int64)
        assert np.array_equal(image.numpy(), record_image(int(label)).transpose(1, 2, 0))


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_every_protocol_are_read(tmp_path, protocol):
    write_cifar(tmp_path, ["test_batch.bin"], version="python", protocol=protocol)
    assert [int(label) for _, label in Cifar10Dataset(tmp_path, "test", shuffle=False)] == [0, 1, 2]


@pytest.mark.parametrize("version", ["binary", "python"])
def test_cifar_100_has_coarse_and_fine_labels(tmp_path, version):
    images = [record_image(1), record_image(2)]
    if version == "binary":
        content = b"".join(
            bytes([c, f]) + image.tobytes() for c, f, image in zip((19, 3), (99, 7), images, strict=True)
        )
        (tmp_path / "train.bin").write_bytes(content)
    else:
        pixels = np.stack([image.ravel() for image in images])
        batch = {b"coarse_labels": [19, 3], b"fine_labels": [99, 7], b"data": pixels}
        (tmp_path / "cifar-100-python").mkdir()
        (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(batch, 2))
    dataset = Cifar100Dataset(tmp_path, shuffle=False)
    assert dataset.get_col_names() == ["image", "coarse_label", "fine_label"]
    assert [(int(coarse), int(fine)) for _, coarse, fine in dataset] == [(19, 99), (3, 7)]
    assert np.array_equal(next(iter(dataset))[0].numpy(), images[0].transpose(1, 2, 0))


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


def test_missing_files_of_the_version_that_is_there_are_listed(tmp_path):
    with pytest.raises(DataError, match=r"missing data_batch_1\.bin, data_batch_2\.bin"):
        Cifar10Dataset(tmp_path)
    write_cifar(tmp_path / "cifar-10-batches-py", ["data_batch_1.bin", "data_batch_3.bin"], version="python")
    words = r"missing data_batch_2, data_batch_4, data_batch_5, also with \.gz, here and in 'cifar-10-batches-bin' and"
    with pytest.raises(DataError, match=words):
        Cifar10Dataset(tmp_path)


def damaged_record(byte, value):
    content = bytearray(b"".join(bytes([n]) + record_image(n).tobytes() for n in (0, 1, 2)))
    content[byte] = value
    return bytes(content)


ZIPPED = gzip.compress(damaged_record(0, 0), mtime=0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes, but the file must be one or more records of 3073 bytes; record 0 at byte 0 is cut short"),
        (bytes(3072), "record 0 at byte 0 is cut short"),
        (
            bytes(2 * 3073 + 1),
            "6147 bytes, but the file must be one or more records of 3073 bytes; record 2 at byte 6146",
        ),
        (damaged_record(3073, 10), "label 10 at byte 3073 (record 1); it must be in 0..9"),
        (damaged_record(6146, 255), "label 255 at byte 6146 (record 2)"),
        (ZIPPED[:-8] + bytes(4) + ZIPPED[-4:], "behind byte 9219 of its content (CRC check failed"),
        (ZIPPED[: len(ZIPPED) // 2], "damaged or truncated gzip file, behind byte"),
    ],
    ids=["empty", "short", "rest", "label", "last label", "crc", "half"],
)
def test_a_damaged_binary_file_is_named_with_the_byte(tmp_path, content, words):
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError) as caught:
        Cifar10Dataset(tmp_path, "test")
    assert words in str(caught.value)
    assert str(tmp_path / "test_batch.bin") in str(caught.value)


class Runs:
    """A pickle of it creates a file when it is loaded by an ordinary unpickler."""

    def __reduce__(self):
        return open, (MARKER, "w")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (pickle.dumps({b"data": Runs()}, 2), "io.open, which these files do not hold"),
        (pickle.dumps({b"labels": np.float64(1)}, 2), "multiarray.scalar, which these files do not hold"),
        (b"cos\nsystem\n(S'touch cifar_was_run'\ntR.", "names os.system, which these files do not hold"),
        (pickle.dumps([1, 2], 2), "it holds list, not a dictionary"),
        (pickle.dumps({b"data": np.zeros((1, 3072))}, 2), "an array that is not of uint8"),
        (pickle.dumps({b"data": np.array([[print]])}, 2), "__builtin__.print, which these files do not hold"),
        (pickled([1, 2])[:-100], "at byte"),
        (b"", "at byte 0 of 0: it ends too early"),
        (pickle.dumps({b"data": np.zeros((1, 3071), np.uint8)}, 2), "no images (n, 3072) under 'data'"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1, 2]}, 2), "no list of 1 labels"),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, 2),
            "label 10 of image 0; it must be in",
        ),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["1"]}, 2), "label '1' of image 0"),
    ],
)
def test_a_pickle_that_holds_anything_else_is_refused_and_never_run(tmp_path, monkeypatch, batch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(batch)
    with pytest.raises(DataError) as caught:
        Cifar10Dataset(tmp_path, "test")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / MARKER).exists()


@given(place=st.integers(0, 300), byte=st.integers(0, 255), cut=st.integers(0, 6300))
@settings(max_examples=150, deadline=None)
def test_any_pickle_gives_a_dictionary_or_a_data_error(tmp_path_factory, place, byte, cut):
    content = bytearray(pickled([1, 2]))
    content[place] = byte
    path = tmp_path_factory.getbasetemp() / "any"
    try:
        assert isinstance(load_batch(path, bytes(content[: max(cut, 1)])), dict)
    except DataError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)


def test_an_array_in_a_pickle_has_as_many_bytes_as_its_shape_says(tmp_path):
    content = pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}, 2)
    wrong = content.replace(struct.pack("<BH", ord("M"), 3072), struct.pack("<BH", ord("M"), 4096), 1)
    with pytest.raises(DataError, match=r"shape .* with 3072 bytes"):
        load_batch(tmp_path / "wrong", wrong)
