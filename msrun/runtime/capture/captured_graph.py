"""CapturedGraph: a network and one call of it as operators on global shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from msrun.runtime.capture.assignment import Assignment
from msrun.runtime.capture.dynamo import TracedCall
from msrun.runtime.capture.marked_calls import MarkedCall


@dataclass(frozen=True)
class CapturedGraph:
    """One network as operators."""

    graph: fx.Graph
    """aten operators; every node has `meta["val"]` with its global shape and dtype."""
    parameters: dict[str, str]
    """placeholder name -> parameter name"""
    buffers: dict[str, str]
    """placeholder name -> buffer name"""
    constants: dict[str, Tensor]
    """placeholder name -> tensor that the network holds without registering it"""
    inputs: list[str]
    """placeholder names of the user's tensors, in order"""
    outputs: list[fx.Node | Any]
    """what the graph gives back to the call"""
    traced: TracedCall
    """when the graph holds, and the user's Python code around it"""
    placeholders: list[str | None]
    """names of the placeholders in the order in which the call gives their values; None: a value that has none here"""
    stored: frozenset[int] = frozenset()
    """indexes of outputs that the call does not return but stores: whole on every rank"""
    buffer_updates: dict[str, fx.Node] = field(default_factory=dict)
    """buffer name -> its value after the forward pass, of every buffer that the network changes"""
    assigned: dict[int, str] = field(default_factory=dict)
    """index of an output that the call assigns to a buffer -> the buffer's name"""
    assignment: Assignment = field(default_factory=Assignment)
    """what the user's strategies mean, beside what is written on the operators"""
    regions: list[MarkedCall] = field(default_factory=list)
    """calls that have a strategy of the user"""
