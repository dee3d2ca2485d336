"""Sets of processors as the kernel writes them, and cores made of hardware threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.placement.host import (
    Cpu,
    Topology,
    flat_topology,
    format_cpu_list,
    parse_cpu_list,
    parse_cpu_range,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("\n", ()),
        ("0\n", (0,)),
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("8,0-1,1", (0, 1, 8)),
        (" 4 , 6-7 ", (4, 6, 7)),
    ],
)
def test_cpu_lists_are_read_as_the_kernel_writes_them(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1--2", "0x1", "1.5", "999999999", "0-65537", "²", "1 2"])
def test_what_is_no_cpu_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"CPU number|backwards"):
        parse_cpu_range(text)


@given(st.sets(st.integers(0, 300)))
def test_any_set_survives_being_written_and_read(numbers: set[int]) -> None:
    assert set(parse_cpu_list(format_cpu_list(numbers))) == numbers


def test_nothing_known_is_one_node_of_single_cores() -> None:
    topology = flat_topology([3, 1])
    assert topology.allowed == (1, 3)
    assert [[cpu.number for cpu in core] for core in topology.cores()] == [[1], [3]]
    assert topology.nodes() == (0,)


def test_cores_hold_their_allowed_threads_with_neighbours_together() -> None:
    # Two packages numbered in turn, threads 4-7 on the cores of 0-3: as many servers number them.
    cpus = tuple(Cpu(n, n % 2, n % 2, n % 4) for n in range(8))
    topology = Topology(cpus, allowed=(0, 1, 2, 3, 4, 7))
    assert [[cpu.number for cpu in core] for core in topology.cores()] == [[0, 4], [2], [1], [3, 7]]
    assert topology.nodes() == (0, 1)
    assert Topology(cpus, allowed=(1, 3)).nodes() == (1,)
