"""Bytes to JSON: each usual mistake is named with its line and column."""

import base64
import bz2
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable import document as positions
from ranktable.document import MAX_REPEATS, Lines, locate_paths, parse_document
from ranktable.errors import JsonTextError, RankTableError
from ranktable.problem import Position, join_key

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)

FAULTS = [
    (b'{"a": 1,}', (1, 8), "comma stands after the last item"),
    (b'{"a": [1,\n 2,\n]}', (2, 3), "comma stands after the last item"),
    (b'{\n  // note\n  "a": 1}', (2, 3), "comment"),
    (b'{"a": [1, ...]}', (1, 11), "elision"),
    (b"{'a': 1}", (1, 2), "quotation mark"),
    (b'{"a": True}', (1, 7), "True"),
    (b'{"a": NaN}', (1, 1), "NaN"),
    (b'{"a": 1e999}', (1, 1), "too large"),
    (b'{"a": ' + b"9" * 5000 + b"}", (1, 1), "more than 400 digits"),
    (b'{"a": 1', (1, 8), "ends in the middle"),
    (b'{"a": "un', (1, 7), "ends in the middle"),
    (b'{"a": 1} {"b": 2}', (1, 10), "a second object follows"),
    (b'{"a": 1}}', (1, 9), "a closing bracket too many"),
    (b'{"a": 1} done', (1, 10), "text follows after the end"),
    (b'{"a": [1}]', (1, 9), "} closes what another bracket has opened"),
    (b'{"a": 01}', (1, 7), "a number stands here that JSON does not know"),
    (b'{"a": 1,, "b": 2}', (1, 9), "a comma stands here with nothing before it"),
    (b"{a: 1}", (1, 2), "a key stands here without double quotes"),
    ('{"a": ¤}'.encode(), (1, 7), "the character '\\xa4'"),
    (b'{"a": "\\x41"}', (1, 8), "a backslash stands here"),
    (b'{"a": {{ ip }}}', (1, 7), "a placeholder of a template"),
    (b'{"a": ${IP}}', (1, 7), "a placeholder of a template"),
    (b'{"a": 1}\0\0\0', (1, 9), "NUL bytes"),
    (b"\0" * 40, (1, 1), "nothing but NUL bytes"),
    (b'{"a": 1\n<<<<<<< HEAD\n}', (2, 1), "merge conflict"),
    (b'{"a":' + b"{}," * 1_000_001 + b"}", (1, 1), "more than 1,000,000 objects"),
    (b'{"a":[' + b"0," * 8_000_001 + b"0]}", (1, 1), "more than 8,000,000 members"),
    (b'"{\\"version\\": 1}"', (1, 1), "a JSON string that holds a table"),
    (b'{"a": 1 "b": 2}', (1, 9), "comma or a closing bracket is missing"),
    (b'{"a": "x\ny"}', (1, 9), "line break or control character"),
    (b"", (1, 1), "empty"),
    (b"[]", (1, 1), "an array, not an object"),
    (b'{"a": "\xe9"}', (1, 8), "byte 0xe9 is not UTF-8"),
    ('{"a": 1}'.encode("utf-16"), (1, 1), "UTF-16"),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", (1, 1), "nested deeper than 64"),
    (b'{"a": ' + b"[" * 100_000, (1, 1), "nested deeper than 64"),
]


