"""Files in and out: what is in the way is named, nothing half-written is left, pipes and links stay what they are.
Foreign YAML and JSON: what stands for too much is refused before it is built."""

import io
import itertools
import json
import os
import stat
import subprocess
import sys
import threading

import pytest
import yaml
from asked_cases import slow_but
from hypothesis import given
from hypothesis import strategies as st

from ranktable import build_table, encode_table, files, read_table, validate_file, write_table
from ranktable.bounded_text import MAX_DIGITS, TextError, compose_yaml, load_json, load_yaml, load_yaml_documents
from ranktable.errors import NotReadyError, ReadError, WriteError
from ranktable.files import replace_file, write_whole

TABLE = build_table([("10.0.0.1", 8)])
TEXT = encode_table(TABLE).encode()


def test_writing_names_what_is_in_the_way(tmp_path):
    with pytest.raises(WriteError, match=r"it is a directory; name a file in it"):
        write_table(tmp_path, TABLE)
    with pytest.raises(WriteError, match=r"create the folder .*missing first"):
        write_table(tmp_path / "missing" / "t.json", TABLE)


def test_reading_names_what_is_in_the_way(tmp_path):
    with pytest.raises(ReadError, match="it is a directory"):
        read_table(tmp_path)
    with pytest.raises(ReadError, match="no such file or directory; check the path"):
        read_table(tmp_path / "missing.json")
    with pytest.raises(ReadError):
        read_table("nul\0byte")


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1024**2)
    path = tmp_path / "large.json"
    path.write_bytes(b" " * (1024**2 + 1))
    with pytest.raises(ReadError, match="larger than 1 MiB"):
        read_table(path)


@pytest.mark.parametrize(
    "text",
    [TEXT.replace(b"completed", b"initializing"), b'{"version": "1.0", "status": "initializing", "server_list": []}'],
)
def test_a_table_in_the_making_is_not_ready(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(NotReadyError) as caught:
        read_table(path)
    assert caught.value.exit_code == 3


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "t.json"
    os.mkfifo(path)
    return path


def test_a_pipe_without_a_writer_is_refused(fifo, monkeypatch):
    monkeypatch.setattr(files, "WAIT_FOR_WRITER_S", 0)
    with pytest.raises(ReadError, match="it is a pipe that nothing has written to for 0 s"):
        read_table(fifo)


def test_a_pipe_whose_writer_is_slow_is_waited_for(fifo, monkeypatch):
    monkeypatch.setattr(files, "WAIT_FOR_WRITER_S", 0)
    writer = os.open(fifo, os.O_RDWR)
    set_blocking, waits, read = os.set_blocking, threading.Event(), []
    monkeypatch.setattr(os, "set_blocking", lambda *arguments: waits.set() or set_blocking(*arguments))
    reader = threading.Thread(target=lambda: read.append(read_table(fifo)))
    reader.start()
    assert waits.wait(30), "the reader has given up on a pipe that has a writer"
    os.write(writer, TEXT)
    os.close(writer)
    reader.join()
    assert read == [TABLE]


def test_links_in_a_circle_and_into_nothing_are_named(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "dangling.json").symlink_to("gone.json")
    with pytest.raises(ReadError, match=r"too many levels.*lead in a circle"):
        read_table(tmp_path / "loop.json")
    with pytest.raises(ReadError, match=r"it is a symbolic link to gone\.json, which is not there"):
        read_table(tmp_path / "dangling.json")


def test_a_link_is_a_warning_on_ascend_as_a_mounted_configmap_is_one(tmp_path):
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "hccl.json").write_bytes(TEXT)
    (tmp_path / "hccl.json").symlink_to("..data/hccl.json")
    assert read_table(tmp_path / "hccl.json") == TABLE
    on_ascend = [problem.message for problem in validate_file(tmp_path / "hccl.json", chip="a2").problems]
    assert [message[:45] for message in on_ascend] == ["the file is a symbolic link, as in a mounted "]
    assert validate_file(tmp_path / "hccl.json", device_target="gpu").problems == ()
    assert validate_file(tmp_path / "..data" / "hccl.json", chip="a2").problems == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "the name is empty"), ("n" * 5000, "file name too long"), ("/dev/null/t.json", "not a directory")],
)
def test_odd_names_are_refused_in_one_short_line(name, says):
    with pytest.raises(ReadError, match=says) as caught:
        read_table(name)
    assert len(str(caught.value)) < 400


