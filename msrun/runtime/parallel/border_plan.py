"""BorderPlan: what a step copies between the memories of the host and the device, for the plan."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.partition.collective_messages import CollectiveTraffic, Message
from msrun.runtime.partition.program import MODULE_PATH, LocalProgram


@dataclass(frozen=True)
class BorderPlan:
    """One value that is read in the other memory, of one part of the batch."""

    value: str
    """What makes it: an operator with its module, an input or a parameter."""
    forward: Message
    """to_host or to_device, with its bytes."""
    backward: Message | None
    """Of its gradient, which goes the other way; None where there is none."""

    def __str__(self) -> str:
        back = "" if self.backward is None else f", gradient {_bytes_of(self.backward)}"
        return f"{self.value:<44} {_bytes_of(self.forward)}{back}"


def build_border_plans(
    program: LocalProgram, borders: Sequence[fx.Node], moved: Sequence[CollectiveTraffic]
) -> list[BorderPlan]:
    """Return what crosses borders.

    Args:
        program: of all stages, if there are some.
        borders: copies in it, or in the program of one stage.
        moved: what each of them moves.
    """
    whole = {node.name: node for node in program.graph.nodes}
    names = {use.node: user_name(name) for name, use in program.parameters.items()}
    names |= {node: user_name(name) for name, node in program.buffers.items()}
    names |= {node: f"input {index}" for index, node in enumerate(program.inputs)}
    found = []
    for node, traffic in zip(borders, moved, strict=True):
        if traffic.forward is not None:
            value = whole[node.all_input_nodes[0].name]
            found.append(BorderPlan(_name_of(value, names), traffic.forward, traffic.backward))
    return found


def _name_of(value: fx.Node, names: dict[fx.Node, str]) -> str:
    if value in names:
        return names[value]
    if value.op == "placeholder":
        return value.name
    collective = value.kwargs.get("collective")
    if collective is not None:
        return f"{collective} of {_name_of(value.all_input_nodes[0], names)}"
    if value.target is operator.getitem:  # one of the results of an operator
        return _name_of(value.all_input_nodes[0], names)
    path = value.meta.get(MODULE_PATH)
    return f"{str(value.target).removesuffix('.default')} of {user_name(path) if path else 'no module'}"


def _bytes_of(message: Message) -> str:
    return f"{message.operation} {message.bytes} B"
