"""Host files of every launcher: what a line says, what several lines of one host are, what is refused, and where."""

import contextlib
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.cli import main as msrun
from ranktable.cli import main as ranktable
from ranktable.errors import HostListError
from ranktable.hosts.brackets import MAX_HOSTS
from ranktable.hosts.host_list import ListedHost
from ranktable.hosts.hostfile import FAMILIES, parse_hostfile
from ranktable.hosts.this_host import find_this_host

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

REFUSED = [
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


@pytest.mark.parametrize(("text", "message"), [*REFUSED, pytest.param(*TOO_MANY, marks=pytest.mark.slow)])
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


LINES = [line for text, _ in FORMS for line in text.splitlines()] + [text for text, _ in REFUSED]


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
