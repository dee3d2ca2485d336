"""Ranks of the hosts of a list: contiguous by host, or those of a rank table."""

import ipaddress
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.hosts import (
    MAX_FAILURES,
    MAX_HOSTS,
    HostAssignment,
    HostEntry,
    HostPool,
    assign_hosts,
    give_slots,
    order_by_table,
    parse_rehearsal,
)
from ranktable.hosts.host_list import parse_hosts
from ranktable.hosts.hostfile import parse_hostfile

TABLE = (
    HostAssignment(0, "node-b", "10.0.0.2", (0, 1), (4, 5)),
    HostAssignment(1, "node-a", "10.0.0.1", (2, 4, 3), (0, 2, 1)),
)
NAMES = (("10.0.0.2", "node-b"), ("10.0.0.1", "node-a"))


def test_ranks_are_contiguous_by_host_however_unequal_the_hosts_are():
    entries = parse_hostfile("h1 slots=3\n10.0.0.7 slots=1\nh3 devices=2,6 address=10.0.0.9", HostEntry, "--hostfile f")
    assert assign_hosts(entries) == (
        HostAssignment(0, "h1", "?", (0, 1, 2), (0, 1, 2)),
        HostAssignment(1, "10.0.0.7", "10.0.0.7", (3,), (0,)),
        HostAssignment(2, "h3", "10.0.0.9", (4, 5), (2, 6)),
    )


@pytest.mark.parametrize(
    "text", ["node-a\nnode-b", "a address=10.0.0.1\nb address=10.0.0.2", "node-a:3\nnode-b devices=5,4"]
)
def test_table_gives_order_ranks_and_devices(text):
    entries = parse_hostfile(text, HostEntry, "--hostfile f")
    ordered = order_by_table(entries, TABLE, NAMES, "t.json")
    assert [entry.name for entry in ordered] == [entry.name for entry in reversed(entries)]
    assert [(entry.slots, entry.device_ids) for entry in ordered] == [(2, (4, 5)), (3, (0, 2, 1))]
    assignments = assign_hosts(ordered, TABLE)
    assert [assignment.ranks for assignment in assignments] == [(0, 1), (2, 4, 3)]
    assert [assignment.name for assignment in assignments] == [entry.name for entry in ordered]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node-a", "t.json: its server node-b is no host of --hostfile f, line 1; .* add address=10.0.0.2 to its line"),
        ("node-a\nnode-b\nh3", "--hostfile f, line 3: h3 is no server of t.json"),
        ("node-a slots=2\nnode-b", "line 1: node-a has 2 slots, in t.json it has 3"),
        ("node-a\nnode-b devices=4,6", "line 2: node-b has devices 4, 6, but 4-5 in t.json"),
    ],
)
def test_list_and_table_of_different_hosts_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        order_by_table(parse_hostfile(text, HostEntry, "--hostfile f"), TABLE, NAMES, "t.json")


def test_a_host_takes_as_many_workers_as_its_file_says_at_most():
    entries = parse_hostfile("a max_slots=2\nb max_slots=4", HostEntry, "--hostfile f")
    assert [entry.slots for entry in give_slots(entries, worker_num=4, local_worker_num=None)] == [2, 2]
    with pytest.raises(UsageError, match=r"line 1: a takes 2 workers at most \(max_slots\), not 3"):
        give_slots(entries, worker_num=6, local_worker_num=None)


def hosts(count):
    return [HostEntry(f"h{index}", 2, (0, 1)) for index in range(count)]


def names_of(entries):
    return " ".join(entry.name for entry in entries)


def test_spare_hosts_come_before_those_that_may_be_back():
    h = hosts(4)
    pool = HostPool(h[:3], h[3:], 2)
    assert (names_of(pool.chosen), names_of(pool.waiting)) == ("h0 h1 h2", "h3")
    assert pool.lose([h[0]])
    assert (names_of(pool.chosen), names_of(pool.waiting)) == ("h1 h2 h3", "h0")
    assert pool.lose([h[2]])
    assert names_of(pool.chosen) == "h1 h3 h0"


