"""The local program as text, with what passes over it have added: gathers, frees, recomputation, sums of gradients.

What stands here is read from the issue order that the executor follows, line by line in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.schedule.deferred_weights import deferred_in
from msrun.runtime.schedule.segments import render_segment

SHOWN_NAMES = 2


def render_program(executor: Executor, copies: int, *, weights_by_schedule: bool = False) -> str:
    """Return every operator, collective and message of a training step, in the order in which one copy issues them.

    Args:
        copies: of the batch, which are interleaved.
        weights_by_schedule: deferred weight gradients are computed when the schedule of a pipeline says.
    """
    return "\n".join([*_forward(executor, copies), *_backward(executor, weights_by_schedule=weights_by_schedule)])


def _forward(executor: Executor, copies: int) -> Iterator[str]:
    """Yield the forward pass; between slots of segments other copies are issued."""
    order, started = executor.order, set[int]()
    yield from _gathers(executor, order.gathered_before[0], started)
    for slot in order.forward:
        for index in slot:
            yield from _gathers(executor, executor.segments[index].groups, started)
            yield from _gathers(executor, order.gathered_before[index + 1], started)
            segment = executor.segments[index]
            note = "" if segment.region is None else f", recomputed: {user_name(executor.regions[segment.region].path)}"
            yield from render_segment(index, segment, note)
        for index in slot:
            yield from _frees(executor, order.freed_after[index])
        if copies > 1 and slot is not order.forward[-1]:
            yield "    the same of the other copies"


def _backward(executor: Executor, *, weights_by_schedule: bool) -> Iterator[str]:
    """Yield the backward pass: what happens beside the way back of every segment."""
    order, started = executor.order, set[int]()
    replays = {replay.last: replay for replay in executor.replays if replay.segments}
    freed = {number for number, group in enumerate(executor.groups) if group.regathers}
    for index in (index for slot in order.backward for index in slot):
        yield from _gathers(executor, order.gathered_again[index], started, "again")
        if index in replays:
            yield f"    run again: segments {', '.join(map(str, replays[index].steps))}"
        yield f"backward of segment {index}"
        if deferred := deferred_in(executor.segments[index]):
            when = "when the schedule says" if weights_by_schedule else "after its collectives have started"
            yield f"    gradients of the weights of {', '.join(deferred)}: {when}"
        yield from _frees(executor, [number for number in executor.segments[index].new_groups if number in freed])
        for number in order.departures.get(index, []):
            group = executor.gradient_groups[number]
            yield f"    {'send' if group.is_sent else 'keep'} gradients {number}: {_names(group.members)}"


def _gathers(executor: Executor, numbers: Sequence[int], started: set[int], again: str = "") -> Iterator[str]:
    """Yield the gathers that have not started yet."""
    for number in numbers:
        if executor.groups[number].shard_axes and number not in started:
            started.add(number)
            yield f"    gather message {number}{again and ' '}{again}: {_names(executor.groups[number].members)}"


def _frees(executor: Executor, numbers: Sequence[int]) -> Iterator[str]:
    for number in numbers:
        yield f"    free message {number}: {_names(executor.groups[number].members)}"


def _names(members: Sequence[PlacedParameter]) -> str:
    more = f" and {len(members) - SHOWN_NAMES} more" if len(members) > SHOWN_NAMES else ""
    return ", ".join(user_name(member.name) for member in members[:SHOWN_NAMES]) + more
