"""Values of one rank while decisions are walked through: where each is, what it passed, and whose memory it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from msrun.runtime.cost.operators import TensorSpec
from msrun.runtime.partition.collective_messages import result_shape
from msrun.runtime.partition.decisions import Read
from msrun.runtime.partition.local_work import LocalWork
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Mesh, TensorLayout


@dataclass
class Crossed:
    """One collective that brings a value to its readers."""

    owner: Any
    """Who read it first."""
    collective: Collective
    value: TensorSpec
    """Its input."""
    has_gradient: bool
    """Whether some reader sends a gradient back."""


@dataclass(frozen=True)
class _Value:
    spec: TensorSpec
    storage: int


class HeldValues:
    """Mirrors what lowering makes of reads: two readers of one value share its collectives."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._values: list[_Value] = []
        self._held: dict[tuple[str, TensorLayout], int] = {}
        """(captured node, layout) -> value"""
        self._items: dict[str, list[int]] = {}
        """captured node -> its results"""
        self._made: dict[tuple[int, str], int] = {}
        self._crossed: dict[tuple[int, str], Crossed] = {}
        self._storage_bytes: list[int] = []
        self._maker_of: list[str] = []
        """storage -> the captured operator that makes it, or brings it to itself"""
        self._given: set[int] = set()
        self._kept: set[int] = set()
        self._own_bytes: dict[str, int] = {}

    @property
    def crossed(self) -> list[Crossed]:
        """Collectives of all reads, in order."""
        return list(self._crossed.values())

    def add_given(self, name: str, layout: TensorLayout, value: Tensor) -> None:
        """Add what exists before the step: a parameter, a buffer, a part of the batch."""
        number = self._add(TensorSpec(layout.local_shape(self._mesh, value.shape), value.dtype), name)
        self._given.add(self._values[number].storage)
        self._held[name, layout] = number

    def name_as(self, number: int, name: str, layout: TensorLayout) -> None:
        """Say that a value is a captured node's too."""
        self._held[name, layout] = number

    def add_results(
        self, name: str, layouts: Sequence[TensorLayout], value: Any, inputs: Sequence[int], work: LocalWork
    ) -> None:
        """Add what an operator gives, and note what it keeps for the backward pass.

        Args:
            layouts: of its results; none of an operator whose results are all whole.
            inputs: the values that it has read.
        """
        values = value if isinstance(value, list | tuple) else [value]
        tensors = [(index, each) for index, each in enumerate(values) if isinstance(each, Tensor)]
        made = []
        for place, (index, each) in enumerate(tensors):
            layout = layouts[index] if index < len(layouts) else TensorLayout.replicated(each.dim())
            spec = TensorSpec(layout.local_shape(self._mesh, each.shape), each.dtype)
            source = work.aliases.get(place)
            made.append(self._add(spec, name, self._values[inputs[source]].storage if source is not None else None))
        self._items[name] = made
        if made and layouts:
            self._held[name, layouts[0]] = made[0]
        self._kept |= {self._values[inputs[index]].storage for index in work.saved_inputs}
        self._kept |= {self._values[made[index]].storage for index in work.saved_results if index < len(made)}
        if work.saved_bytes:
            self._own_bytes[name] = work.saved_bytes

    def take_item(self, source: str, index: int, name: str, layout: TensorLayout) -> None:
        """Say that a captured node is one result of another."""
        if index < len(self._items[source]):
            self._held[name, layout] = self._items[source][index]
            self._items[name] = [self._items[source][index]]

    def read(self, read: Read, owner: Any, *, has_gradient: bool) -> int:
        """Return the value that a reader gets; collectives on its way are made once."""
        number = self._held[read.source, read.layout]
        for collective, layout in read.steps:
            number = self._pass(number, collective, owner, has_gradient=has_gradient)
            if layout is not None:
                self._held.setdefault((read.source, layout), number)
        return number

    def kept_bytes(self) -> dict[str, int]:
        """Return for every operator the bytes that are kept between the passes beside what exists before the step."""
        kept = dict(self._own_bytes)
        for key in sorted(self._kept - self._given):
            kept[self._maker_of[key]] = kept.get(self._maker_of[key], 0) + self._storage_bytes[key]
        return kept

    def _pass(self, number: int, collective: Collective, owner: Any, *, has_gradient: bool) -> int:
        key = (number, str(collective))
        if key in self._made:
            self._crossed[key].has_gradient |= has_gradient
            return self._made[key]
        value = self._values[number]
        self._crossed[key] = Crossed(owner, collective, value.spec, has_gradient)
        shape = result_shape(collective, value.spec.shape, self._mesh)
        result = self._add(TensorSpec(shape, value.spec.dtype), owner.name, self._memory_after(value, collective))
        self._made[key] = result
        self._kept |= {value.storage, self._values[result].storage}  # both outlive the segments that they stand between
        return result

    @staticmethod
    def _memory_after(value: _Value, collective: Collective) -> int | None:
        """Return the memory of a collective's result if it is its input's: rows of a tensor are."""
        is_rows = collective.kind == "slice" and math.prod(value.spec.shape[: collective.dim]) == 1
        return value.storage if collective.kind == "enter" or is_rows else None

    def _add(self, spec: TensorSpec, maker: str, storage: int | None = None) -> int:
        if storage is None:
            storage = len(self._storage_bytes)
            self._storage_bytes.append(spec.nbytes)
            self._maker_of.append(maker)
        self._values.append(_Value(spec, storage))
        return len(self._values) - 1