def test_standard_input_may_be_closed_or_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ReadError, match="standard input is closed"):
        read_table("-")
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stdin", closed)
    with pytest.raises(ReadError, match="standard input is closed"):
        read_table("-")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_of_another_user_is_refused(tmp_path):
    secret = tmp_path / "t.json"
    secret.write_bytes(TEXT)
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    program = """
import os
from ranktable.cli import main
main(["validate", "missing.json"])  # imports everything while the interpreter can still be read
os.setgid(65534), os.setuid(65534)
raise SystemExit(main(["validate", "t.json"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    last = "ranktable: error: cannot read t.json: permission denied; make it readable for this user"
    assert done.stderr.splitlines()[1:] == [last]


OLD, NEW = b"old", b"new"


def make_null(path):
    """A node like /dev/null, of the test's own."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes device nodes")


@pytest.mark.parametrize("size", [3, 1_000_000])
def test_a_pipe_gets_all_to_its_reader_and_stays_one(tmp_path, size):
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write_whole(fifo, b"x" * size)
    reader.join()
    assert read == [b"x" * size]
    assert fifo.is_fifo()


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        write_whole(tmp_path / "fifo", NEW, may_wait=False)
    monkeypatch.setattr(files, "WAIT_FOR_READER_S", 0)
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        write_whole(tmp_path / "fifo", NEW)
    stuck = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="it is a pipe that nobody reads"):
            write_whole(tmp_path / "fifo", b"x" * 1_000_000)
    finally:
        os.close(stuck)


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_chain_of_links_the_target_is_written(tmp_path, is_there):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    if is_there:
        target.write_bytes(OLD)
    (tmp_path / "folder" / "second").symlink_to("target")
    (tmp_path / "first").symlink_to("folder/second")
    write_whole(tmp_path / "first", NEW)
    assert target.read_bytes() == NEW and not target.is_symlink()
    assert os.readlink(tmp_path / "first") == "folder/second"
    assert sorted(os.listdir(tmp_path / "folder")) == ["second", "target"]


def test_standard_output_by_its_name_in_dev_is_written_into(tmp_path):
    """A pipe or a file that the shell has opened has no name that could be replaced, and keeps what stands in it."""
    program = "from ranktable.files import write_whole; write_whole('/dev/stdout', b'new')"
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert piped.stdout == NEW
    with (tmp_path / "out").open("wb") as out:
        out.write(OLD)
        out.flush()
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_bytes() == OLD + NEW


def test_permissions_are_those_given_or_those_that_were_there(tmp_path):
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        write_whole(path, OLD)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write_whole(path, NEW)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
        write_whole(path, NEW, mode=0o646)
        assert stat.S_IMODE(path.stat().st_mode) == 0o646
    finally:
        os.umask(before)


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(KeyboardInterrupt), files.open_whole(path) as stream:
        stream.write(NEW)
        raise KeyboardInterrupt
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["link", "fifo", "device", "file"])
def test_in_a_folder_of_ours_whatever_somebody_has_put_there_is_replaced(tmp_path, kind):
    victim, path = tmp_path / "victim", tmp_path / "report.json"
    victim.write_bytes(OLD)
    {"link": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path), "device": lambda: make_null(path)}.get(
        kind, lambda: path.write_bytes(OLD)
    )()
    replace_file(path, NEW, mode=0o600)
    assert stat.S_ISREG(path.lstat().st_mode) and stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert (path.read_bytes(), victim.read_bytes()) == (NEW, OLD)


