"""Buffers that the forward pass changes: when they are written, and which segments a copy runs without a break.

Copy 2 must read what copy 1 wrote, as one process that runs the copies one after the other. From the first segment
that reads such a buffer to the one in which its new value comes, copies are therefore not interleaved: these segments
are one span, run by copy 1, then by copy 2. Batch normalisation reads and writes its statistics in one segment, so its
copies are still interleaved everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.segments import Name, Segment


@dataclass(frozen=True)
class BufferUpdate:
    """One buffer gets a new value."""

    buffer: Name
    """Its placeholder."""
    value: Name


@dataclass(frozen=True)
class BufferPlan:
    """What an executor does about buffers."""

    updates: Mapping[int, Sequence[BufferUpdate]]
    """segment -> what is written when a copy has run it"""
    spans: Sequence[range]
    """All segments in order, in the groups that a copy runs without a break."""

    @property
    def written(self) -> list[Name]:
        """Placeholders of the buffers that change."""
        return [update.buffer for updates in self.updates.values() for update in updates]


def plan_buffers(program: LocalProgram, segments: Sequence[Segment]) -> BufferPlan:
    """Return when every changed buffer is written, and the spans."""
    updates: dict[int, list[BufferUpdate]] = {}
    bound: set[int] = set()
    for placeholder, value in program.buffer_updates.items():
        reads = [i for i, segment in enumerate(segments) if placeholder.name in _read_names(segment)]
        last = _available(value, segments)
        updates.setdefault(last, []).append(BufferUpdate(placeholder.name, value.name))
        bound |= set(range(min([*reads, last]), last))
    spans: list[range] = []
    start = 0
    for index in range(len(segments)):
        if index not in bound:  # not bound to the next one
            spans.append(range(start, index + 1))
            start = index + 1
    return BufferPlan(updates, spans)


def _read_names(segment: Segment) -> set[Name]:
    return {*segment.reads, *(crossing.source for crossing in segment.crossings)}


def _available(value: fx.Node, segments: Sequence[Segment]) -> int:
    """Return the first segment after which a value is there: collectives arrive one segment after their start."""
    for index, segment in enumerate(segments):
        if value.name in segment.writes:
            return index
        if any(crossing.result == value.name for crossing in segment.crossings):
            return min(index + 1, len(segments) - 1)
    return 0  # an input of the program
