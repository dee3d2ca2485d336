"""Bracket lists of names: what they stand for, the way back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.hosts.brackets import MAX_HOSTS, expand, fold

LISTS = [
    ("h1", ["h1"]),
    ("h1,h2", ["h1", "h2"]),
    (" h1 , h2 ", ["h1", "h2"]),
    ("node[1-3]", ["node1", "node2", "node3"]),
    ("node[01-03,07].dc", ["node01.dc", "node02.dc", "node03.dc", "node07.dc"]),
    ("n[8-11]", ["n8", "n9", "n10", "n11"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ("n[099-101]", ["n099", "n100", "n101"]),
    ("n[98-100]", ["n98", "n99", "n100"]),
    ("n[5]", ["n5"]),
    ("n[3,1,2]", ["n3", "n1", "n2"]),
    ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ("[1-2].dc", ["1.dc", "2.dc"]),
    ("n[1-2]:8,[fd77::9]:4", ["n1:8", "n2:8", "[fd77::9]:4"]),
    ("cpu[01-02],gpu3", ["cpu01", "cpu02", "gpu3"]),
]

REFUSED = [
    ("", "'' has an empty name"),
    ("h1,,h2", "'h1,,h2' has an empty name"),
    ("h1,", "'h1,' has an empty name"),
    ("n[1-3", r"'n\[1-3' has a \[ without its other half"),
    ("n1-3]", r"'n1-3\]' has a \] without its other half"),
    ("n[1[2]]", r"has a \[ without its other half"),
    ("n[]", r"'' in 'n\[\]' is no range"),
    ("n[a-c]", r"'a-c' in 'n\[a-c\]' is no range"),
    ("n[1-2-3]", r"'1-2-3' in 'n\[1-2-3\]' is no range"),
    ("n[1,]", r"'' in 'n\[1,\]' is no range"),
    ("n[-3]", r"'-3' in 'n\[-3\]' is no range"),
    ("n[\u0661-\u0663]", "is no range"),
    ("n[1-9999999999]", r"'1-9999999999' in .* is no range"),
    ("n[3-1]", r"3-1 in 'n\[3-1\]' runs backwards; write 1-3"),
    ("n[1-010]", "1-010 in .* is of two widths"),
    ("n[1-16385]", r"'n\[1-16385\]' makes more than 16384 hosts"),
    ("h,n[1-16384]", r"'n\[1-16384\]' makes more than 16384 hosts"),
    ("n[1-999][1-999][1-999][1-999]", "makes more than 16384 hosts"),
    ("n[0-999999999,0-999999999]", "makes more than 16384 hosts"),
    ("x" * 1_000_001, "more than 1000000 characters"),
]

LETTERS = st.text(alphabet="ab.-", max_size=3)
NAMES = st.tuples(LETTERS, st.text(alphabet="0129", max_size=4), LETTERS).map("".join).filter(bool)


@pytest.mark.parametrize(("text", "names"), LISTS)
def test_list_stands_for_these_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_list_is_refused_with_its_source(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^here: .*{message}"):
        expand(text, "here")


def test_as_many_hosts_as_are_allowed_are_taken() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["h"], "h"),
        (["h1"], "h1"),
        (["h", "h0", "h1", "h"], "h,h[0-1],h"),
        (["h0123456789", "h1"], "h0123456789,h1"),
        (["h1", "h2", "h3"], "h[1-3]"),
        (["h1", "h3", "h4", "h2"], "h[1,3-4,2]"),
        (["n08.dc", "n09.dc", "n10.dc", "m1.dc"], "n[08-10].dc,m1.dc"),
        (["n9", "n10", "n010"], "n[9-10,010]"),
        (["10.0.0.9", "10.0.0.10"], "10.0.0.[9-10]"),
        (["fd77::9", "fd77::a"], "fd77::9,fd77::a"),
    ],
)
def test_names_are_folded(names: list[str], folded: str) -> None:
    assert fold(names) == folded


@given(st.lists(NAMES, min_size=1, max_size=12))
@settings(max_examples=80)
def test_folded_names_come_back_in_their_order(names: list[str]) -> None:
    assert expand(fold(names)) == names


@given(st.text(alphabet="[]0123456789-,ab:@ ", max_size=14) | st.text(max_size=8))
@settings(max_examples=120)
def test_any_text_is_a_list_or_wrong_input(text: str) -> None:
    try:
        assert all(expand(text))
    except UsageError as error:
        assert "\n" not in str(error)
