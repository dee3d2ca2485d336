"""Bytes to JSON: each usual mistake is named with its line and column."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable.errors import JsonTextError, RankTableError
from ranktable.problem import Position, join_index, join_key
from ranktable.reading.document import MAX_DEPTH, parse_document
from ranktable.reading.positions import locate_paths

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)

FAULTS = [
    (b'{"a": 1,}', (1, 8), "comma stands after the last item"),
    (b'{"a": [1,\n 2,\n]}', (2, 3), "comma stands after the last item"),
    (b'{\n  // note\n  "a": 1}', (2, 3), "comment"),
    (b'{"a": /* note */ 1}', (1, 7), "comment"),
    (b'{"a": 1 # note\n}', (1, 9), "comment"),
    (b'{"a": [1, ...]}', (1, 11), "elision"),
    (b"{'a': 1}", (1, 2), "quotation mark"),
    (b'{"a": True}', (1, 7), "True"),
    (b'{"a": NaN}', (1, 7), "NaN"),
    (b'{"n": "NaN", "a": -Infinity}', (1, 19), "-Infinity"),
    (b'{"a": 1e999}', (1, 7), "too large"),
    (b'{"a": ' + b"9" * 5000 + b"}", (1, 7), "more than 400 digits"),
    (b'{"a": 1', (1, 8), "ends in the middle"),
    (b'{"a": "un', (1, 7), "ends in the middle"),
    (b'{"a": 1} {"b": 2}', (1, 10), "follows after the end"),
    (b'{"a": 1 "b": 2}', (1, 9), "comma or a closing bracket is missing"),
    (b'{"a": "x\ny"}', (1, 9), "line break or control character"),
    (b"", (1, 1), "empty"),
    (b" \n ", (1, 1), "empty"),
    (b"[]", (1, 1), "an array, not an object"),
    (b"3", (1, 1), "a number, not an object"),
    (b'{"a": "\xe9"}', (1, 8), "byte 0xe9 is not UTF-8"),
    ('{"a": 1}'.encode("utf-16"), (1, 1), "UTF-16"),
    ('{"a": 1}'.encode("utf-32"), (1, 1), "UTF-32"),
    ('{"a": 1}'.encode("utf-16-le"), (1, 1), "UTF-16"),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", (1, 70), "nested deeper than 64"),
    (b'{"a": ' + b"[" * 100_000, (1, 70), "nested deeper than 64"),
]


@pytest.mark.parametrize(("data", "place", "says"), FAULTS, ids=[str(place) + says for _, place, says in FAULTS])
def test_a_fault_is_named_at_its_place(data, place, says):
    with pytest.raises(JsonTextError) as caught:
        parse_document(data, "t.json")
    assert says in caught.value.message
    assert (caught.value.position.line, caught.value.position.column) == place
    assert caught.value.remedy
    assert caught.value.problem.rule == "R1"
    assert str(caught.value).startswith(f"t.json:{place[0]}:{place[1]}: ")


def test_a_byte_order_mark_is_skipped_and_remembered():
    document = parse_document(b'\xef\xbb\xbf{"a": 1}')
    assert (document.value, document.has_bom) == ({"a": 1}, True)


def test_repeated_keys_are_listed_with_their_places():
    document = parse_document(b'{"a": 1, "b": [{"c": 1,\n "c": 2}], "a": {"b": 0}}')
    assert [(repeat.path, repeat.position) for repeat in document.repeated_keys] == [
        ("b[0].c", Position(2, 2)),
        ("a", Position(2, 12)),
    ]
    assert document.value == {"a": {"b": 0}, "b": [{"c": 2}]}


def test_the_deepest_nesting_that_is_allowed_is_read():
    inside = MAX_DEPTH - 1
    assert parse_document(b'{"a": ' + b"[" * inside + b"]" * inside + b"}").value


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
        child_path = join_key(path, step) if isinstance(value, dict) else join_index(path, step)
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
