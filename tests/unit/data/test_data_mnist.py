"""MNIST: the idx codec, the four files wherever they were unpacked, and scikit-learn's digits written as such files."""

import gzip
import hashlib
import multiprocessing
import struct
import sys

import numpy as np
import pytest
import torch
from asked_cases import one_fast
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from msrun.data import MnistDataset, digits
from msrun.data.mnist import read_idx, write_idx
from msrun.errors import DataError, UsageError
from msrun.runtime.parallel.precision import current_compat

DTYPES = ["uint8", "int8", "int16", "int32", "float32", "float64"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
ONE_BYTE_HEADER = b"\0\0\x08\x01" + struct.pack(">I", 3)


@pytest.fixture(scope="module")
def idx_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idx")


@given(array=ARRAYS, suffix=st.sampled_from(["", ".gz"]), should_map=st.booleans())
def test_reading_gives_back_what_was_written(idx_folder, array, suffix, should_map):
    path = idx_folder / f"round_trip{suffix}"
    write_idx(path, array)
    read = read_idx(path, should_map=should_map)
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tobytes() == array.tobytes()
    assert [found for found in idx_folder.iterdir() if found.name.startswith(".")] == []


@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.builds(
            bytes.__add__, st.sampled_from([b"\0\0", b"\0\0\x08\x01", b"\0\0\x0e\xff", b"\x1f\x8b\x08"]), st.binary()
        ),
    ),
    is_zipped=st.booleans(),
    should_map=st.booleans(),
)
@example(content=b"\0\0\x08\x04" + b"\xff" * 12 + b"\0" * 4, is_zipped=False, should_map=True)
@example(content=b"\0\0\x0e\x03" + b"\xff" * 12, is_zipped=True, should_map=False)
@example(content=b"\0\0\x08\xc8" + b"\0\0\0\1" * 200 + b"x", is_zipped=False, should_map=False)
def test_any_bytes_give_an_array_or_a_data_error(idx_folder, content, is_zipped, should_map):
    path = idx_folder / "any"
    path.write_bytes(gzip.compress(content, mtime=0) if is_zipped else content)
    try:
        assert isinstance(read_idx(path, should_map=should_map), np.ndarray)
    except DataError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["(none)", "idx file starts with 00 00"]),
        (b"PK\3\4 and more", ["50 4b 03 04", "fetch"]),
        (b"\0\0\x0a\x01\0\0\0\0", ["00 00 0a 01", "08, 09, 0b"]),
        (b"\0\0\x08\x03\0\0\0\1", ["3 dimensions", "needs 16 bytes", "found 8"]),
        (ONE_BYTE_HEADER + b"ab", ["(3,)", "need 3 bytes", "found 2"]),
        (ONE_BYTE_HEADER + b"abcd", ["need 3 bytes", "found 4"]),
        (gzip.compress(ONE_BYTE_HEADER + b"abcd", mtime=0), ["need 3 bytes", "found 4 or more"]),
        (gzip.compress(ONE_BYTE_HEADER + b"abc", mtime=0)[:-9], ["truncated gzip", "fetch"]),
        (gzip.compress(ONE_BYTE_HEADER + b"abc", mtime=0)[:-8] + b"\0" * 8, ["damaged", "gzip", "CRC"]),
        (b"\0\0\x08\x04" + b"\xff" * 12 + b"\0" * 4, ["numpy cannot hold", "header is wrong"]),
    ],
)
def test_damaged_files_are_told_apart(tmp_path, content, words):
    path = tmp_path / "damaged-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    for word in [path.name, *words]:
        assert word in str(caught.value)


def test_elements_are_big_endian_in_the_file(tmp_path):
    path = tmp_path / "int32"
    write_idx(path, np.array([[1], [258]], np.int32))
    assert path.read_bytes() == bytes.fromhex("00000c02 00000002 00000001 00000001 00000102".replace(" ", ""))


