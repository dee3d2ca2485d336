"""The processors of a host as a value, and the kernel's way of writing sets of them. Read by `msrun.agent.host`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ranktable.hostlist.ranges import RangeError, fold_numbers, read_range

MAX_CPU = 1 << 16
"""No kernel counts further (CONFIG_NR_CPUS); what is larger is a slip of the pen."""


@dataclass(frozen=True)
class Cpu:
    """One processor as the kernel numbers them: a hardware thread."""

    number: int
    node: int
    """NUMA node."""
    package: int
    core: int
    """Lowest processor number of its physical core: equal for hyper-threads of one core, unique on the host."""


@dataclass(frozen=True)
class Topology:
    """The processors of a host and what this process may use of them."""

    cpus: tuple[Cpu, ...]
    """Every processor that is online."""
    allowed: tuple[int, ...]
    """Processors that this process may use: its affinity within the cgroup's cpuset."""
    quota_cores: float | None = None
    """The cgroup's limit of processor time, in processors; None = no limit."""
    memory_nodes: tuple[int, ...] = (0,)
    """NUMA nodes with memory that this process may use."""
    device_nodes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """Per device target: every accelerator of the host by its number, and its NUMA node, None when not known."""

    def cores(self) -> list[tuple[Cpu, ...]]:
        """Return the allowed processors by physical core, neighbours next to each other."""
        allowed = set(self.allowed)
        groups: dict[int, list[Cpu]] = {}
        for cpu in sorted(self.cpus, key=lambda cpu: (cpu.node, cpu.package, cpu.core, cpu.number)):
            if cpu.number in allowed:
                groups.setdefault(cpu.core, []).append(cpu)
        return [tuple(group) for group in groups.values()]

    def nodes(self) -> tuple[int, ...]:
        """Return the NUMA nodes that have a processor this process may use."""
        allowed = set(self.allowed)
        return tuple(sorted({cpu.node for cpu in self.cpus if cpu.number in allowed}))


def flat_topology(cpus: Iterable[int]) -> Topology:
    """Return processors of which nothing is known: one node, and each a core of its own."""
    numbers = tuple(sorted(cpus))
    return Topology(tuple(Cpu(number, 0, 0, number) for number in numbers), numbers)


def parse_cpu_range(text: str) -> range:
    """Turn `4` or `0-3` into processor numbers.

    Raises:
        ValueError: not of that form, or backwards.
    """
    try:
        return read_range(text.strip(), MAX_CPU).numbers
    except RangeError as error:
        wrong = {"backwards": "runs backwards", "beyond": "is beyond every CPU number"}
        raise ValueError(f"{text!r} {wrong.get(error.reason, 'is no CPU number or range')}") from None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Turn the kernel's `0-3,8` into numbers, ascending; blank text is the empty set.

    Raises:
        ValueError: not such a list.
    """
    pieces = [piece for piece in text.strip().split(",") if piece.strip()]
    return tuple(sorted({number for piece in pieces for number in parse_cpu_range(piece)}))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Return numbers in the kernel's form: `0-3,8`."""
    return fold_numbers(numbers, ",")
