"""Which hosts a job starts on again when it loses some."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.hosts.assignment import MAX_FAILURES, HostPool
from msrun.planning.hosts.host_entry import HostEntry


def hosts(count: int) -> list[HostEntry]:
    return [HostEntry(f"h{index}", 2, (0, 1)) for index in range(count)]


def names(entries: tuple[HostEntry, ...]) -> str:
    return " ".join(entry.name for entry in entries)


def test_spare_hosts_come_before_those_that_may_be_back() -> None:
    h = hosts(4)
    pool = HostPool(h[:3], h[3:], 2)
    assert (names(pool.chosen), names(pool.waiting)) == ("h0 h1 h2", "h3")
    assert pool.lose([h[0]])
    assert (names(pool.chosen), names(pool.waiting)) == ("h1 h2 h3", "h0")
    assert pool.lose([h[2]])
    assert names(pool.chosen) == "h1 h3 h0"


def test_host_that_has_failed_twice_is_left_out() -> None:
    h = hosts(2)
    pool = HostPool(h, [], 1)
    for lost, chosen in ((1, "h0"), (0, "h1"), (1, "h0")):
        assert pool.lose([h[lost]]) and names(pool.chosen) == chosen
    assert (names(pool.chosen), names(pool.left_out), names(pool.waiting)) == ("h0", "h1", "")


def test_host_that_has_left_comes_back_in_no_start() -> None:
    h = hosts(3)
    pool = HostPool(h[:2], h[2:], 1)
    assert pool.lose([h[0]], [h[0]])
    assert (names(pool.chosen), names(pool.left_out), names(pool.waiting)) == ("h1 h2", "h0", "")
    assert pool.lose([h[1]]) and names(pool.chosen) == "h2"


def test_too_few_hosts_are_none() -> None:
    h = hosts(2)
    pool = HostPool(h, [], 2)
    assert pool.lose([h[0]]) and not pool.lose([h[0]])


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_lives_of_jobs(size: int, spares: int, data: st.DataObject) -> None:
    """Whatever is lost: no host twice, none left out, those that ran well stay, as many as there can be."""
    h = hosts(size + spares)
    min_hosts = data.draw(st.integers(1, size))
    pool = HostPool(h[:size], h[size:], min_hosts)
    failures: Counter[HostEntry] = Counter()
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
