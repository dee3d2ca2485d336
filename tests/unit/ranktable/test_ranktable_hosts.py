"""Host lists: parsing, expansion, folding, and the faulty piece in each refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable import Host, HostList, HostListError
from ranktable.hostlist.brackets import parse_numbers

NAMES = st.from_regex(r"[a-z]{1,4}[0-9]{0,3}(?:-[a-z0-9]{1,3})?", fullmatch=True) | st.ip_addresses().map(str)
HOSTS = st.lists(
    st.builds(Host, NAMES, st.none() | st.integers(1, 99)), min_size=1, max_size=8, unique_by=lambda h: h.name
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:8,b:8", [("a", 8), ("b", 8)]),
        (" a:8 , b ", [("a", 8), ("b", None)]),
        ("a:8\nb:4\n", [("a", 8), ("b", 4)]),
        ("node[08-10]:8", [("node08", 8), ("node09", 8), ("node10", 8)]),
        ("node[8-10]", [("node8", None), ("node9", None), ("node10", None)]),
        ("n[1,3-4]x:2", [("n1x", 2), ("n3x", 2), ("n4x", 2)]),
        ("n[0-8/4]:1", [("n0", 1), ("n4", 1), ("n8", 1)]),
        ("r[1-2]n[1-2]", [("r1n1", None), ("r1n2", None), ("r2n1", None), ("r2n2", None)]),
        ("10.0.0.[9-10]:8", [("10.0.0.9", 8), ("10.0.0.10", 8)]),
        ("[fe80::1]:8,[fe80::2]", [("fe80::1", 8), ("fe80::2", None)]),
        ("fe80::1", [("fe80::1", None)]),
        ("gpu-1.rack_2.example.org:4", [("gpu-1.rack_2.example.org", 4)]),
    ],
)
def test_a_list_is_expanded(text, expected):
    assert [(host.name, host.num_devices) for host in HostList.parse(text)] == expected


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("node01:8,node02:8,node03:8", "node[01-03]:8"),
        ("n9,n10,n11", "n[9-11]"),
        ("n09,n10", "n[09-10]"),
        ("n9:8,n10:4", "n9:8,n10:4"),
        ("n2,n1", "n[2,1]"),
        ("a:8,b:8", "a:8,b:8"),
        ("10.0.0.1:8,10.0.0.2:8", "10.0.0.[1-2]:8"),
        ("[fe80::1]:8", "[fe80::1]:8"),
    ],
)
def test_a_list_is_folded(text, folded):
    assert str(HostList.parse(text)) == folded


@given(HOSTS)
def test_folding_and_parsing_give_the_same_list(hosts):
    listed = HostList.of(hosts)
    assert HostList.parse(str(listed)) == listed


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("a:8,,b:8", ",,"),
        ("a:8,a:8", "a"),
        ("n[1-2],n2", "n2"),
        ("a:0", "a:0"),
        ("a:x", "a:x"),
        ("a:-1", "a:-1"),
        ("b:8,node[1-4:8", "node[1-4:8"),
        ("node1-4]:8", "node1-4]"),
        ("node[[1-4]]", "node[["),
        ("node[]", "node[]"),
        ("node[4-1]", "node[4-1]"),
        ("node[01-3]", "node[01-3]"),
        ("node[a-c]", "node[a-c]"),
        ("node[1-999999999]", "node[1-999999999]"),
        ("n[1-1000]m[1-1000]", "n[1-1000]m[1-1000]"),
        ("bad host:8", "bad host"),
        ("10.*.*.*:8", "10.*.*.*"),
        ("10.0.0.256:8", "10.0.0.256"),
        ("a:4097", "a:4097"),
        ("a:8,", "a:8,"),
        ("[zz::1]:8", "zz::1"),
        ("-a:8", "-a"),
    ],
)
def test_a_bad_list_is_refused_with_its_faulty_piece(text, part):
    with pytest.raises(HostListError) as caught:
        HostList.parse(text)
    assert part in caught.value.part
    assert caught.value.remedy


@given(st.text(alphabet="ab01-[]:,/ .\n", max_size=12))
def test_any_text_gives_a_list_or_an_error_of_ours(text):
    try:
        assert len(HostList.parse(text)) > 0
    except HostListError as error:
        assert error.remedy


def test_numbers_are_listed():
    assert parse_numbers("0-3,6") == [0, 1, 2, 3, 6]
    for bad in ("", "a", "3-1", "1,1", "1-"):
        with pytest.raises(HostListError):
            parse_numbers(bad)
