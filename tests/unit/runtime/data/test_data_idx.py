"""The idx codec: what is written is read, and nothing but DataError comes out of a damaged file."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from msrun.errors import DataError
from msrun.runtime.data.mnist import read_idx, write_idx

DTYPES = ["uint8", "int8", "int16", "int32", "float32", "float64"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
ONE_BYTE_HEADER = b"\0\0\x08\x01" + struct.pack(">I", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idx")


@given(array=ARRAYS, suffix=st.sampled_from(["", ".gz"]), should_map=st.booleans())
@settings(max_examples=80, deadline=None)
def test_reading_gives_back_what_was_written(folder, array, suffix, should_map):
    path = folder / f"round_trip{suffix}"
    write_idx(path, array)
    read = read_idx(path, should_map=should_map)
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tobytes() == array.tobytes()
    assert [found for found in folder.iterdir() if found.name.startswith(".")] == []


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
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_an_array_or_a_data_error(folder, content, is_zipped, should_map):
    path = folder / "any"
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


def test_gzip_is_recognised_without_its_suffix(tmp_path):
    path = tmp_path / "no_suffix"
    path.write_bytes(gzip.compress(ONE_BYTE_HEADER + b"\1\2\3", mtime=0))
    assert read_idx(path).tolist() == [1, 2, 3]


def test_elements_are_big_endian_in_the_file(tmp_path):
    path = tmp_path / "int32"
    write_idx(path, np.array([[1], [258]], np.int32))
    assert path.read_bytes() == bytes.fromhex("00000c02 00000002 00000001 00000001 00000102".replace(" ", ""))


def test_mapping_leaves_one_byte_elements_on_disk(tmp_path):
    path = tmp_path / "mapped"
    write_idx(path, np.arange(6, dtype=np.uint8).reshape(2, 3))
    mapped = read_idx(path, should_map=True)
    assert isinstance(mapped, np.memmap)
    assert not mapped.flags.writeable
    assert mapped.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_missing_files_and_folders_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_idx(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path)


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint16", "complex64", "U3"])
def test_other_dtypes_are_refused_with_the_list_of_good_ones(tmp_path, dtype):
    with pytest.raises(DataError, match="uint8, int8, int16, int32, float32, float64"):
        write_idx(tmp_path / "refused", np.zeros(2, dtype))
    assert list(tmp_path.iterdir()) == []
