"""The odd ones out are named, not the many that agree."""

from __future__ import annotations

import pytest
from fleet_reports import make_entries

from msrun.launch.preflight.finding import find_majority

CASES: list[tuple[str, str]] = [
    # what h1, h2, ... have; in words
    ("aaba", "h3 has b, the other 3 hosts a"),
    ("aabb", "h[3-4] have b, the other 2 hosts a"),
    ("abbb", "h1 has a, the other 3 hosts b"),
    ("ab", "h2 has b, h1 a"),
    ("abcaa", "h2 has b, h3 has c, the other 3 hosts a"),
    ("aabcdefg", "h3 has b, h4 has c, h5 has d, 3 more have others, the other 2 hosts a"),
]


@pytest.mark.parametrize(("letters", "text"), CASES)
def test_odd_hosts_are_named(letters: str, text: str) -> None:
    found = find_majority(dict(enumerate(letters)))
    assert found.odd and found.describe(make_entries(len(letters))) == text


@pytest.mark.parametrize("letters", ["", "a", "aaaa"])
def test_nobody_is_odd_where_all_agree(letters: str) -> None:
    assert not find_majority(dict(enumerate(letters))).odd
