"""LocalProgram: what a partition leaves, the same graph for every rank, each with its own parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.partition.collective_messages import CollectiveTraffic
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.operators.rule import LabelSplit


@dataclass(frozen=True)
class Redistribution:
    """One value moved from the layout of its producer to that of a reader."""

    producer: str
    consumer: str
    source: tuple[int, ...]
    """Parts per dimension."""
    target: tuple[int, ...]
    bytes: int
    """That one rank receives, forward and backward."""
    asked: bool
    """True when the user asked for it: an out_strategy, an in_strategy of a region, or the layout of the results."""


def refuse_redistributions(redistributions: Sequence[Redistribution]) -> None:
    """Refuse the first redistribution that nobody asked for."""
    hidden = [one for one in redistributions if one.bytes and not one.asked]
    if not hidden:
        return
    first = hidden[0]
    fix = f"give {first.producer} out_strategy={(first.target,)}"
    if first.producer.startswith("input "):
        fix = f"pass it so with dataset_strategy, as {first.target}"
    elif first.producer.startswith("parameter "):
        fix = "give the operators that share it strategies that agree"
    others = f" ({len(hidden) - 1} more like it)" if len(hidden) > 1 else ""
    raise StrategyError(
        f"strict: {first.producer} gives {first.source} and {first.consumer} reads {first.target}, which moves "
        f"{first.bytes} bytes to each rank and step{others}; {fix}, or give both ends strategies that agree"
    )


@dataclass(frozen=True)
class Use:
    """How one operator reads a parameter, or how it is stored."""

    layout: TensorLayout
    partial_axes: Axes
    """Axes along which its gradient is a partial sum."""


@dataclass(frozen=True)
class Read:
    """One value as one operator reads it."""

    source: str
    """The captured node; of a parameter with several placeholders the first."""
    layout: TensorLayout
    """In which it is taken: as its operator leaves it, or as an earlier read has brought it."""
    steps: tuple[tuple[Collective, TensorLayout | None], ...] = ()
    """What it passes on its way, with the layout after each; None where only this reader can use the result."""


@dataclass(frozen=True)
class OperatorDecision:
    """What was decided for one captured node."""

    reads: tuple[Read, ...]
    """One for each tensor input."""
    layouts: tuple[TensorLayout, ...]
    """Of its results."""
    split: LabelSplit = field(default_factory=dict)
    """The axes that cut each label of its form."""
    origin: str = ""
    """user, searched, follows, data parallel, or no rule."""
    scatter: tuple[int, Axes] | None = None
    """Dimension and axes that its sums are left cut by, instead of whole: all readers cut them so."""


@dataclass
class Decisions:
    """What was decided for one call of a network."""

    mesh: Mesh
    input_layouts: list[TensorLayout]
    differentiable_inputs: frozenset[int] = frozenset()
    """Indexes of the user's tensors whose gradient is wanted."""
    operators: dict[str, OperatorDecision] = field(default_factory=dict)
    """captured node -> its decision, in the order of the graph"""
    parameters: dict[str, Use] = field(default_factory=dict)
    """parameter -> how it is stored, before optimizer parallel cuts it further"""
    placeholders: dict[str, str] = field(default_factory=dict)
    """placeholder of a parameter -> the first placeholder of that parameter"""
    outputs: list[Any] = field(default_factory=list)
    """`Read` of every result that is a value; others as they are."""
    output_layouts: list[TensorLayout | None] = field(default_factory=list)
    """How each result leaves the program; None: no value."""
    buffer_updates: dict[str, Read] = field(default_factory=dict)
    """buffer -> its value after the forward pass"""
    redistributions: list[Redistribution] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


MODULE_PATH = "module_path"
"""Key in a local node's meta: the module whose operator it is, or for whose operator it was inserted."""
ORIGIN = "captured"
"""Key in a local node's meta: the captured operator that it was made for."""
OWN = "msrun_own"
"""Key in the meta of a local collective: its operator's rule has made it, not a read of its inputs."""
ON_HOST = "msrun_on_host"
"""Key in a local operator's meta: whether it runs on the host."""


@dataclass
class ParameterUse:
    """How the graph uses one parameter."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    layout: TensorLayout
    """Layout at its use, before optimizer parallel cuts it further; uses in other layouts are redistributed."""
    partial_axes: Axes
    """Axes along which this rank's gradient is a partial sum."""
    node: fx.Node
    """Its placeholder in the local graph; gets the part that `layout` says."""
    has_row_gradient: bool = False
    """Some operator looks rows up in it, and its gradient has these rows alone unless another one adds more."""


@dataclass(frozen=True)
class OperatorPlan:
    """What was decided for one operator: for the plan's explanation."""

    name: str
    operator: str
    module_path: str
    strategy: tuple[tuple[int, ...], ...]
    """MindSpore's tuples: parts per dimension, per input."""
    origin: str
    """user, searched, follows, data parallel, or no rule."""
    collectives: tuple[str, ...]
    """What was inserted for it."""
    traffic: tuple[CollectiveTraffic, ...] = ()
    """What these move, in the plan of a program."""
    repeats: int = 1
    """Ranks that compute the same: its strategy cuts it into fewer parts than there are ranks."""
    on_host: bool = False
    """Whether it runs on the host beside the device."""
    axes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The mesh axes that cut each dimension, per input."""


@dataclass
class LocalProgram:
    """The program of every rank: the same graph, each with its own parts."""

    graph: fx.Graph
    mesh: Mesh
    parameters: dict[str, ParameterUse]
    buffers: dict[str, fx.Node]
    """name -> placeholder; buffers are whole on every rank"""
    constants: dict[str, tuple[fx.Node, torch.Tensor]]
    inputs: list[fx.Node]
    input_layouts: list[TensorLayout]
    outputs: list[Any]
    """fx nodes or plain values"""
    operators: list[OperatorPlan]
    notes: list[str] = field(default_factory=list)
    collectives: list[list[fx.Node]] = field(default_factory=list)
    """Nodes of the collectives of each operator, and last those of the results."""
    redistributions: list[Redistribution] = field(default_factory=list)
    buffer_updates: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """placeholder of a buffer -> its value after the forward pass"""
    output_layouts: list[TensorLayout | None] = field(default_factory=list)
    """How each result leaves a whole program; None: no value."""
    differentiable_inputs: frozenset[int] = frozenset()
    """Indexes of the user's tensors whose gradient is wanted."""
    borders: list[fx.Node] = field(default_factory=list)
    """Copies between the memories of the host and the device."""
    host_parameters: set[str] = field(default_factory=set)
    """Names of parameters that lie in the host's memory."""
    values: dict[str, tuple[fx.Node, TensorLayout]] = field(default_factory=dict)
    """captured operator -> its local result, and how that is cut"""
