"""Lists of hosts as --hosts, --include and --exclude take them: names, users, slots, brackets and ranges.
Host files of every launcher: what a line says, what several lines of one host are, what is refused, and where."""

import contextlib
import io
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.cli import main as msrun
from ranktable.cli import main as ranktable
from ranktable.errors import HostListError
from ranktable.hosts.brackets import MAX_HOSTS, MAX_LIST_CHARS, expand, fold
from ranktable.hosts.host_list import ListedHost, parse_hosts, select_hosts
from ranktable.hosts.hostfile import FAMILIES, parse_hostfile
from ranktable.hosts.names import host_key
from ranktable.hosts.ranges import LARGEST, RangeError, fold_numbers, fold_runs, read_range, read_ranges, runs_of
from ranktable.hosts.this_host import find_this_host

LISTS = [
    ("h1:8,h2:4", [("h1", "", 8), ("h2", "", 4)]),
    ("node[01-02].dc:2", [("node01.dc", "", 2), ("node02.dc", "", 2)]),
    ("me@h1:1", [("h1", "me", 1)]),
    ("me@corp.example@h1", [("h1", "me@corp.example", 0)]),
    ("fd77::9", [("fd77::9", "", 0)]),
    ("[::1]:8", [("::1", "", 8)]),
    ("me@[fe80::1%eth0]:2", [("fe80::1%eth0", "me", 2)]),
    ("fd77::9:8", [("fd77::9:8", "", 0)]),
    ("My_Host-1.Example", [("My_Host-1.Example", "", 0)]),
    ("h:4096", [("h", "", 4096)]),
]

REFUSED = [
    ("", "is empty; give hosts such as"),
    (",", "has an empty name"),
    (":8", "'' is neither a host name nor an address"),
    ("me@", "'' is neither a host name nor an address"),
    ("-me@h", "user '-me' is no user name; letters"),
    ("a b@h", "user 'a b' is no user name; letters"),
    ("-oProxyCommand=x", "'-oProxyCommand=x' starts with '-', as an option does"),
    ("me@-h", "'-h' starts with '-'"),
    ("--", "'--' starts with '-'"),
    *(
        (text, "is neither a host name")
        for text in ("$(touch x)", "h 1", "h\u00e9", "10.0.0.256", "fe80::1%$(id)", "h:8:9")
    ),
    ("h\n1", r"'h\\n1' is neither a host name"),
    ("h\0", r"'h\\x00' is neither a host name"),
    ("[::1", "without its other half"),
    ("[::1]8", r"write \[address\]:8"),
    ("x" * 254, "more than 253 characters"),
    ("h:", "h: slots '' is no such number; write one from 1 to 4096"),
    ("h:0", "h: slots '0'"),
    ("h:4097", "h: slots '4097'"),
    ("h1,h2,h1:8", "h1 is given twice; give each host once"),
    ("h1,H1", r"H1 \(h1\) is given twice"),
    ("fd77::9,FD77:0::9", r"FD77:0::9 \(fd77::9\) is given twice"),
    ("10.0.0.1,::ffff:10.0.0.1", "given twice"),
    ("localhost,127.0.0.1", r"127.0.0.1 \(localhost\) is given twice"),
]


@pytest.mark.parametrize(("text", "hosts"), LISTS)
def test_words_become_entries(text, hosts):
    entries = parse_hosts(text, ListedHost)
    assert [(entry.name, entry.user, entry.slots) for entry in entries] == hosts
    assert all(entry.device_ids == tuple(range(entry.slots)) for entry in entries)
    assert all(entry.source == "--hosts" for entry in entries)


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_word_is_refused_with_its_value(text, message):
    with pytest.raises(HostListError, match=f"^--hosts: .*{message}|^--hosts: {message}"):
        parse_hosts(text, ListedHost)


@given(st.text(alphabet="[]:@-,.%h19 f\x00\n$", max_size=16) | st.text(max_size=10))
@settings(max_examples=150)
def test_any_text_gives_clean_names_or_is_wrong_input(text):
    try:
        entries = parse_hosts(text, ListedHost)
    except HostListError as error:
        assert "\n" not in str(error)
        return
    for entry in entries:
        assert not entry.name.startswith("-") and entry.name.isascii() and entry.name.isprintable()
        assert not set(entry.name + entry.user) & set(" $`'\"\\;|&<>()*?![]{}~#\n\0")


