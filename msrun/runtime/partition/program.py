"""LocalProgram: what a partition leaves, the same graph for every rank, each with its own parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from msrun.runtime.partition.collective_messages import CollectiveTraffic
from msrun.runtime.partition.decisions import Redistribution
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout

MODULE_PATH = "module_path"
"""Key in a local node's meta: the module whose operator it is, or for whose operator it was inserted."""
ORIGIN = "captured"
"""Key in a local node's meta: the captured operator that it was made for."""
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
