"""Which operators to move to the host so that a step fits into the memory of the device.

Only operators that read parameters are moved, together with these. The cheapest go first: those that save most bytes
of the device for each byte that a step then copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.capture.host_calls import TARGET
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.partition.borders import find_readers
from msrun.runtime.partition.local_values import LocalValues, local_values
from msrun.runtime.partition.program import MODULE_PATH, ORIGIN, LocalProgram
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import apply_collective

MB = 2**20
Names = frozenset[str]
"""Of captured operators."""


@dataclass(frozen=True)
class DeviceLimit:
    """What `AutoParallel.device_memory_limit` asks for.

    Raises:
        StrategyError: a value out of its range.
    """

    limit_mb: float
    optimizer_states: int = 2

    def __post_init__(self) -> None:
        is_number = isinstance(self.limit_mb, int | float) and not isinstance(self.limit_mb, bool)
        if not is_number or not self.limit_mb > 0:
            raise StrategyError(f"device_memory_limit({self.limit_mb!r}): must be a number of MB above 0")
        if not isinstance(self.optimizer_states, int) or self.optimizer_states < 0:
            raise StrategyError(
                f"device_memory_limit(optimizer_states={self.optimizer_states!r}): must be a whole number, 0 or more"
            )

    def bytes_of(self, item: PlacedParameter, mesh: Mesh) -> int:
        """Return what a parameter takes on this rank: its part, what is gathered of it, gradient, optimizer state."""
        size = item.parameter.element_size()
        placed = item.placement
        part = math.prod(placed.stored.local_shape(mesh, placed.shape)) * size
        used = math.prod(placed.used.local_shape(mesh, placed.shape)) * size
        gathered = used if placed.shard_axes else 0
        return part + gathered + (used + part * self.optimizer_states if item.parameter.requires_grad else 0)


@dataclass(frozen=True)
class _Candidate:
    """Operators that move together, for they share parameters."""

    operators: Names
    saved: int
    """Bytes of the device."""
    copied: int
    """Bytes that a step copies in both directions when these operators alone are moved."""

    @property
    def worth(self) -> float:
        return self.saved / self.copied if self.copied else math.inf


def keep_host_operators(program: LocalProgram, stored: Mapping[str, bool]) -> tuple[Names, str]:
    """Return the operators that read parameters which an earlier call has moved, and one line about them."""
    found = [find_readers(use.node) for name, use in program.parameters.items() if stored.get(name)]
    moved = frozenset(node.meta[ORIGIN].name for nodes in found for node in nodes if ORIGIN in node.meta)
    return moved, f"device_memory_limit: as in the first call, on the host: {_modules(program, moved) or 'nothing'}"


def choose_host_operators(
    program: LocalProgram,
    limit: DeviceLimit,
    sizes: Mapping[str, int],
    device_bytes: Callable[[Names], int],
) -> tuple[Names, str]:
    """Return the fewest operators, the cheapest first, that make a step fit, and one line about them.

    Args:
        program: before its operators are placed.
        sizes: parameter -> bytes that it takes on the device, with its gradient and optimizer state.
        device_bytes: bytes on the device with these operators on the host besides those of the user.

    Raises:
        StrategyError: nothing fits; says how much is missing.
    """
    most, whole = limit.limit_mb * MB, device_bytes(frozenset())
    if whole <= most:
        return frozenset(), f"device_memory_limit: {_size(whole)} of {_size(most)}; nothing is moved"
    ranked = sorted(_candidates(program, sizes), key=lambda candidate: -candidate.worth)

    def chosen(count: int) -> Names:
        return frozenset(name for candidate in ranked[:count] for name in candidate.operators)

    too_few, enough = 0, len(ranked)
    least = device_bytes(chosen(enough))
    if least > most:
        raise StrategyError(
            f"device_memory_limit({limit.limit_mb:g}): a step needs {_size(whole)} of the device, and {_size(least)} "
            f"with every operator that has parameters on the host: {_size(least - most)} are missing; give more, cut "
            "parameters with hsdp(), or recompute modules"
        )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if device_bytes(chosen(middle)) <= most:
            enough = middle
        else:
            too_few = middle
    moved = chosen(enough)
    sizes_text = f"{_size(device_bytes(moved))} instead of {_size(whole)}"
    return moved, f"device_memory_limit: {sizes_text} of the device; on the host: {_modules(program, moved)}"


def _size(size: float) -> str:
    return f"{size / MB:.2f} MB" if size >= MB else f"{size / 1024:.1f} KB"


def _modules(program: LocalProgram, operators: Names) -> str:
    nodes = [n for n in program.graph.nodes if ORIGIN in n.meta and n.meta[ORIGIN].name in operators]
    return ", ".join(dict.fromkeys(user_name(n.meta.get(MODULE_PATH, "")) or str(n.target) for n in nodes))


def _candidates(program: LocalProgram, sizes: Mapping[str, int]) -> list[_Candidate]:
    """Return what can be moved; operators with a target of the user's stay."""
    groups: list[tuple[set[str], int]] = []
    for name, use in program.parameters.items():
        readers = find_readers(use.node)
        if not readers or any(ORIGIN not in node.meta or TARGET in node.meta[ORIGIN].meta for node in readers):
            continue
        operators, saved = {node.meta[ORIGIN].name for node in readers}, sizes[name]
        for other in [group for group in groups if group[0] & operators]:
            groups.remove(other)
            operators, saved = operators | other[0], saved + other[1]
        groups.append((operators, saved))
    values = local_values(program)
    given = {use.node for use in program.parameters.values()}
    return [
        _Candidate(frozenset(operators), saved, _copied(program, operators, values, given))
        for operators, saved in groups
    ]


def _copied(program: LocalProgram, operators: Collection[str], values: LocalValues, given: Collection[fx.Node]) -> int:
    """Return the bytes that cross the borders around operators in a step."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node.target is not apply_collective]
    inside = {node for node in calls if ORIGIN in node.meta and node.meta[ORIGIN].name in operators}
    read = {value for node in inside for value in node.all_input_nodes if _source(value) not in inside | {*given}}
    results: Sequence[Any] = program.outputs
    outside = {n for node in calls if node not in inside for n in node.all_input_nodes}
    outside |= {n for n in results if isinstance(n, fx.Node)}
    written = {_source(value) for value in outside} & inside
    crossing = [values[value] for value in (*read, *written) if value in values]
    return sum(value.nbytes * (2 if value.requires_grad else 1) for value in crossing)


def _source(value: fx.Node) -> fx.Node:
    """Return what collectives were made of."""
    while value.target is apply_collective:
        value = value.all_input_nodes[0]
    return value