LETTERS = "abcdefghi"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise(LETTERS)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n" for before, name in itertools.pairwise(LETTERS)
)
REFUSED = {
    "aliases of aliases": (BOMB, "line 5: aliases repeat more than 100000 values; write them out"),
    "merged mappings": (MERGES, "aliases repeat more than 100000 values"),
    "aliases of a long text": (f"a: &a '{'x' * 100_000}'\nb: [{'*a, ' * 1000}]", "aliases repeat more than 100000"),
    "alias of itself": ("b: &a [1, *a]", r"line 1: \*a contains itself; write it out"),
    "alias of nothing": ("b: *a", "line 1: not YAML .*undefined alias"),
    "many values": ("[" + "x," * 600_000 + "]", "more than 500000 values; split it"),
    "many documents": ("---\n" * 600_000, "more than 500000 values"),
    "lists": ("[" * 500_000, "line 1: more than 100 levels deep; write it flatter"),
    "blocks": ("- " * 100_000 + "a", "line 1: more than 100 levels deep"),
    "digits": ("a: " + "9" * 5_000, "line 1: a number of more than 1000 digits; put text into quotes"),
    "sexagesimal digits": ("a: 1" + ":59" * 300_000, "a number of more than 1000 digits"),
    "digits with a tag": ("a: !!int '" + "9" * 5_000 + "'", "a number of more than 1000 digits"),
    "code": ("!!python/object/apply:os.system [id]", "not YAML .*could not determine a constructor"),
    "key twice": ("a: 1\na: 2", "line 2: not YAML .key 'a' is twice.; correct the line"),
    "two documents": ("a: 1\n---\nb: 1", "several documents instead of one"),
    "no date": ("a: 2024-13-45", "not YAML"),
    "NUL": ("a: \0", "not YAML .*; save it as plain text"),
}


@pytest.mark.parametrize("name", slow_but(REFUSED.keys() - {"many values", "many documents"}, REFUSED))
def test_yaml_that_stands_for_too_much_or_is_none_is_refused_in_one_line(name):
    text, message = REFUSED[name]
    with pytest.raises(TextError, match=message) as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_aliases_merges_and_long_texts_of_an_ordinary_manifest_are_read():
    text = f"base: &base {{a: 1}}\nmore: {{<<: *base, b: 2}}\nlist: [*base, *base]\ntext: '{'9' * 5000}'\n"
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml_documents("a: 1\n---\n---\nb: 2\n") == [{"a": 1}, None, {"b": 2}]
    assert load_yaml("") is None


def test_a_tree_of_nodes_has_no_aliases():
    with pytest.raises(TextError, match=r"line 2: \*a: aliases are not read; write the value again"):
        compose_yaml("a: &a 1\nb: *a", max_depth=9)
    assert compose_yaml("", max_depth=9) is None


@given(st.text(alphabet="ab: -[]{}&*<!'\"|>\n0.", max_size=60))
def test_any_text_gives_the_value_of_the_safe_loader_or_an_error_of_ours(text):
    try:
        documents = load_yaml_documents(text)
    except TextError:
        return
    assert repr(documents) == repr(list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 500_000, "more than 100 levels deep"),
        ('{"a":' * 200 + "1" + "}" * 200, "more than 100 levels deep"),
        ("9" * (MAX_DIGITS + 1), "a number of more than 1000 digits"),
        ('{\n"a": ', r"not JSON \(line 2: Expecting value\); correct the line"),
        (b"\xff\xff", "not UTF-8 text"),
    ],
)
def test_json_that_stands_for_too_much_or_is_none_is_refused_in_one_line(text, message):
    with pytest.raises(TextError, match=message) as caught:
        load_json(text)
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda part: st.lists(part) | st.dictionaries(st.text(), part),
        max_leaves=8,
    )
)
def test_json_is_read_as_ever(value):
    assert load_json(json.dumps(value)) == value
    assert load_json("[" * 100 + "1" + "]" * 100) is not None
