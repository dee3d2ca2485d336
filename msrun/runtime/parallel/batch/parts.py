"""Parts of a batch: how copies and micro batches are cut out of it, and how their results are joined."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError

PartKind = Literal["copies", "micro batches"]


@dataclass(frozen=True)
class BatchParts:
    """How the batch of one rank is divided: kind and number for every wrapper, outermost first.

    Slices are contiguous, so nested wrappers make the same slices as one cut into all parts.
    """

    divisions: tuple[tuple[PartKind, int], ...] = ()

    @property
    def copies(self) -> int:
        """Parts that are interleaved."""
        return self._count("copies")

    @property
    def micro_batches(self) -> int:
        """Parts that run one after the other, forward and backward."""
        return self._count("micro batches")

    @property
    def total(self) -> int:
        """All parts."""
        return self.copies * self.micro_batches

    def _count(self, kind: PartKind) -> int:
        return math.prod(number for own, number in self.divisions if own == kind)

    @cached_property
    def places(self) -> list[list[int]]:
        """For every micro batch, the slice that each of its copies is.

        In the order of the rows, however the wrappers are nested: what one part leaves for the next one, such as
        running statistics, is then what the parts leave when they run one after the other.
        """
        return [list(range(first, first + self.copies)) for first in range(0, self.total, self.copies)]

    def split(self, inputs: Sequence[Any]) -> list[list[tuple[Any, ...]]]:
        """Return for every micro batch the inputs of each of its copies."""
        slices = split_batch(tuple(inputs), self.total, self.describe())
        return [[slices[index] for index in micro] for micro in self.places]

    def in_order(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """Return what came out per micro batch and copy in the order of the slices."""
        flat: list[Any] = [None] * self.total
        for micro, values in zip(self.places, results, strict=True):
            for index, value in zip(micro, values, strict=True):
                flat[index] = value
        return flat

    def check(self, rows: int) -> None:
        """Refuse a batch that cannot be divided evenly."""
        check_rows(rows, self.total, self.describe())

    def describe(self) -> str:
        """Return what the parts are, for messages."""
        kinds = {kind for kind, number in self.divisions if number > 1}
        return kinds.pop() if len(kinds) == 1 else "parts"


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, in order."""
    return [leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]


def open_containers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let tensors be found in dataclasses and in dicts of the user's own classes among the arguments of a call.

    torch looks only into the classes that it was told of.
    """
    for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, Tensor | type):
            continue
        if dataclasses.is_dataclass(leaf):
            fields = dataclasses.fields(leaf)
            values = [getattr(leaf, each.name, None) for each in fields]
            open_containers(values, {})
            if find_tensors(values, {}):
                pytree.register_dataclass(type(leaf), drop_field_names=[each.name for each in fields if not each.init])
        elif isinstance(leaf, dict):  # of a class of the user's own: torch knows its own classes
            open_containers(tuple(leaf.values()), {})
            if find_tensors(tuple(leaf.values()), {}):
                pytree.register_pytree_node(type(leaf), _items_of, functools.partial(_with_items, type(leaf)))


def _items_of(value: dict[Any, Any]) -> tuple[list[Any], tuple[list[Any], dict[str, Any]]]:
    return list(value.values()), (list(value), dict(vars(value)) if hasattr(value, "__dict__") else {})


def _with_items(kind: type[Any], items: Iterable[Any], context: tuple[list[Any], dict[str, Any]]) -> Any:
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]
    dict.update(made, zip(context[0], items, strict=True))
    if context[1]:
        vars(made).update(context[1])
    return made


def describe_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the shapes of a call's tensors in words, for messages."""
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in find_tensors(args, kwargs)]
    return f"a batch of {', '.join(shapes) or 'nothing'}"


def split_batch(inputs: tuple[Any, ...], count: int, what: str = "copies") -> list[tuple[Any, ...]]:
    """Return `count` tuples of contiguous slices of dimension 0; what is not a tensor goes to all of them."""
    if count == 1:
        return [inputs]
    for value in inputs:
        if isinstance(value, Tensor) and value.dim():
            check_rows(value.shape[0], count, what)
    return [
        tuple(_slice(value, index, count) if isinstance(value, Tensor) and value.dim() else value for value in inputs)
        for index in range(count)
    ]


def check_rows(rows: int, count: int, what: str) -> None:
    """Refuse a batch that cannot be cut into `count` equal parts."""
    if rows % count:
        raise StrategyError(
            f"a batch of {rows} rows on this rank cannot be cut into {count} equal {what}; give a batch that "
            f"{count} divides"
        )


def _slice(value: Tensor, index: int, count: int) -> Tensor:
    length = value.shape[0] // count
    return torch.narrow(value, 0, index * length, length)


def join_results(results: list[Any], scale: float) -> Any:
    """Join the results of the parts of a batch: scalars are added up with a factor, others joined along dimension 0."""
    leaves, spec = pytree.tree_flatten(results[0])
    rows = [leaves, *(pytree.tree_leaves(result) for result in results[1:])]
    return pytree.tree_unflatten([join_values(list(values), scale) for values in zip(*rows, strict=True)], spec)


def join_values(values: list[Any], scale: float) -> Any:
    """Join one result of all parts."""
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim() == 0:
        return torch.stack(values).sum() * scale
    return torch.cat(values)