def test_address_is_known_of_addresses_that_others_can_reach():
    assert ListedHost("h").known_address == ""
    assert ListedHost("h", address="10.0.0.1").known_address == "10.0.0.1"
    assert ListedHost("10.0.0.1").known_address == "10.0.0.1"
    assert ListedHost("127.0.0.1").known_address == ""
    assert ListedHost("FD77:0::9").known_address == "fd77::9"


def test_key_of_a_name_and_of_an_address_are_those_of_one_host():
    assert ListedHost("h1", address="10.0.0.1").keys == {"h1", "10.0.0.1"}
    assert host_key("127.5.5.5") == host_key("LOCALHOST") == host_key("::1")
    assert host_key("localhost2") != host_key("localhost")


ENTRIES = parse_hostfile("h1 slots=4\nh2 devices=4-7\nn[1-2] slots=2\n[fd77::9]:2\nlazy", ListedHost, "f")

CHOSEN = [
    # --include, --exclude, what stays
    ("H1", None, {"h1": (0, 1, 2, 3)}),
    ("h1@h2", None, {"h1": (0, 1, 2, 3), "h2": (4, 5, 6, 7)}),
    ("h1:0,2", None, {"h1": (0, 2)}),
    ("h1:1-2@h2:7,4", None, {"h1": (1, 2), "h2": (4, 7)}),
    ("h1:0@h1:3", None, {"h1": (0, 3)}),
    ("h1:0@h1", None, {"h1": (0, 1, 2, 3)}),
    ("n[1-2]:1", None, {"n1": (1,), "n2": (1,)}),
    ("[fd77::9]:1", None, {"fd77::9": (1,)}),
    ("FD77:0::9", None, {"fd77::9": (0, 1)}),
    ("lazy", None, {"lazy": ()}),
    ("lazy:0,5", None, {"lazy": (0, 5)}),
    (None, "h1@h2@n[1-2]@fd77::9", {"lazy": ()}),
    (None, "h2@n1@n2@[fd77::9]@lazy", {"h1": (0, 1, 2, 3)}),
    (None, "h1:0,2@h2@n1@n2@[fd77::9]@lazy", {"h1": (1, 3)}),
    (None, "h1:0-3@h2@n1:0@n2@[fd77::9]@lazy", {"n1": (1,)}),
]

REFUSED_FILTERS = [
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
    ("h1:0,h2:1", None, "'h1:0,h2:1' has two colons; write h1:0,2@h2:1"),
    (None, "lazy:0", "--exclude lazy:0: lazy has no slots given to take some from; write lazy:8"),
    (None, "h1@h2@n1@n2@[fd77::9]@lazy", "leaves none of the 6 hosts"),
    (None, "h1:0-3@h2@n1@n2@[fd77::9]@lazy", "leaves none of the 6 hosts"),
]


def left(entries):
    assert all(entry.slots == len(entry.device_ids) for entry in entries)
    return {entry.name: entry.device_ids for entry in entries}


@pytest.mark.parametrize(("include", "exclude", "stay"), CHOSEN)
def test_what_is_included_stays_and_what_is_excluded_goes(include, exclude, stay):
    assert list(left(select_hosts(ENTRIES, include, exclude)).items()) == list(stay.items())


def test_nothing_said_leaves_the_list_as_it_is():
    assert select_hosts(ENTRIES, None, None) == ENTRIES


@pytest.mark.parametrize(("include", "exclude", "message"), REFUSED_FILTERS)
def test_filter_is_refused(include, exclude, message):
    with pytest.raises(HostListError, match=message):
        select_hosts(ENTRIES, include, exclude)


