"""Hostfiles: the forms of Open MPI, DeepSpeed and MPICH, what stands beside a name, and what is refused, and where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.hosts.host_list import parse_hostfile
from ranktable.hostlist.brackets import MAX_HOSTS

FORMS = [
    ("h1 slots=8\nh2 slots=4\n", [("h1", 8), ("h2", 4)]),
    ("h1:8\nh2:4", [("h1", 8), ("h2", 4)]),
    ("h1\nh2", [("h1", 0), ("h2", 0)]),
    ("h1\nh2\nh2\nh3\nh3\n", [("h1", 1), ("h2", 2), ("h3", 2)]),
    ("\ufeffh1 slots=8\r\n\r\nh2 slots=4\r\n", [("h1", 8), ("h2", 4)]),
    ("# hosts\n\n  \t\nh1 slots=8 # the first\n   # more\nh2\tslots=4", [("h1", 8), ("h2", 4)]),
    ("h1:8 slots=8", [("h1", 8)]),
    ("n[1-2] slots=3", [("n1", 3), ("n2", 3)]),
    ("a,b slots=3", [("a", 3), ("b", 3)]),
    ("h1 devices=4-7", [("h1", 4)]),
    ("[fd77::9]:2\nfd77::a slots=3", [("fd77::9", 2), ("fd77::a", 3)]),
]

REFUSED = [
    ("", "--hostfile f: is empty"),
    ("\ufeff\n \n", "--hostfile f: is empty"),
    ("# only\n\n  # comments\n", "--hostfile f: holds only comments and blank lines"),
    ("h1\nh2\nh1", "--hostfile f, line 3 and --hostfile f, line 1: h1 is given twice"),
    ("h1\nH1 slots=2", r"line 2 and --hostfile f, line 1: H1 \(h1\) is given twice"),
    ("10.0.0.1\nh2 address=10.0.0.1", r"h2 \(10.0.0.1\) is given twice"),
    ("h1 slots=0", "line 1: slots '0': must be a number from 1"),
    ("h1 slots=-1", "line 1: slots '-1': must be"),
    ("h1\nh2 slots=abc", "line 2: slots 'abc': must be"),
    ("h1 slots=", "line 1: slots has no value; write slots=value"),
    ("h1 slots = 8", "line 1: slots has no value; write slots=value without blanks around ="),
    ("h1 slots=1 slots=1", "line 1: slots is given twice"),
    ("h1:4 slots=8", "line 1: h1: slots is 4 and 8; write it once"),
    ("me@h1 user=you", "line 1: h1: user is me and you; write it once"),
    ("h1 slot=8", r"line 1: 'slot=8': no such key \(did you mean slots\?\); the keys are slots, devices"),
    ("h1 8", "line 1: '8': no such key; the keys are"),
    ("h1 max_slots=8", "line 1: 'max_slots=8': msrun starts as many workers as slots says"),
    ("h1 max-slots=8", "line 1: .* leave max-slots out"),
    ("h1 port=0", "line 1: port '0': must be a number from 1 to 65535"),
    ("h1 port=65536", "line 1: port '65536'"),
    ("h1 port=ssh", "line 1: port 'ssh'"),
    ("h1 user=-x", "line 1: user '-x'"),
    ("h1 python=python3", "line 1: python 'python3': give the absolute path"),
    ("h1 python=/a\x01b", "line 1: python"),
    ('h1 python="/a b', 'line 1: .* has a quote that does not close; write key="value"'),
    ("h1 address=h1.dc", "line 1: address 'h1.dc': give the numeric address"),
    ("h1 address=127.0.0.1", "line 1: address '127.0.0.1': give the numeric address by which other hosts reach it"),
    ("h1 address=0.0.0.0", "line 1: address '0.0.0.0'"),
    ("n[1-3] address=10.0.0.1", "line 1: hosts: 3, addresses: 1; each host has its own"),
    ("h1 address=10.0.0.[1-2]", "line 1: hosts: 1, addresses: 2;"),
    ("h1 slots=3 devices=0-3", "line 1: h1: slots is 3, but devices names 4"),
    ("h1 devices=0,0", "line 1: devices '0,0': 0 is given twice"),
    ("h1 devices=3-1", "line 1: devices '3-1': '3-1' is no device id"),
    ("h1 devices=0,,1", "line 1: devices '0,,1': '' is no device id"),
    ("h1 devices=4096", "line 1: devices '4096'"),
    ("-h", "line 1: '-h' starts with '-'"),
    ("h1\n$(id)", "line 2: .* is neither a host name"),
    ("h1\x00", r"line 1: 'h1\\x00' is neither a host name"),
    ("slots=8 h1", "line 1: 'slots=8' is neither a host name"),
    (f"a[1-{MAX_HOSTS}]\nb1", "line 2: more than 65536 hosts up to here"),
]


@pytest.mark.parametrize(("text", "hosts"), FORMS)
def test_every_form_of_a_line_is_read(text: str, hosts: list[tuple[str, int]]) -> None:
    assert [(entry.name, entry.slots) for entry in parse_hostfile(text, "f")] == hosts


def test_everything_that_can_stand_beside_a_name_is_read() -> None:
    text = 'me@h1 slots=2 port=2222 python="/opt/my py/bin/python" address=10.0.0.1 devices=4,6\nh2 user=you slots=1'
    assert parse_hostfile(text, "f") == (
        HostEntry("h1", 2, (4, 6), "me", 2222, "/opt/my py/bin/python", "10.0.0.1", "--hostfile f, line 1"),
        HostEntry("h2", 1, (0,), "you", source="--hostfile f, line 2"),
    )


def test_each_host_of_a_range_gets_its_address() -> None:
    entries = parse_hostfile("n[1-3] address=10.0.0.[9-11]", "f")
    assert [(entry.name, entry.address) for entry in entries] == [
        ("n1", "10.0.0.9"),
        ("n2", "10.0.0.10"),
        ("n3", "10.0.0.11"),
    ]


def test_mark_within_a_value_is_no_comment() -> None:
    (entry,) = parse_hostfile("h1 python=/opt/c#/bin/python # a comment", "f")
    assert entry.python == "/opt/c#/bin/python"


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_line_is_refused_with_file_line_and_value(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_hostfile(text, "f")
    assert str(caught.value).startswith("--hostfile f") and "\n" not in str(caught.value)


@given(st.text(alphabet='h1 =:#"[]-,@\n\r\tslotdevcpynaru/0\x00', max_size=30) | st.text(max_size=20))
@settings(max_examples=150)
def test_any_text_is_a_hostfile_or_wrong_input(text: str) -> None:
    try:
        assert parse_hostfile(text, "f")
    except UsageError as error:
        assert "\n" not in str(error)
