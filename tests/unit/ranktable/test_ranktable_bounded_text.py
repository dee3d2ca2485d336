"""Foreign YAML and JSON: what stands for too much is refused before it is built."""

import itertools
import json

import pytest
import yaml
from asked_cases import slow_but
from hypothesis import given
from hypothesis import strategies as st

from ranktable.bounded_text import MAX_DIGITS, TextError, compose_yaml, load_json, load_yaml, load_yaml_documents

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
