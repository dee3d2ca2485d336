"""How many workers each host gets, and when the numbers of options and list contradict each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.hosts.assignment import give_slots
from msrun.planning.hosts.host_entry import HostEntry
from ranktable.hosts.host_list import parse_hosts

GIVEN = [
    ("h1:8,h2:4", None, None, [8, 4]),
    ("h1:8,h2:4", 12, None, [8, 4]),
    ("h1,h2", None, None, [1, 1]),
    ("h1,h2", None, 8, [8, 8]),
    ("h1,h2", 16, 8, [8, 8]),
    ("h1,h2", 16, None, [8, 8]),
    ("h1:2,h2,h3", 8, None, [2, 3, 3]),
    ("h1:2,h2", None, 4, [2, 4]),
    ("h1:4,h2:4", None, 4, [4, 4]),
]

REFUSED = [
    ("h1:8,h2:4", 8, None, "--worker_num 8: the slots of 2 hosts add up to 12; make them equal"),
    ("h1:2", 3, None, "--worker_num 3: the slots of h1 add up to 2"),
    ("h1,h2", 8, 2, "--worker_num 8: the slots of 2 hosts add up to 4"),
    ("h1,h2,h3", 8, None, r"--worker_num 8: leaves 8 workers for 3 hosts without slots \(h\[1-3\]\), which cannot"),
    ("h1,h2", 1, None, "leaves 1 worker for 2 hosts without slots"),
    ("h1,h2", 0, None, "leaves 0 workers"),
    ("h1:8,h2", 8, None, r"leaves 0 workers for h2 without slots \(h2\)"),
    ("h1:8,h2", 4, None, "leaves -4 workers for h2"),
    ("h1,h2", None, 0, "--local_worker_num 0: must be 1 to 4096"),
    ("h1,h2", None, -1, "--local_worker_num -1: must be"),
    ("h1:8,h2:4", None, 8, "--local_worker_num 8: --hosts gives h2 4 slots; leave --local_worker_num out"),
]


@pytest.mark.parametrize(("hosts", "worker_num", "local_worker_num", "slots"), GIVEN)
def test_hosts_get_these_slots(
    hosts: str, worker_num: int | None, local_worker_num: int | None, slots: list[int]
) -> None:
    found = give_slots(parse_hosts(hosts, HostEntry), worker_num=worker_num, local_worker_num=local_worker_num)
    assert [entry.slots for entry in found] == slots
    assert [entry.device_ids for entry in found] == [tuple(range(count)) for count in slots]


@pytest.mark.parametrize(("hosts", "worker_num", "local_worker_num", "message"), REFUSED)
def test_numbers_that_do_not_fit_are_refused(
    hosts: str, worker_num: int | None, local_worker_num: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        give_slots(parse_hosts(hosts, HostEntry), worker_num=worker_num, local_worker_num=local_worker_num)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5), st.none() | st.integers(-1, 20), st.none() | st.integers(0, 4)
)
@settings(max_examples=60)
def test_slots_add_up_or_are_refused(slots: list[int], worker_num: int | None, local_worker_num: int | None) -> None:
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
