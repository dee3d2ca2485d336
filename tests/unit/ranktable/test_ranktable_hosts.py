"""Hosts of --hosts: names, users, slots, IPv6; doubles in every spelling; what no ssh and no shell may ever see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable.errors import HostListError
from ranktable.hosts.host_list import ListedHost, parse_hosts
from ranktable.hosts.names import host_key

LISTS = [
    ("h1:8,h2:4", [("h1", "", 8), ("h2", "", 4)]),
    ("h1,h2", [("h1", "", 0), ("h2", "", 0)]),
    ("node[01-02].dc:2", [("node01.dc", "", 2), ("node02.dc", "", 2)]),
    ("me@h1:1", [("h1", "me", 1)]),
    ("me@corp.example@h1", [("h1", "me@corp.example", 0)]),
    ("10.0.0.1:8", [("10.0.0.1", "", 8)]),
    ("fd77::9", [("fd77::9", "", 0)]),
    ("::1", [("::1", "", 0)]),
    ("[::1]:8", [("::1", "", 8)]),
    ("[fd77::9]", [("fd77::9", "", 0)]),
    ("me@[fe80::1%eth0]:2", [("fe80::1%eth0", "me", 2)]),
    ("fd77::9:8", [("fd77::9:8", "", 0)]),
    ("My_Host-1.Example", [("My_Host-1.Example", "", 0)]),
    ("h:4096", [("h", "", 4096)]),
]

REFUSED = [
    ("", "is empty; give hosts such as"),
    (" ", "is empty"),
    (",", "has an empty name"),
    (":8", "'' is neither a host name nor an address"),
    ("me@", "'' is neither a host name nor an address"),
    ("@h", "user '' is no user name; letters"),
    ("-me@h", "user '-me' is no user name; letters"),
    ("a b@h", "user 'a b' is no user name; letters"),
    ("-oProxyCommand=x", "'-oProxyCommand=x' starts with '-', as an option does"),
    ("me@-h", "'-h' starts with '-'"),
    ("--", "'--' starts with '-'"),
    ("$(touch x)", "is neither a host name"),
    ("`id`", "is neither a host name"),
    ("h;id", "is neither a host name"),
    ("h|id", "is neither a host name"),
    ("h&id", "is neither a host name"),
    ("h>x", "is neither a host name"),
    ("h'1", "is neither a host name"),
    ("h 1", "is neither a host name"),
    ("h\n1", r"'h\\n1' is neither a host name"),
    ("h\x07", r"'h\\x07' is neither a host name"),
    ("h\0", r"'h\\x00' is neither a host name"),
    ("h%x", "is neither a host name"),
    ("h/x", "is neither a host name"),
    ("*", "is neither a host name"),
    (".h", "is neither a host name"),
    ("h\u00e9", "is neither a host name"),
    ("10.0.0.256", "is neither a host name"),
    ("10.0.0", "is neither a host name"),
    ("fe80::1%$(id)", "is neither a host name"),
    ("fd77::x", "is neither a host name"),
    ("h:8:9", "is neither a host name"),
    ("[::1", "without its other half"),
    ("[::1]8", r"write \[address\]:8"),
    ("x" * 254, "more than 253 characters"),
    ("h:", "h: slots '' is no such number; write one from 1 to 4096"),
    ("h:0", "h: slots '0'"),
    ("h:-1", "h: slots '-1'"),
    ("h:+1", "h: slots '\\+1'"),
    ("h:1.5", "h: slots '1.5'"),
    ("h:abc", "h: slots 'abc'"),
    ("h:4097", "h: slots '4097'"),
    ("h:\u0663", "h: slots"),
    ("h1,h2,h1:8", "h1 is given twice; give each host once"),
    ("h1,H1", r"H1 \(h1\) is given twice"),
    ("h1.dc,h1.dc.", "given twice"),
    ("me@h1,you@h1", "h1 is given twice"),
    ("10.0.0.1,10.0.0.1", "10.0.0.1 is given twice"),
    ("fd77::9,FD77:0::9", r"FD77:0::9 \(fd77::9\) is given twice"),
    ("10.0.0.1,::ffff:10.0.0.1", "given twice"),
    ("localhost,127.0.0.1", r"127.0.0.1 \(localhost\) is given twice"),
    ("localhost.localdomain,::1", "given twice"),
    ("n[1-3],n2", "n2 is given twice"),
]


@pytest.mark.parametrize(("text", "hosts"), LISTS)
def test_words_become_entries(text: str, hosts: list[tuple[str, str, int]]) -> None:
    entries = parse_hosts(text, ListedHost)
    assert [(entry.name, entry.user, entry.slots) for entry in entries] == hosts
    assert all(entry.device_ids == tuple(range(entry.slots)) for entry in entries)
    assert all(entry.source == "--hosts" for entry in entries)


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_word_is_refused_with_its_value(text: str, message: str) -> None:
    with pytest.raises(HostListError, match=f"^--hosts: .*{message}|^--hosts: {message}"):
        parse_hosts(text, ListedHost)


@given(st.text(alphabet="[]:@-,.%h19 f\x00\n$", max_size=16) | st.text(max_size=10))
@settings(max_examples=150)
def test_any_text_gives_clean_names_or_is_wrong_input(text: str) -> None:
    try:
        entries = parse_hosts(text, ListedHost)
    except HostListError as error:
        assert "\n" not in str(error)
        return
    for entry in entries:
        assert not entry.name.startswith("-") and entry.name.isascii() and entry.name.isprintable()
        assert not set(entry.name + entry.user) & set(" $`'\"\\;|&<>()*?![]{}~#\n\0")


def test_address_is_known_of_addresses_that_others_can_reach() -> None:
    assert ListedHost("h").known_address == ""
    assert ListedHost("h", address="10.0.0.1").known_address == "10.0.0.1"
    assert ListedHost("10.0.0.1").known_address == "10.0.0.1"
    assert ListedHost("127.0.0.1").known_address == ""
    assert ListedHost("FD77:0::9").known_address == "fd77::9"


def test_key_of_a_name_and_of_an_address_are_those_of_one_host() -> None:
    assert ListedHost("h1", address="10.0.0.1").keys == {"h1", "10.0.0.1"}
    assert host_key("127.5.5.5") == host_key("LOCALHOST") == host_key("::1")
    assert host_key("localhost2") != host_key("localhost")