def test_mapping_leaves_one_byte_elements_on_disk(tmp_path):
    write_idx(tmp_path / "mapped", np.arange(6, dtype=np.uint8).reshape(2, 3))
    mapped = read_idx(tmp_path / "mapped", should_map=True)
    assert isinstance(mapped, np.memmap) and not mapped.flags.writeable
    assert mapped.tolist() == [[0, 1, 2], [3, 4, 5]]
    for name, words in (("absent", "no such file"), (".", "cannot be read")):
        with pytest.raises(DataError, match=words):
            read_idx(tmp_path / name)


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint16", "complex64", "U3"])
def test_other_dtypes_are_refused_with_the_list_of_good_ones(tmp_path, dtype):
    with pytest.raises(DataError, match="uint8, int8, int16, int32, float32, float64"):
        write_idx(tmp_path / "refused", np.zeros(2, dtype))
    assert list(tmp_path.iterdir()) == []


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
    assert sorted(read_all(MnistDataset(tmp_path, num_samples=3))[1]) == [0, 4, 5], "the first ones"
    assert len(MnistDataset(tmp_path, num_samples=100)) == 6
    token = current_compat.set("mindspore")
    try:
        assert read_all(MnistDataset(tmp_path, shuffle=False))[1] == [*TEST_LABELS, *TRAIN_LABELS]
        assert read_all(MnistDataset(tmp_path / "one", shuffle=False))[1] == TEST_LABELS.tolist()
        with pytest.raises(DataError, match="the train images are missing"):
            MnistDataset(tmp_path / "one", "train")
    finally:
        current_compat.reset(token)


def test_missing_files_are_listed_with_what_was_looked_for(tmp_path):
    with pytest.raises(DataError) as caught:
        MnistDataset(tmp_path)
    for word in ["train-images-idx3-ubyte", "train-images.idx3-ubyte", ".gz", "MNIST/raw", "data.digits"]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("labels-idx1", TRAIN_LABELS[:-1], "6 images, but train-labels-idx1-ubyte has 5 labels"),
        ("images-idx3", TRAIN_LABELS, "needs uint8 with 3 dimensions"),
        ("images-idx3", TRAIN_IMAGES.astype(np.int32), "needs uint8 with 3 dimensions"),
        ("images-idx3", TRAIN_IMAGES[:0], "needs uint8 with 3 dimensions"),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path, name, array, words):
    write_mnist(tmp_path)
    write_idx(tmp_path / f"train-{name}-ubyte", array)
    with pytest.raises(DataError, match=words):
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


FILE_NAMES = [f"{part}-{kind}-ubyte" for part in ("t10k", "train") for kind in ("images-idx3", "labels-idx1")]
DEADLINE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return digits.write_digits(tmp_path_factory.mktemp("parent") / "sub" / "digits")


def test_the_bytes_are_pinned(folder):
    content = b"".join((folder / name).read_bytes() for name in FILE_NAMES)
    assert hashlib.sha256(content).hexdigest() == "397642db178a2356c5fe520af3e71eecb8a0c506c1bb5f4acee97f8b78b4dfe7"


def test_a_complete_folder_is_left_alone(folder, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert digits.write_digits(str(folder)) == folder
    assert not digits.main([str(folder)])
    assert capsys.readouterr().out == f"{folder}: 1536 train and 261 test digits\n"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(before) == 4


def test_a_missing_file_is_added_beside_what_is_there(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_idx(tmp_path / FILE_NAMES[0], read_idx(folder / FILE_NAMES[0]))
    digits.write_digits(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", *FILE_NAMES]
    assert (tmp_path / FILE_NAMES[3]).read_bytes() == (folder / FILE_NAMES[3]).read_bytes()


def test_other_data_under_these_names_is_never_overwritten(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((5, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"holds shape \(5, 28, 28\), not the digits' \(1536, 28, 28\)"):
        digits.write_digits(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_target_that_cannot_be_a_folder_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the digits"):
        digits.write_digits(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("is_existing", one_fast(*(False, True)))
def test_eight_processes_at_once_leave_one_complete_set(folder, tmp_path, is_existing):
    target = tmp_path / "digits"
    if is_existing:
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=write_together, args=(barrier, target)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert sorted(path.name for path in target.glob("t*")) == FILE_NAMES
    for name in FILE_NAMES:
        assert (target / name).read_bytes() == (folder / name).read_bytes()


def write_together(barrier, target):
    barrier.wait(DEADLINE_S)
    digits.write_digits(target)
    for usage in ("train", "test"):
        MnistDataset(target, usage)


def test_missing_scikit_learn_is_told_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert digits.main([str(tmp_path / "digits")]) == 1
    assert "need scikit-learn, which is not installed; run: pip install scikit-learn\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