@given(st.sets(st.sampled_from([(e.name, d) for e in ENTRIES if e.slots for d in e.device_ids]), min_size=1))
@settings(max_examples=60)
def test_include_and_exclude_part_the_list(chosen):
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
def test_any_text_is_a_filter_or_wrong_input(text):
    for include, exclude in ((text, None), (None, text)):
        with contextlib.suppress(HostListError):
            assert select_hosts(ENTRIES, include, exclude)


LISTS_OF_NAMES = [
    ("h1", ["h1"]),
    ("node[01-03,07].dc", ["node01.dc", "node02.dc", "node03.dc", "node07.dc"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ("n[099-101]", ["n099", "n100", "n101"]),
    ("n[0-8/4]", ["n0", "n4", "n8"]),
    ("n[3,1,2]", ["n3", "n1", "n2"]),
    ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ("[1-2].dc", ["1.dc", "2.dc"]),
    ("n[1-2]:8,[fd77::9]:4", ["n1:8", "n2:8", "[fd77::9]:4"]),
]

REFUSED_LISTS = [
    ("", "'' has an empty name"),
    ("n[1-3", r"'n\[1-3' has a \[ without its other half"),
    ("n1-3]", r"'n1-3\]' has a \] without its other half"),
    ("n[1[2]]", r"has a \[ without its other half"),
    ("n[]", r"'n\[\]' has '' for a range"),
    ("n[\u0661-\u0663]", "for a range"),
    ("n[1-9999999999]", "has '1-9999999999' for a range"),
    ("n[3-1]", r"'n\[3-1\]' has the range 3-1, which runs backwards; write 1-3"),
    ("n[1-010]", "has the range 1-010 with ends of two widths"),
    (f"n[1-{MAX_HOSTS + 1}]", rf"'n\[1-{MAX_HOSTS + 1}\]' makes more than {MAX_HOSTS} hosts"),
    (f"h,n[1-{MAX_HOSTS}]", rf"'n\[1-{MAX_HOSTS}\]' makes more than {MAX_HOSTS} hosts"),
    ("n[1-999][1-999][1-999][1-999]", f"makes more than {MAX_HOSTS} hosts"),
    ("x" * (MAX_LIST_CHARS + 1), f"more than {MAX_LIST_CHARS} characters"),
]

LETTERS = st.text(alphabet="ab.-", max_size=3)
NAMES = st.tuples(LETTERS, st.text(alphabet="0129", max_size=4), LETTERS).map("".join).filter(bool)


@pytest.mark.parametrize(("text", "names"), LISTS_OF_NAMES)
def test_list_stands_for_these_names(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(("text", "message"), REFUSED_LISTS)
def test_list_is_refused(text, message):
    with pytest.raises(HostListError, match=message):
        expand(text)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["h", "h0", "h1", "h"], "h,h[0-1],h"),
        (["h0123456789", "h1"], "h0123456789,h1"),
        (["h1", "h2", "h3"], "h[1-3]"),
        (["h1", "h3", "h4", "h2"], "h[1,3-4,2]"),
        (["n08.dc", "n09.dc", "n10.dc", "m1.dc"], "n[08-10].dc,m1.dc"),
        (["n9", "n10", "n010"], "n[9-10,010]"),
        (["n09", "n10", "n11"], "n[09-11]"),
        (["10.0.0.9", "10.0.0.10"], "10.0.0.[9-10]"),
        ([f"n{i:04d}" for i in range(1, 4097)], "n[0001-4096]"),
        (["fd77::9", "fd77::a"], "fd77::9,fd77::a"),
    ],
)
def test_names_are_folded(names, folded):
    assert fold(names) == folded


@given(st.lists(NAMES, min_size=1, max_size=12))
@settings(max_examples=80)
def test_folded_names_come_back_in_their_order(names):
    assert expand(fold(names)) == names


@given(st.text(alphabet="[]0123456789-,ab:@ ", max_size=14) | st.text(max_size=8))
@settings(max_examples=120)
def test_any_text_is_a_list_or_wrong_input(text):
    try:
        assert all(expand(text))
    except HostListError as error:
        assert "\n" not in str(error)


numbers = st.integers(0, 2000)


