"""CIFAR's files, binary and pickled, and click logs in Criteo's format: whole and damaged."""

import gzip
import math
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msrun.data import Cifar10Dataset, Cifar100Dataset, CriteoDataset, write_clicks
from msrun.data.cifar import load_batch
from msrun.data.criteo import LineFile
from msrun.errors import DataError, UsageError
from msrun.runtime.parallel.precision import current_compat

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
