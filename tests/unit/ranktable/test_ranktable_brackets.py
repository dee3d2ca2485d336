"""Bracket lists of names: what they stand for, the way back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable.errors import HostListError
from ranktable.hosts.brackets import MAX_HOSTS, MAX_LIST_CHARS, expand, fold

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
    ("n[0-8/4]", ["n0", "n4", "n8"]),
    ("n[00-10/5]", ["n00", "n05", "n10"]),
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
    ("n[]", r"'n\[\]' has '' for a range"),
    ("n[a-c]", r"'n\[a-c\]' has 'a-c' for a range"),
    ("n[1-2-3]", "has '1-2-3' for a range"),
    ("n[1,]", "has '' for a range"),
    ("n[-3]", "has '-3' for a range"),
    ("n[1-3/0]", "has '1-3/0' for a range"),
    ("n[\u0661-\u0663]", "for a range"),
    ("n[1-9999999999]", "has '1-9999999999' for a range"),
    ("n[3-1]", r"'n\[3-1\]' has the range 3-1, which runs backwards; write 1-3"),
    ("n[1-010]", "has the range 1-010 with ends of two widths"),
    ("n[01-100]", "has the range 01-100 with ends of two widths"),
    (f"n[1-{MAX_HOSTS + 1}]", rf"'n\[1-{MAX_HOSTS + 1}\]' makes more than {MAX_HOSTS} hosts"),
    (f"h,n[1-{MAX_HOSTS}]", rf"'n\[1-{MAX_HOSTS}\]' makes more than {MAX_HOSTS} hosts"),
    ("n[1-999][1-999][1-999][1-999]", f"makes more than {MAX_HOSTS} hosts"),
    ("n[0-999999999,0-999999999]", f"makes more than {MAX_HOSTS} hosts"),
    ("x" * (MAX_LIST_CHARS + 1), f"more than {MAX_LIST_CHARS} characters"),
]

LETTERS = st.text(alphabet="ab.-", max_size=3)
NAMES = st.tuples(LETTERS, st.text(alphabet="0129", max_size=4), LETTERS).map("".join).filter(bool)


@pytest.mark.parametrize(("text", "names"), LISTS)
def test_list_stands_for_these_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_list_is_refused(text: str, message: str) -> None:
    with pytest.raises(HostListError, match=message):
        expand(text)


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
        (["n98", "n99", "n100"], "n[98-100]"),
        (["n08", "n99", "n100"], "n[08,99-100]"),
        (["n09", "n10", "n11"], "n[09-11]"),
        (["10.0.0.9", "10.0.0.10"], "10.0.0.[9-10]"),
        ([f"n{i:04d}" for i in range(1, 4097)], "n[0001-4096]"),
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
    except HostListError as error:
        assert "\n" not in str(error)
