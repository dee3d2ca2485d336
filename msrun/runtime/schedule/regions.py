"""Regions: the parts of a program that are computed again before their backward pass instead of being remembered.

A region is one call of one recomputed module, or one block that the network runs under torch.utils.checkpoint: a run of
nodes of the local graph that stand together, its collectives included. After the forward pass only what the region
reads and what others read of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from msrun.runtime.partition.program import MODULE_PATH, ORIGIN, LocalProgram
from msrun.runtime.sharding.operators.rule import CHECKPOINT, IS_CAST, find_module

SavePolicy = Callable[[object], bool]


@dataclass(frozen=True)
class RecomputeSpec:
    """How one module is recomputed."""

    mp_comm_recompute: bool = True
    """Its collectives run again too; False keeps their results."""
    parallel_optimizer_comm_recompute: bool = False
    """Parameters that optimizer parallel has cut are freed after its forward pass and gathered again."""
    save: SavePolicy | None = None
    """Operators whose results are kept."""


@dataclass
class Region:
    """One call of a recomputed module."""

    path: str
    spec: RecomputeSpec
    nodes: list[str] = field(default_factory=list)
    """Names of its nodes in the local graph, in order."""


def find_regions(program: LocalProgram, specs: Mapping[str, RecomputeSpec]) -> list[Region]:
    """Return the regions in program order.

    Nodes that stand together and nothing of another module between them: then no value can leave a region and come
    back into it, so that it can be computed again at once.
    """
    regions: list[Region] = []
    current: Region | None = None
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        path = find_module(node.meta[MODULE_PATH], specs) if MODULE_PATH in node.meta else None
        if path is None and ORIGIN in node.meta and CHECKPOINT in node.meta[ORIGIN].meta:
            path = f"checkpoint {node.meta[ORIGIN].meta[CHECKPOINT]}"
        if path is None and current is not None and _casts_result_of(node, current):
            path = current.path
        if path is None:
            current = None
            continue
        if current is None or current.path != path:
            current = Region(path, specs.get(path, RecomputeSpec()))
            regions.append(current)
        current.nodes.append(node.name)
    return regions


def _casts_result_of(node: fx.Node, region: Region) -> bool:
    """Return whether autocast has put a cast between the operators of a module, such as the parts of one result."""
    captured = node.meta.get(ORIGIN)
    return captured is not None and IS_CAST in captured.meta and node.all_input_nodes[0].name in region.nodes


def parameters_of(program: LocalProgram, regions: Sequence[Region]) -> set[str]:
    """Return the names of parameters that only these regions read."""
    inside = {name for region in regions for name in region.nodes}
    return {
        name
        for name, use in program.parameters.items()
        if use.node.users and all(reader.name in inside for reader in use.node.users if reader.op == "call_function")
    }
