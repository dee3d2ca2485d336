"""A table's text in shards with an index, and the way back; folders that are whole."""

import json
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import (
    EditError,
    JsonTextError,
    ReadError,
    ShardError,
    WriteError,
    join_shards,
    shard_bytes,
    write_shards,
)
from ranktable.edit.shards import parse_size
from ranktable.write_folder import write_folder


@settings(max_examples=25)
@given(st.binary(min_size=1, max_size=5000), st.integers(1024, 3000), st.sampled_from(["none", "gzip"]))
def test_shards_are_small_enough_and_make_up_the_whole_again(tmp_path_factory, data, max_bytes, compression):
    folder = tmp_path_factory.mktemp("folder") / "shards"
    sharded = shard_bytes(data, max_bytes, compression)
    assert all(0 < len(piece) <= max_bytes for piece in sharded.shards.values())
    assert join_shards(write_shards(sharded, folder)) == data


def test_equal_tables_have_equal_shards():
    """No time of day stands in the gzip header."""
    assert shard_bytes(b"x" * 5000, 1024, "gzip").shards["shard_000.bin"][4:8] == b"\0\0\0\0"


DATA = b"".join(number.to_bytes(2, "big") for number in range(1536))


@pytest.fixture
def index(tmp_path):
    return write_shards(shard_bytes(DATA, 1024), tmp_path / "shards")


def change_index(index, **changes):
    index.write_text(json.dumps(json.loads(index.read_text()) | changes))


def test_a_shard_that_was_changed_is_refused(index):
    shard = index.with_name("shard_001.bin")
    shard.write_bytes(b"y" + shard.read_bytes()[1:])
    with pytest.raises(ShardError, match=r"shard_001\.bin: its sha256 is not that of the index"):
        join_shards(index)
    shard.write_bytes(b"")
    with pytest.raises(ShardError, match="it has 0 bytes, the index says 1024"):
        join_shards(index)
    shard.unlink()
    with pytest.raises(ReadError, match=r"shard_001\.bin"):
        join_shards(index)


def test_shards_in_another_order_are_refused(index):
    change_index(index, shards=json.loads(index.read_text())["shards"][::-1])
    with pytest.raises(ShardError, match="the sha256 of the whole is not that of the index"):
        join_shards(index)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "other"}, "it is no index of shards"),
        ({"status": "initializing"}, "its status is not"),
        ({"compression": "zstd"}, "its compression is not known"),
        ({"compression": "gzip"}, "the shards are not gzip"),
        ({"compression": "gzip", "size_bytes": "9"}, "its size_bytes is no size"),
        ({"compression": "gzip", "size_bytes": -1}, "its size_bytes is no size"),
        ({"shards": []}, "it lists no shards"),
        ({"shards": "x"}, "it lists no shards"),
        ({"shards": [3]}, r"shards\[0\] has no proper name"),
        ({"shards": [{"name": "../../etc/passwd", "size_bytes": 1, "sha256": ""}]}, r"shards\[0\] has no proper name"),
        ({"shards": [{"name": "shard_000.bin", "size_bytes": True, "sha256": ""}]}, r"shards\[0\] has no proper name"),
        ({"shards": [{"name": "shard_000.bin", "size_bytes": 10**12, "sha256": ""}]}, "not what it says of the whole"),
        ({"packed_size_bytes": 3000}, "not what it says of the whole"),
        ({"packed_sha256": "0"}, "the sha256 of the whole"),
        ({"sha256": "0"}, "the sha256 of the whole"),
        ({"size_bytes": 7}, "the whole has 3072 bytes, the index says 7"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index, changes, says):
    change_index(index, **changes)
    with pytest.raises(ShardError, match=says) as caught:
        join_shards(index)
    assert caught.value.exit_code == 1


def test_a_small_shard_that_unpacks_to_more_than_it_says_is_refused(tmp_path):
    bomb = shard_bytes(b"\0" * 10**6, 1024, "gzip")
    index = write_shards(bomb, tmp_path / "shards")
    change_index(index, size_bytes=100)
    with pytest.raises(ShardError, match="the whole has 101 bytes, the index says 100"):
        join_shards(index)


def test_an_index_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(JsonTextError):
        join_shards(tmp_path / "index.json")


def test_a_folder_is_there_with_all_of_its_files_or_not_at_all(tmp_path):
    def files():
        yield "a", b"1"
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="parts: no space left on device"):
        write_folder(tmp_path / "parts", files())
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "new" / "parts", [("a", b"1"), ("b", b"2")])
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "parts").iterdir()} == {"a": b"1", "b": b"2"}
    assert [stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) for name in ("parts", "parts/a")] == [0o755, 0o644]
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", [("a", b"1")])
    with pytest.raises(WriteError, match="the folder is not empty"):
        write_folder(tmp_path / "empty", [("a", b"1")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]


@pytest.mark.parametrize(
    ("text", "size"), [("800KiB", 819200), ("1MiB", 1048576), ("1024", 1024), ("2 kb", 2000), ("5B", 5)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5MiB", "1GiB", "KiB", "9" * 30])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(EditError, match="size"):
        parse_size(text)


def test_shards_that_cannot_be_are_refused():
    with pytest.raises(EditError, match="shards of 5 bytes are too small"):
        shard_bytes(DATA, 5)
    with pytest.raises(EditError, match="nothing to put into shards"):
        shard_bytes(b"", 1024)
    with pytest.raises(EditError, match="choose one of none, gzip"):
        shard_bytes(DATA, 5000, "zstd")