@pytest.mark.parametrize(
    ("given_numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2, 5"), ([5, 1, 0, 1], "0-1, 5"), ([1, 3, 5], "1, 3, 5")],
)
def test_numbers_are_folded(given_numbers, text):
    assert fold_numbers(given_numbers) == text
    assert fold_numbers(given_numbers, ",") == text.replace(" ", "")


@given(st.lists(numbers, min_size=1))
def test_runs_keep_the_order(found):
    runs = runs_of(found)
    assert [number for first, last in runs for number in range(first, last + 1)] == found
    assert read_ranges(fold_runs(runs), len(found)) == found


@pytest.mark.parametrize(
    ("text", "found"), [("7", [7]), ("007", [7]), (" 2-3 , 0 ", [2, 3, 0]), ("1,1", [1, 1]), ("08-10", [8, 9, 10])]
)
def test_lists_are_read_in_their_order(text, found):
    assert read_ranges(text, 3) == found


@pytest.mark.parametrize(
    ("text", "reason", "piece"),
    [
        *((text, "form", text) for text in ("", "a", "1-", "-1", "1-2-3", "+1", "1.0", "²", "1 2")),
        ("0,,1", "form", ""),
        ("0-8/2", "form", "0-8/2"),
        ("1" * 5000, "form", "1" * 5000),
        ("0,9-3", "backwards", "9-3"),
        ("0-3,11", "beyond", "11"),
        ("0-3,4-9,1", "many", "1"),
        ("3-99999999999", "form", "3-99999999999"),
    ],
)
def test_what_is_no_list_is_refused_with_the_reason(text, reason, piece):
    with pytest.raises(RangeError) as caught:
        read_ranges(text, 10, 10)
    assert (caught.value.reason, caught.value.piece) == (reason, piece)
    assert caught.value.turned == ("3-9" if reason == "backwards" else "")


def test_steps_are_for_those_who_take_them():
    found = read_range("00-08/2", has_steps=True)
    assert (list(found.numbers), found.first, found.last) == ([0, 2, 4, 6, 8], "00", "08")
    for text in ("0-8/0", "8/2", "0-8/"):
        with pytest.raises(RangeError):
            read_range(text, has_steps=True)


def test_nothing_is_made_of_a_range_that_is_too_long():
    tracemalloc.start()
    try:
        assert len(read_range(f"0-{LARGEST}").numbers) == LARGEST + 1
        for text in (f"0-{LARGEST}", ",".join([f"0-{LARGEST}"] * 1000), f"0,{'0-999,' * 1000}1"):
            with pytest.raises(RangeError):
                read_ranges(text, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.text("0123456789-, /x", max_size=12))
def test_any_text_is_a_list_of_numbers_or_refused(text):
    try:
        found = read_ranges(text, 50)
    except RangeError as error:
        assert error.piece in text
        return
    assert len(found) <= 50 and all(0 <= number <= LARGEST for number in found)


FORMS = [
    # names: a line for each slot where they stand in a row, as PBS and LSF write them
    ("h1\nh2\nh2\nh3\nh3\n", [("h1", 1), ("h2", 2), ("h3", 2)]),
    # DeepSpeed
    ("# mine\n\n  \t\nh1 slots=8 # the first\n   # more\nh2\tslots=4", [("h1", 8), ("h2", 4)]),
    ("\ufeffh1 slots=8\r\n\r\nh2 slots=4\r\n", [("h1", 8), ("h2", 4)]),
    # Open MPI: lines of a host add up, one without slots counts 1 of them
    ("a slots=8 max_slots=16\nb slots = 4\n", [("a", 8), ("b", 4)]),
    ("root@a slots=8\nroot@a max-slots=9 slots=1\nb\nb\nc\n", [("a", 9), ("b", 2), ("c", 0)]),
    ("a count=2\nb cpu=3 slots_max=4", [("a", 2), ("b", 3)]),
    ("h1\nh1 slots=2\nh3", [("h1", 3), ("h3", 0)]),
    # MPICH and Intel MPI: 1 without a count, lines of a host add up
    ("a:8\nb:4 ifname=ib0\nc\na:1\n", [("a", 9), ("b", 4), ("c", 1)]),
    ("[fd00::1]:2\nfd00::2\n", [("fd00::1", 2), ("fd00::2", 1)]),
    # Slurm
    ("node[08-09,11]\nother\n", [("node08", 0), ("node09", 0), ("node11", 0), ("other", 0)]),
    ("a,b slots=3", [("a", 3), ("b", 3)]),
    # and together
    ("h1 slots=2 devices=4,6\nh2 devices=4-7", [("h1", 2), ("h2", 4)]),
    ("[fd77::9]:2\nfd77::a slots=3", [("fd77::9", 2), ("fd77::a", 3)]),
]

