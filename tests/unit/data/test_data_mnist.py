"""MNIST: the idx codec, the four files wherever they were unpacked, and scikit-learn's digits written as such files.
CIFAR's files, binary and pickled, and click logs in Criteo's format: whole and damaged."""

import contextlib
import gzip
import hashlib
import importlib.util
import math
import multiprocessing
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from asked_cases import one_fast
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from msrun.data import Cifar10Dataset, Cifar100Dataset, CriteoDataset, MnistDataset, digits, write_clicks
from msrun.data.cifar import load_batch
from msrun.data.criteo import LineFile
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


@contextlib.contextmanager
def in_mindspores_meaning():
    token = current_compat.set("mindspore")
    try:
        yield
    finally:
        current_compat.reset(token)


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
    with in_mindspores_meaning():
        assert read_all(MnistDataset(tmp_path, shuffle=False))[1] == [*TEST_LABELS, *TRAIN_LABELS]
        assert read_all(MnistDataset(tmp_path / "one", shuffle=False))[1] == TEST_LABELS.tolist()
        with pytest.raises(DataError, match="the train images are missing"):
            MnistDataset(tmp_path / "one", "train")


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
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert digits.main([str(tmp_path / "digits")]) == 1
    assert "need scikit-learn, which is not installed; run: pip install scikit-learn\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-9000], lambda data: data[:500] + b"x" * 99, lambda _: b"1,2\n"])
