"""Dataclasses to JSON and back: what a host is asked and what it answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.record_json import decode_record, encode_record


@dataclass(frozen=True)
class Inner:
    name: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    path: Path
    share: float
    word: Literal["a", "b"] = "a"
    maybe: Inner | None = None
    either: int | str = 0
    pairs: tuple[tuple[str, str], ...] = ()
    table: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: list[dict[str, int | str]] = field(default_factory=list)
    flag: bool = False


texts = st.text(st.characters(codec="utf-8"), max_size=6)
inners = st.builds(Inner, texts, st.lists(st.integers(), max_size=3).map(tuple))
outers = st.builds(
    Outer,
    inners,
    st.sampled_from([Path("/"), Path("/a b/c"), Path("x")]),
    st.floats(allow_nan=False),
    word=st.sampled_from(["a", "b"]),
    maybe=st.none() | inners,
    either=st.integers() | texts,
    pairs=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    table=st.dictionaries(st.integers(), st.lists(st.integers(), max_size=2).map(tuple), max_size=2),
    rows=st.lists(st.dictionaries(texts, st.integers() | texts, max_size=2), max_size=2),
    flag=st.booleans(),
)


@given(outers)
def test_record_comes_back_as_it_was(record: Outer) -> None:
    assert decode_record(Outer, json.loads(json.dumps(encode_record(record)))) == record


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "Expected `object`, got `array`"),
        ({"name": 1}, r"Expected `str`, got `int` - at `\$\.name`"),
        ({"name": "x", "numbers": "12"}, "Expected `array`, got `str`"),
        ({"name": "x", "numbers": [True]}, "Expected `int`, got `bool`"),
        ({}, "name"),
    ],
)
def test_value_of_another_form_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_record(Inner, value)


plain = st.none() | st.booleans() | st.integers() | texts


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_no_json_value_raises_anything_but_value_error(value: object) -> None:
    try:
        decode_record(Outer, value)
    except ValueError:
        return
    raise AssertionError("taken for a record")
