"""Tables of every dialect with one odd value in one place: reported or read, never anything else."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import BuildError, RankTableError, parse_table
from ranktable.profile import build_profile
from ranktable.reading.document import parse_document
from ranktable.tables import encode_document
from ranktable.validate import validate_document

CATALOGUE = Path(__file__).parent / "catalogue"
GOOD = sorted(CATALOGUE.glob("*/good_*.json"))
ODD_VALUES = [None, True, -1, 0, 7, 10**30, 1.5, "", "7", "-1", "*", "x", "::1", [], [[]], [3], {}, [{}], {"x": []}]


def places_in(value):
    """Return the holders and keys of everything in a JSON value."""
    found = []
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(member, dict | list):
            found += places_in(member)
    return found


@pytest.mark.parametrize("path", GOOD, ids=[f"{path.parent.name}-{path.stem}" for path in GOOD])
def test_one_odd_value_is_reported_or_read_and_never_raises(path):
    good = json.loads(path.read_bytes())

    @settings(max_examples=25)
    @given(st.data())
    def check(data):
        value = copy.deepcopy(good)
        holder, key = data.draw(st.sampled_from(places_in(value)))
        if isinstance(holder, dict) and data.draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = copy.deepcopy(data.draw(st.sampled_from(ODD_VALUES)))
        text = json.dumps(value).encode()
        try:
            problems = validate_document(parse_document(text, "t.json"), build_profile()).problems
            table = parse_table(text)
        except RankTableError:
            return
        assert all(problem.message and problem.remedy and problem.position for problem in problems)
        try:
            written = encode_document(table)
        except BuildError as error:
            assert error.remedy
            return
        assert parse_table(json.dumps(written)) == table

    check()
