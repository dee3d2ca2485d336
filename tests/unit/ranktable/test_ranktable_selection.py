"""--include and --exclude: which hosts and devices stay, in which order, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable.errors import HostListError
from ranktable.hosts.host_list import ListedHost, select_hosts
from ranktable.hosts.hostfile import parse_hostfile

ENTRIES = parse_hostfile("h1 slots=4\nh2 devices=4-7\nn[1-2] slots=2\n[fd77::9]:2\nlazy", ListedHost, "f")

INCLUDED = [
    ("h1", {"h1": (0, 1, 2, 3)}),
    ("H1", {"h1": (0, 1, 2, 3)}),
    ("h1@h2", {"h1": (0, 1, 2, 3), "h2": (4, 5, 6, 7)}),
    ("h2@h1", {"h1": (0, 1, 2, 3), "h2": (4, 5, 6, 7)}),
    ("h1:0,2", {"h1": (0, 2)}),
    ("h1:2,0", {"h1": (0, 2)}),
    ("h1:1-2@h2:7,4", {"h1": (1, 2), "h2": (4, 7)}),
    ("h1:0@h1:3", {"h1": (0, 3)}),
    ("h1:0@h1", {"h1": (0, 1, 2, 3)}),
    ("h1@h1:0", {"h1": (0, 1, 2, 3)}),
    ("n[1-2]:1", {"n1": (1,), "n2": (1,)}),
    ("h1,n2:1", {"h1": (1,), "n2": (1,)}),
    ("[fd77::9]:1", {"fd77::9": (1,)}),
    ("FD77:0::9", {"fd77::9": (0, 1)}),
    ("lazy", {"lazy": ()}),
    ("lazy:0,5", {"lazy": (0, 5)}),
]

EXCLUDED = [
    ("h1@h2@n[1-2]@fd77::9", {"lazy": ()}),
    ("h2@n1@n2@[fd77::9]@lazy", {"h1": (0, 1, 2, 3)}),
    ("h1:0,2@h2@n1@n2@[fd77::9]@lazy", {"h1": (1, 3)}),
    ("h1:0-3@h2@n1:0@n2@[fd77::9]@lazy", {"n1": (1,)}),
]

REFUSED = [
    ("h1", "h2", "--include and --exclude: give one of the two"),
    ("", None, "--include: '' has an empty name"),
    (
        "lasy",
        None,
        r"--include lasy: lasy is none of the job's hosts \(did you mean lazy\?\); they are h1, h2, n1, n2 and",
    ),
    (None, "h1@xx", "--exclude h1@xx: xx is none of the job's hosts"),
    ("h1:4", None, "--include h1:4: h1 has no device 4; its devices are 0-3"),
    ("h2:0", None, "--include h2:0: h2 has no device 0; its devices are 4-7"),
    ("h1:", None, "--include: h1:: devices '': '' is no device id"),
    ("h1:a", None, "devices 'a'"),
    ("h1:0,h2:1", None, "'h1:0,h2:1' has two colons; write h1:0,2@h2:1"),
    ("h1@", None, "has an empty name"),
    ("-h", None, "starts with '-'"),
    (None, "lazy:0", "--exclude lazy:0: lazy has no slots given to take some from; write lazy:8"),
    (None, "h1@h2@n1@n2@[fd77::9]@lazy", "leaves none of the 6 hosts"),
    (None, "h1:0-3@h2@n1@n2@[fd77::9]@lazy", "leaves none of the 6 hosts"),
]


def left(entries: tuple[ListedHost, ...]) -> dict[str, tuple[int, ...]]:
    assert all(entry.slots == len(entry.device_ids) for entry in entries)
    return {entry.name: entry.device_ids for entry in entries}


@pytest.mark.parametrize(("text", "stay"), INCLUDED)
def test_only_what_is_included_stays(text: str, stay: dict[str, tuple[int, ...]]) -> None:
    found = left(select_hosts(ENTRIES, text, None))
    assert list(found.items()) == list(stay.items())


@pytest.mark.parametrize(("text", "stay"), EXCLUDED)
def test_what_is_excluded_goes(text: str, stay: dict[str, tuple[int, ...]]) -> None:
    assert left(select_hosts(ENTRIES, None, text)) == stay


def test_nothing_said_leaves_the_list_as_it_is() -> None:
    assert select_hosts(ENTRIES, None, None) == ENTRIES


@pytest.mark.parametrize(("include", "exclude", "message"), REFUSED)
def test_filter_is_refused(include: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(HostListError, match=message):
        select_hosts(ENTRIES, include, exclude)


@given(st.sets(st.sampled_from([(e.name, d) for e in ENTRIES if e.slots for d in e.device_ids]), min_size=1))
@settings(max_examples=60)
def test_include_and_exclude_part_the_list(chosen: set[tuple[str, int]]) -> None:
    known = tuple(entry for entry in ENTRIES if entry.slots)
    words = "@".join(f"[{name}]:{device}" if ":" in name else f"{name}:{device}" for name, device in sorted(chosen))
    kept = left(select_hosts(known, words, None))
    assert {(name, device) for name, devices in kept.items() for device in devices} == chosen
    everything = {(entry.name, device) for entry in known for device in entry.device_ids}
    if chosen != everything:
        rest = left(select_hosts(known, None, words))
        assert {(name, device) for name, devices in rest.items() for device in devices} == everything - chosen


@given(st.text(alphabet="h12n[]-,@: 0fl", max_size=14) | st.text(max_size=8))
@settings(max_examples=120)
def test_any_text_is_a_filter_or_wrong_input(text: str) -> None:
    for include, exclude in ((text, None), (None, text)):
        with contextlib.suppress(HostListError):
            assert select_hosts(ENTRIES, include, exclude)