REFUSED_LINES = [
    ("", "--hostfile f: is empty"),
    ("\ufeff\n \n", "--hostfile f: is empty"),
    ("# only\n\n  # comments\n", "--hostfile f: holds only comments and blank lines"),
    ("h1\nh2\nh1", "--hostfile f, line 3 and --hostfile f, line 1: h1 is given twice"),
    ("h1 slots=1\nH1 slots=2", r"line 2 and --hostfile f, line 1: H1 \(h1\) is given twice"),
    ("10.0.0.1\nh2 address=10.0.0.1", r"h2 \(10.0.0.1\) is given twice"),
    ("h1 slots=0", "line 1: slots '0' is no such number; write one from 1 to 4096"),
    ("h1 slots=", "line 1: slots has no value; write slots=value"),
    ("h1 slots=1 slots=1", "line 1: slots is given twice"),
    ("h1:4 slots=8", "line 1: h1: slots is 4 and 8; write it once"),
    ("me@h1 user=you", "line 1: h1: user is me and you; write it once"),
    ("h1 slot=8", r"line 1: 'slot=8': no such key \(did you mean slots\?\); the keys are slots, devices"),
    ("h1 8", "line 1: '8': no such key; the keys are"),
    ("h1 port=0", "line 1: port '0' is no such number; write one from 1 to 65535"),
    ("h1 python=python3", "line 1: python 'python3' is no absolute path; give the absolute path"),
    ("h1 python=/a\x01b", "line 1: python"),
    ('h1 python="/a b', 'line 1: .* has a quote that does not close; write key="value"'),
    ("h1 address=h1.dc", "line 1: address 'h1.dc' is none that others can reach; give the numeric address"),
    ("h1 address=127.0.0.1", "line 1: address '127.0.0.1' is none that others can reach"),
    ("n[1-3] address=10.0.0.1", "line 1: hosts: 3, addresses: 1; each host has its own"),
    ("h1 slots=3 devices=0-3", "line 1: h1: slots is 3, but devices names 4"),
    ("h1 devices=0,0", "line 1: devices '0,0': 0 is given twice"),
    ("h1 devices=3-1", "line 1: devices '3-1': '3-1' is no device id"),
    ("h1\n$(id)", "line 2: .* is neither a host name"),
    ("h1\x00", r"line 1: 'h1\\x00' is neither a host name"),
    ("a slots=8\na slots=8", "line 2 and --hostfile f, line 1: a is given twice"),
    ("a slots=9 max_slots=8", "line 1: a: slots is 9, more than max_slots, 8; lower slots"),
    ("a:4096\na:1", "line 1: a: slots add up to 4097; give at most 4096"),
    ("+n0 slots=2", "line 1: '.n0' is a place in an allocation; write the name of the host"),
    ("rank 0=a slot=1", "line 1: .* is a line of a rank file; give the host file"),
    ("=", "line 1: '=' names no host"),
]


def read(text, family=None):
    return parse_hostfile(text, ListedHost, "--hostfile f", family)


@pytest.mark.parametrize(("text", "hosts"), FORMS)
def test_every_form_of_a_line_is_read(text, hosts):
    assert [(host.name, host.slots) for host in read(text)] == hosts


def test_a_family_that_is_named_decides_over_several_lines_of_a_host():
    assert [host.slots for host in read("a slots=8\na slots=8", "openmpi")] == [16]
    assert [host.slots for host in read("a\nb\na", "mpich")] == [2, 1]
    with pytest.raises(HostListError, match="a is given twice"):
        read("a:8\na:8", "slurm")