GOOD = b'{"version": "1.0", "status": "completed", "server_list": []}'
FOREIGN = [
    (gzip.compress(GOOD), "gzip data"),
    (b"\x28\xb5\x2f\xfd rest", "zstd data"),
    (bz2.compress(GOOD), "bzip2 data"),
    (base64.encodebytes(GOOD * 200), "JSON in base64"),
    (base64.b64encode(gzip.compress(GOOD)), "gzip data in base64"),
    (b'version: "1.0"\nserver_list:\n- server_id: a\n', "YAML"),
    (b"apiVersion: v1\nkind: ConfigMap\n", "a Kubernetes manifest"),
    (b"<!DOCTYPE html><html></html>", "an HTML page"),
    (b'<?xml version="1.0"?><a/>', "XML"),
    (b"host1 slots=8\nhost2 slots=8\n", "a host file"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    (b"<<<<<<< HEAD\n{}\n", "a file with merge conflicts"),
    (b"```json\n{}\n```\n", "a Markdown code block"),
]


@pytest.mark.parametrize(("data", "says"), FOREIGN, ids=[says for _, says in FOREIGN])
def test_a_file_of_another_format_is_named(data, says):
    with pytest.raises(JsonTextError) as caught:
        parse_document(data, "t.json")
    assert caught.value.problem.message.startswith(f"the file is {says}")
    assert caught.value.remedy


def test_the_repeated_keys_of_a_hostile_text_are_listed_up_to_a_limit():
    document = parse_document(b"{" + b'"a":1,' * (MAX_REPEATS + 5) + b'"b":[{"c":1,"c":1}]}')
    assert len(document.repeated_keys) == MAX_REPEATS


def test_brackets_in_strings_do_not_hide_the_depth():
    hidden = b'["]",' * 70 + b'"[' * 1 + b'"' + b"]" * 70
    with pytest.raises(JsonTextError, match="nested deeper than 64"):
        parse_document(b'{"a":' + hidden + b"}")


@pytest.mark.parametrize(("data", "place", "says"), FAULTS, ids=[str(place) + says for _, place, says in FAULTS])
def test_a_fault_is_named_at_its_place(data, place, says):
    with pytest.raises(JsonTextError) as caught:
        parse_document(data, "t.json")
    assert says in caught.value.message
    assert (caught.value.position.line, caught.value.position.column) == place
    assert caught.value.remedy
    assert caught.value.problem.rule == "R1"
    assert str(caught.value).startswith(f"t.json:{place[0]}:{place[1]}: ")


def test_repeated_keys_are_listed_with_their_places():
    document = parse_document('{"a": 1, "é": [{"c": 1,\n "c": 2, "c": 3}], "a": {"b": 0}}'.encode())
    assert [(repeat.path, repeat.position) for repeat in document.repeated_keys] == [
        ('["\\u00e9"][0].c', Position(2, 2)),
        ('["\\u00e9"][0].c', Position(2, 10)),
        ("a", Position(2, 20)),
    ]
    assert document.value == {"a": {"b": 0}, "é": [{"c": 3}]}


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5), st.sampled_from([None, 1, 4]))
def test_any_json_object_is_read_as_json_reads_it(value, indent):
    assert parse_document(json.dumps(value, indent=indent).encode()).value == value


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_give_a_document_or_an_error_of_ours(data):
    try:
        assert isinstance(parse_document(data).value, dict)
    except RankTableError as error:
        assert str(error)


def paths_of(value, path=""):
    """Return the path of everything inside a value, with the value."""
    if not isinstance(value, dict | list):
        return {}
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for step, child in steps:
        child_path = join_key(path, step) if isinstance(value, dict) else f"{path}[{step}]"
        found |= {child_path: (step, child), **paths_of(child, child_path)}
    return found


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5), st.sampled_from([None, 1]), st.randoms())
def test_every_path_is_found_where_it_stands(value, indent, random):
    text = json.dumps(value, indent=indent)
    members = paths_of(value)
    wanted = random.sample(sorted(members), random.randint(0, len(members)))
    lines = text.split("\n")
    for path, place in locate_paths(text, wanted).items():
        step, child = members[path]
        rest = "\n".join([lines[place.line - 1][place.column - 1 :], *lines[place.line :]])
        first, _ = json.JSONDecoder().raw_decode(rest)
        assert first == (step if isinstance(step, str) else child)


def test_a_path_that_is_absent_gets_the_place_of_its_holder():
    text = '{\n "a": [\n  {"b": 1}]}'
    assert locate_paths(text, {"a[0].c", "z", "a[0].b"}) == {
        "a[0].c": Position(3, 3),
        "z": Position(1, 1),
        "a[0].b": Position(3, 4),
    }


def test_places_behind_a_flood_of_members_are_those_of_their_holder(monkeypatch):
    monkeypatch.setattr(positions, "MAX_STEPS", 10)
    text = json.dumps({"a": list(range(5)), "b": list(range(50)), "c": 1}, indent=1)
    places = locate_paths(text, {"a[3]", "b", "b[2]", "b[40]", "c"})
    assert places["a[3]"].line == 6
    assert places["b[2]"].line == 12
    assert places["b[40]"] == places["b"] == Position(9, 2)
    assert places["c"] == Position(1, 1)


@given(st.text(alphabet="ab\n\r", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_lines_are_counted_in_any_order(text, offsets):
    lines = Lines(text)
    for offset in (min(offset, len(text)) for offset in offsets):
        before = text[:offset].split("\n")
        assert lines.position_at(offset) == Position(len(before), len(before[-1]) + 1)