def test_host_that_has_left_comes_back_in_no_start():
    h = hosts(3)
    pool = HostPool(h[:2], h[2:], 1)
    assert pool.lose([h[0]], [h[0]])
    assert (names_of(pool.chosen), names_of(pool.left_out), names_of(pool.waiting)) == ("h1 h2", "h0", "")
    assert pool.lose([h[1]]) and names_of(pool.chosen) == "h2"


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_lives_of_jobs(size, spares, data):
    """Whatever is lost: no host twice, none left out, those that ran well stay, as many as there can be."""
    h = hosts(size + spares)
    min_hosts = data.draw(st.integers(1, size))
    pool = HostPool(h[:size], h[size:], min_hosts)
    failures = Counter()
    for _ in range(6):
        lost = data.draw(st.sets(st.sampled_from(pool.chosen), min_size=1))
        failures.update(lost)
        before = pool.chosen
        usable = [entry for entry in h if failures[entry] < MAX_FAILURES]
        if not pool.lose(lost):
            assert len(usable) < min_hosts
            return
        well = [entry for entry in usable if entry not in lost]
        count = min(size, len(well if len(well) >= min_hosts else usable))
        assert len(set(pool.chosen)) == len(pool.chosen) == count >= min_hosts
        assert set(pool.chosen) <= set(usable)
        staying = [entry for entry in before if entry not in lost]
        assert list(pool.chosen[: len(staying)]) == staying
        assert not set(pool.waiting) & {*pool.chosen, *pool.left_out}


SLOTS = [
    ("h1:8,h2:4", None, None, [8, 4]),
    ("h1,h2", None, 8, [8, 8]),
    ("h1,h2", 16, None, [8, 8]),
    ("h1:2,h2,h3", 8, None, [2, 3, 3]),
]

REFUSED = [
    ("h1:8,h2:4", 8, None, "--worker_num 8: the slots of 2 hosts add up to 12; make them equal"),
    ("h1,h2,h3", 8, None, r"--worker_num 8: leaves 8 workers for 3 hosts without slots \(h\[1-3\]\), which cannot"),
    ("h1,h2", 1, None, "leaves 1 worker for 2 hosts without slots"),
    ("h1:8,h2", 8, None, r"leaves 0 workers for h2 without slots \(h2\)"),
    ("h1,h2", None, 0, "--local_worker_num 0: must be 1 to 4096"),
    ("h1:8,h2:4", None, 8, "--local_worker_num 8: --hosts gives h2 4 slots; leave --local_worker_num out"),
]


@pytest.mark.parametrize(("hosts", "worker_num", "local_worker_num", "slots"), SLOTS)
def test_hosts_get_these_slots(hosts, worker_num, local_worker_num, slots):
    found = give_slots(parse_hosts(hosts, HostEntry), worker_num=worker_num, local_worker_num=local_worker_num)
    assert [entry.slots for entry in found] == slots
    assert [entry.device_ids for entry in found] == [tuple(range(count)) for count in slots]


@pytest.mark.parametrize(("hosts", "worker_num", "local_worker_num", "message"), REFUSED)
def test_numbers_that_do_not_fit_are_refused(hosts, worker_num, local_worker_num, message):
    with pytest.raises(UsageError, match=message):
        give_slots(parse_hosts(hosts, HostEntry), worker_num=worker_num, local_worker_num=local_worker_num)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5), st.none() | st.integers(-1, 20), st.none() | st.integers(0, 4)
)
@settings(max_examples=60)
def test_slots_add_up_or_are_refused(slots, worker_num, local_worker_num):
    entries = parse_hosts(
        ",".join(f"h{index}:{count}" if count else f"h{index}" for index, count in enumerate(slots)), HostEntry
    )
    try:
        found = give_slots(entries, worker_num=worker_num, local_worker_num=local_worker_num)
    except UsageError:
        return
    assert all(entry.slots >= 1 and len(entry.device_ids) == entry.slots for entry in found)
    assert worker_num is None or sum(entry.slots for entry in found) == worker_num
    assert all(new.slots == old for new, old in zip(found, slots, strict=True) if old)


def test_every_host_has_a_name_and_a_loopback_address_of_its_own():
    entries = parse_rehearsal(f"{MAX_HOSTS}x1")
    addresses = {ipaddress.ip_address(entry.address) for entry in entries}
    assert len({entry.name for entry in entries}) == len(addresses) == MAX_HOSTS
    assert all(address.is_loopback for address in addresses) and ipaddress.ip_address("127.0.0.1") not in addresses
    assert all(entry.is_rehearsed and entry.device_ids == (0,) for entry in entries)


@pytest.mark.parametrize("text", ["", "x", "2x", "x2", "0x2", "2x0", "2X2", "2x2x2", "-1x2", "2 x 2", "2x2;id", "two"])
def test_other_words_are_refused(text):
    with pytest.raises(UsageError, match=r"--rehearse .*give HOSTSxWORKERS"):
        parse_rehearsal(text)


@pytest.mark.parametrize("text", ["251x1", "1x4097", "9" * 40 + "x1"])
def test_too_many_are_refused(text):
    with pytest.raises(UsageError, match="250 hosts of 4096 workers are the most"):
        parse_rehearsal(text)
