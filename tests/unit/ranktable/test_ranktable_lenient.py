"""The lenient reader: JSON as it is, damaged JSON repaired and said, the rest refused by name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import JsonTextError
from ranktable.document import parse_document
from ranktable.fix import parse_leniently, repair_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("a1'\"\\/#*,]}\u201c\u201d\u2018 \nTrue", max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab,'#/*]", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.sampled_from([None, 2]), st.booleans())
def test_json_is_read_as_the_strict_reader_reads_it(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert repair_text(text) == (text, ())
    document, repairs = parse_leniently(text.encode())
    assert (document.value, repairs) == (parse_document(text.encode()).value, ())


def write_by_hand(value):
    """Return JSON with a comma after every item and comments that look like JSON between them."""
    if isinstance(value, dict):
        return (
            "{ /* } */" + "".join(f"{json.dumps(k)}: {write_by_hand(v)}, // it's, \"\n" for k, v in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[# ],\n" + "".join(f"{write_by_hand(item)} /* , */ ,\n" for item in value) + " ]"
    return json.dumps(value, ensure_ascii=False)


@settings(deadline=None, max_examples=200)
@given(VALUES)
def test_comments_and_last_commas_change_no_value(value):
    text = write_by_hand({"key": value})
    document, repairs = parse_leniently(text.encode())
    assert document.value == {"key": value}
    assert document.text.count("\n") == text.count("\n")
    assert {repair.after for repair in repairs} == {""}


@settings(deadline=None, max_examples=300)
@given(st.text("{}[]\"'\\,:#/*\n01aTrue\u201c\u201d\u2018\u2019.", max_size=40) | st.binary(max_size=20))
def test_any_text_gives_an_object_or_an_error_of_ours(data):
    try:
        document, _ = parse_leniently(data if isinstance(data, bytes) else data.encode())
    except JsonTextError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(document.value, dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ('{"a": [1, // one, ]\n ]}', {"a": [1]}),
        ('{"a": 1, /* x } */ }', {"a": 1}),
        ('# top\n{"a": "http://x/#y", "b": "/* kept */"}', {"a": "http://x/#y", "b": "/* kept */"}),
        ("{'a': 'it\\'s \"b\"', 'c': True, 'd': None}", {"a": 'it\'s "b"', "c": True, "d": None}),
        ("{\u201ca\u201d: \u201810.0.0.1\u2019}", {"a": "10.0.0.1"}),
        ('{"a": "True, None, \'b\',}"}', {"a": "True, None, 'b',}"}),
    ],
)
def test_what_hands_do_to_json_is_repaired(text, value):
    document, repairs = parse_leniently(text.encode())
    assert document.value == value
    assert bool(repairs) == (text != '{"a": "True, None, \'b\',}"}')


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_other_encodings_are_read(encoding):
    document, repairs = parse_leniently('{"a": "ä",}'.encode(encoding))
    assert document.value == {"a": "ä"}
    assert repairs[0].position is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": [1, ...]}', "1:11: an elision"),
        ('{// one\n"a": [{}, ...]}', "2:11: an elision"),
        ('{"a": 1', "ends in the middle"),
        ('{"a": 1 "b": 2}', "a comma or a closing bracket is missing"),
        ('{"a": [,]}', "1:8: "),
        ('{"a": [1,,]}', "1:10: "),
        ("{,}", "1:2: "),
        ("{'a': 'b}", "quotation mark"),
        ('{"a": 1 /* never closed', "comment"),
        ("[1,]", "an array, not an object"),
        ('{"a": NaN,}', "NaN"),
        ("\xff", "not UTF-8"),
    ],
)
def test_what_a_person_must_say_is_refused_at_its_place(text, says):
    with pytest.raises(JsonTextError, match=says.replace(".", r"\.")):
        parse_leniently(text.encode("latin-1"))


@pytest.mark.parametrize("unit", ['"\\', "'\\'", ",/*", ",  ", "/*", "\u201c", "'", "//", ",#"])
def test_hostile_text_is_read_in_linear_time(unit):
    with pytest.raises(JsonTextError):
        parse_leniently((unit * 100_000).encode())