def test_damaged_scikit_learn_is_told_with_the_remedy(tmp_path, monkeypatch, capsys, damage):
    found = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    copy = tmp_path / "sklearn" / found.relative_to(found.parents[2])
    copy.parent.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    data = damage(found.read_bytes())
    copy.write_bytes(data if data.startswith(b"\x1f\x8b") else gzip.compress(data))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    assert digits.main([str(tmp_path / "digits")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(copy) in line and line.endswith("run: pip install --force-reinstall scikit-learn")


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
    with in_mindspores_meaning():
        sets = [Cifar10Dataset(tmp_path / name, shuffle=False) for name in ("both", "one")]
        found = [[label.item() for _, label in dataset] for dataset in sets]
    assert found == [[1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("place", "version", "protocol"),
    [
        ("", "binary", 0),
        ("cifar-10-batches-bin", "binary", 0),
        ("cifar-10-batches-py", "python", 2),
        *(("", "python", protocol) for protocol in range(6)),
    ],
)
@pytest.mark.parametrize(
    ("usage", "labels"), [("train", [1, 5, 2, 6, 3, 7, 4, 8, 5, 9]), ("all", [1, 5, 2, 6, 3, 7, 4, 8, 5, 9, 0, 1, 2])]
)
def test_records_are_read_in_file_order_as_height_width_channel(
    tmp_path, place, version, protocol, suffix, usage, labels
):
    write_cifar(tmp_path / place, version=version, suffix=suffix, protocol=protocol)
    samples = list(Cifar10Dataset(tmp_path, usage, shuffle=False))
    assert [label.item() for _, label in samples] == labels
    for image, label in samples:
        assert (image.dtype, image.shape, label.dtype) == (torch.uint8, (32, 32, 3), torch.int64)
        assert np.array_equal(image.numpy(), record_image(int(label)).transpose(1, 2, 0))


@pytest.mark.parametrize("version", ["binary", "python"])
def test_cifar_100_has_coarse_and_fine_labels(tmp_path, version):
    images, coarse, fine = [record_image(1), record_image(2)], [19, 3], [99, 7]
    if version == "binary":
        records = [bytes([c, f]) + image.tobytes() for c, f, image in zip(coarse, fine, images, strict=True)]
        (tmp_path / "train.bin").write_bytes(b"".join(records))
    else:
        pixels = np.stack([image.ravel() for image in images])
        batch = {b"coarse_labels": coarse, b"fine_labels": fine, b"data": pixels}
        (tmp_path / "cifar-100-python").mkdir()
        (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(batch, 2))
    dataset = Cifar100Dataset(tmp_path, shuffle=False)
    assert dataset.get_col_names() == ["image", "coarse_label", "fine_label"]
    assert [(int(coarse), int(fine)) for _, coarse, fine in dataset] == [(19, 99), (3, 7)]
    assert np.array_equal(next(iter(dataset))[0].numpy(), images[0].transpose(1, 2, 0))


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
        (bytes(2 * 3073 + 1), "6147 bytes, but the file must be one or more records of 3073 bytes; record 2 at byte"),
        (damaged_record(3073, 10), "label 10 at byte 3073 (record 1); it must be in 0..9"),
        (damaged_record(6146, 255), "label 255 at byte 6146 (record 2)"),
        (ZIPPED[:-8] + bytes(4) + ZIPPED[-4:], "behind byte 9219 of its content (CRC check failed"),
        (ZIPPED[: len(ZIPPED) // 2], "damaged or truncated gzip file, behind byte"),
    ],
    ids=["empty", "rest", "label", "last label", "crc", "half"],
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


ONE_IMAGE = {b"data": np.zeros((1, 3072), np.uint8)}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({b"data": Runs()}, "io.open, which these files do not hold"),
        ({b"labels": np.float64(1)}, "multiarray.scalar, which these files do not hold"),
        (b"cos\nsystem\n(S'touch cifar_was_run'\ntR.", "names os.system, which these files do not hold"),
        ([1, 2], "it holds list, not a dictionary"),
        ({b"data": np.zeros((1, 3072))}, "an array that is not of uint8"),
        ({b"data": np.array([[print]])}, "__builtin__.print, which these files do not hold"),
        (pickled([1, 2])[:-100], "at byte"),
        (b"", "at byte 0 of 0: it ends too early"),
        ({b"data": np.zeros((1, 3071), np.uint8)}, "no images (n, 3072) under 'data'"),
        (ONE_IMAGE | {b"labels": [1, 2]}, "no list of 1 labels"),
        (ONE_IMAGE | {b"labels": [10]}, "label 10 of image 0; it must be in"),
        (ONE_IMAGE | {b"labels": ["1"]}, "label '1' of image 0"),
    ],
)
def test_a_pickle_that_holds_anything_else_is_refused_and_never_run(tmp_path, monkeypatch, batch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(batch if isinstance(batch, bytes) else pickle.dumps(batch, 2))
    with pytest.raises(DataError) as caught:
        Cifar10Dataset(tmp_path, "test")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / MARKER).exists()


@given(place=st.integers(0, 300), byte=st.integers(0, 255), cut=st.integers(0, 6300))
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


def line(label="1", integers=None, categories=None):
    return "\t".join([label, *(integers or ["3"] * 13), *(categories or ["0000000a"] * 26)])


def read(path, hash_size=100):
    data = CriteoDataset(path, shuffle=False, hash_size=hash_size, num_shards=1)
    return [torch.stack(column) for column in zip(*data, strict=True)]


def test_integers_are_logarithms_and_categories_rows_of_one_table(tmp_path):
    path = tmp_path / "log.txt"
    integers = ["0", "", "-2", "6", *["1"] * 9]
    categories = ["", "00000000", "ffffffff", *["00000063"] * 23]
    path.write_text(line("0", integers, categories) + "\n" + line() + "\n")
    dense, ids, label = read(path)
    assert label.tolist() == [0, 1]
    assert (dense.dtype, ids.dtype, label.dtype) == (torch.float32, torch.int64, torch.float32)
    assert dense[0].tolist() == pytest.approx([0, 0, 0, math.log(7), *[math.log(2)] * 9])
    assert ids[0].tolist() == [0, 101, 200 + 1 + 0xFFFFFFFF % 99, *(100 * c + 1 for c in range(3, 26))]


@given(count=st.integers(1, 200), ends=st.booleans(), is_dos=st.booleans())
def test_lines_are_read_by_number(tmp_path_factory, count, ends, is_dos):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    texts = [f"line {number}" * (number % 5 + 1) for number in range(count)]
    end = "\r\n" if is_dos else "\n"
    path.write_bytes((end.join(texts) + (end if ends else "")).encode())
    file = LineFile(path)
    assert file.num_lines == count
    assert [file.read_line(number).decode() for number in range(count)] == texts


def test_usage_chooses_files_of_a_folder(tmp_path):
    write_clicks(tmp_path, num_train=40, num_test=10)
    sizes = {usage: len(CriteoDataset(tmp_path, usage, num_shards=1)) for usage in ("train", "test", "all")}
    assert sizes == {"train": 40, "test": 10, "all": 50}
    assert len(CriteoDataset(tmp_path / "test.txt", num_shards=1)) == 10


@pytest.mark.slow
def test_worker_processes_read_the_same(tmp_path):
    folder = write_clicks(tmp_path, num_train=64, num_test=1)
    own, other = (CriteoDataset(folder, num_shards=1, num_parallel_workers=count).batch(16) for count in (0, 1))
    for mine, theirs in zip(own, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\t2", "line 2 has 2 columns; it must have 40: the label, 13 integers, 26 categories"),
        (line("2"), "line 2, column 1 holds b'2'; it must be 0 or 1"),
        (line(""), "line 2, column 1 holds b''; it must be 0 or 1"),
        (line(integers=["x", *["1"] * 12]), "line 2, column 2 holds b'x'; it must be a whole number"),
        (line(categories=[*["a"] * 25, "g0"]), "line 2, column 40 holds b'g0'; it must be hexadecimal digits"),
    ],
)
def test_damaged_line_is_named_with_its_column(tmp_path, text, words):
    path = tmp_path / "log.txt"
    path.write_text(f"{line()}\n{text}\n{line()}\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {words}"


def test_files_that_cannot_be_read_by_lines_are_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "packed").write_bytes(gzip.compress(line().encode()))
    for name, words in (("empty", "is empty"), ("packed", r"unpack it \(gunzip -k\)"), ("missing", "no such file")):
        with pytest.raises(DataError, match=words):
            CriteoDataset(tmp_path / name)
    with pytest.raises(DataError, match=r"train\.txt is missing"):
        CriteoDataset(tmp_path)
    with pytest.raises(UsageError, match="hash_size"):
        CriteoDataset(tmp_path, hash_size=1)


def test_clicks_are_always_the_same_and_can_be_predicted(tmp_path):
    first, second = write_clicks(tmp_path / "a", 2000, 500), write_clicks(tmp_path / "b", 2000, 500)
    assert (first / "train.txt").read_bytes() == (second / "train.txt").read_bytes()
    _, ids, label = read(first, hash_size=4000)
    counts = torch.bincount(ids[:, 0])
    rates = torch.bincount(ids[:, 0], weights=label)[counts > 200] / counts[counts > 200]
    assert 0.1 < label.mean() < 0.4
    assert rates.max() - rates.min() > 0.05, "values of a category differ in how often they are clicked"