def test_everything_that_can_stand_beside_a_name_is_read():
    text = 'me@h1 slots=2 port=2222 python="/opt/my py/bin/python" address=10.0.0.1 devices=4,6\nh2 user=you slots=1'
    assert read(text) == (
        ListedHost("h1", 2, (4, 6), "me", 2222, "/opt/my py/bin/python", "10.0.0.1", "--hostfile f, line 1"),
        ListedHost("h2", 1, (0,), "you", source="--hostfile f, line 2"),
    )
    entries = read("n[1-3] address=10.0.0.[9-11] python=/opt/c#/bin/python # a comment")
    assert [(entry.name, entry.address) for entry in entries] == [
        ("n1", "10.0.0.9"),
        ("n2", "10.0.0.10"),
        ("n3", "10.0.0.11"),
    ]
    assert {entry.python for entry in entries} == {"/opt/c#/bin/python"}


TOO_MANY = (f"a[1-{MAX_HOSTS}]\nb1", "line 2: more than 65536 hosts up to here")


@pytest.mark.parametrize(("text", "message"), [*REFUSED_LINES, pytest.param(*TOO_MANY, marks=pytest.mark.slow)])
def test_line_is_refused_with_file_line_and_value(text, message):
    with pytest.raises(HostListError, match=message) as caught:
        read(text)
    assert str(caught.value).startswith("--hostfile f") and "\n" not in str(caught.value)
    assert caught.value.remedy


@given(
    st.text(alphabet='h1 =:#"[]-,@\n\r\tslotdevcpynaru/0\x00', max_size=30) | st.text(max_size=20),
    st.none() | st.sampled_from(FAMILIES),
)
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_hostfile_or_wrong_input(text, family):
    try:
        hosts = read(text, family)
    except HostListError as error:
        assert error.remedy and "\n" not in str(error)
        return
    assert hosts and len({host.name for host in hosts}) == len(hosts)


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ([["10.0.0.8"], ["10.0.0.7"]], [1]),
        ([["a", "10.0.0.7"], ["b", "10.0.0.8"]], [0]),
        ([["fd00:0:0::7"], ["trainer-7"]], [0]),
        ([["::ffff:10.0.0.7"], ["b"]], [0]),
        ([["trainer-6"], ["TRAINER-7"]], [1]),
        ([["trainer-7.dc"], ["trainer-7.other"]], [0]),
        ([["trainer-7"], ["trainer-7.dc."]], [0, 1]),
        ([["trainer-7", "10.0.0.8"], ["x", "10.0.0.7"]], [1]),
        ([["127.0.0.1"], ["localhost"]], []),
        ([["10.0.0.9"]], []),
    ],
)
def test_a_host_finds_itself_by_address_and_else_by_name(hosts, found):
    assert find_this_host(hosts, "trainer-7.dc", ["10.0.0.7", "fd00::7%eth0"]) == found


LINES = [line for text, _ in FORMS for line in text.splitlines()] + [text for text, _ in REFUSED_LINES]


def said(main, *words):
    """Return what a command writes to its output, and the sentence of its error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main([*words])
    return out.getvalue(), err.getvalue().partition(": error: ")[2]


@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=3).map("\n".join))
@settings(max_examples=10, deadline=None)
def test_both_commands_take_the_same_files_in_the_same_sense(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "hosts"
    path.write_bytes(text.encode())
    plan, refused_by_msrun = said(msrun, "--dry_run=json", "--hostfile", str(path), "echo")
    table, refused = said(ranktable, "generate", "--hostfile", str(path), "--order", "given", "-o", "-")
    if "has no number of devices" in refused:  # which a job takes from --local_worker_num, and a table from nowhere
        assert plan and not refused_by_msrun
        return
    assert refused_by_msrun == refused
    if plan:
        hosts = [(host["name"], [one["device_id"] for one in host["workers"]]) for host in json.loads(plan)["hosts"]]
        servers = json.loads(table)["server_list"]
        assert hosts == [(one["server_id"], [int(each["device_id"]) for each in one["device"]]) for one in servers]
