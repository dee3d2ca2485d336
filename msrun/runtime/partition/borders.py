"""Borders between the host and the device: where every operator of a local program runs, and the copies in between.

An operator runs where its target says, by default on the device. A value that is read in the other memory is copied
once per direction, right behind the operator that makes it; its gradient comes back the other way. Parameters that
operators of the host alone read lie in the host's memory. Collectives run where their value is; results and buffers
are the device's.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from msrun.runtime.capture.marked_calls import TARGET
from msrun.runtime.partition.program import MODULE_PATH, ON_HOST, ORIGIN, LocalProgram
from msrun.runtime.partition.stages import StageProgram
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.operators.rule import DRAW, PLACE, apply_collective


def place_operators(
    program: LocalProgram,
    *,
    stored: Mapping[str, bool],
    host_inputs: Collection[int] = (),
    moved: Collection[str] = (),
) -> None:
    """Give every node of a program its place, and put the copies in; changes the program.

    Args:
        stored: parameter -> whether it lies on the host, of those of which that is decided.
        host_inputs: indexes of the user's tensors that lie on the host.
        moved: captured operators that run on the host besides those of the user.
    """
    _Placing(program, stored, host_inputs, moved).run()


def place_stages(
    program: LocalProgram, stages: Sequence[StageProgram], *, stored: Mapping[str, bool], host_inputs: Collection[int]
) -> None:
    """Do so in all stages of a pipeline; what travels between them, and their results, are the device's.

    A parameter lies on the host if the operators that read it run there, in every stage.

    Args:
        program: of all stages; learns which operators and parameters are on the host.
        stored, host_inputs: as for `place_operators`, of the whole program.
    """
    _Placing(program, stored, host_inputs, ()).decide()
    on_host = {name: name in program.host_parameters for name in program.parameters}
    for stage in stages:
        stage.program.host_parameters = set()
        own_inputs = [place for place, index in enumerate(stage.user_inputs) if index in host_inputs]
        place_operators(stage.program, stored=on_host, host_inputs=own_inputs)


class _Placing:
    def __init__(
        self,
        program: LocalProgram,
        stored: Mapping[str, bool],
        host_inputs: Collection[int],
        moved: Collection[str],
    ) -> None:
        self._program = program
        self._stored = stored
        self._moved = moved
        self._on_host: dict[fx.Node, bool] = {program.inputs[index]: True for index in host_inputs}
        self._copies: dict[fx.Node, fx.Node] = {}
        """value -> its copy in the other memory"""

        nodes = list(program.graph.nodes)
        self._operators = [n for n in nodes if n.op == "call_function" and n.target is not apply_collective]
        self._collectives = [n for n in nodes if n.target is apply_collective]

    def run(self) -> None:
        self.decide()
        for node in self._collectives:
            self._on_host[node] = self._on_host.get(node.all_input_nodes[0], False)
        for node in self._operators:
            node.meta[ON_HOST] = self._on_host[node]
            self._bring_inputs(node)
            if self._on_host[node]:
                _use_host_memory(node)
        self._bring_results()
        self._program.borders = list(self._copies.values())

    def decide(self) -> None:
        """Decide which operators and parameters are on the host; the graph stays as it is."""
        for node in self._operators:
            self._on_host[node] = self._runs_on_host(node)
        self._place_parameters()
        names = {node.meta[ORIGIN].name for node in self._operators if self._on_host[node] and ORIGIN in node.meta}
        self._program.operators = [replace(o, on_host=o.name in names) for o in self._program.operators]

    def _runs_on_host(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return self._on_host[node.all_input_nodes[0]]
        captured = node.meta.get(ORIGIN)
        return captured is not None and (captured.meta.get(TARGET) == "cpu" or captured.name in self._moved)

    def _place_parameters(self) -> None:
        for name, use in self._program.parameters.items():
            readers = find_readers(use.node)
            is_own = bool(readers) and all(self._on_host[reader] for reader in readers)
            self._on_host[use.node] = self._stored.get(name, is_own)
            if self._on_host[use.node]:
                self._program.host_parameters.add(name)

    def _bring_inputs(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            is_elsewhere = self._on_host.get(value, False) is not self._on_host[node]
            if is_elsewhere and value.name not in (PLACE, DRAW) and _is_tensor(value):
                node.replace_input_with(value, self._copy(value))

    def _bring_results(self) -> None:
        program = self._program

        def on_device(value: Any) -> Any:
            return self._copy(value) if isinstance(value, fx.Node) and self._on_host.get(value, False) else value

        program.outputs = [on_device(value) for value in program.outputs]
        program.buffer_updates = {buffer: on_device(value) for buffer, value in program.buffer_updates.items()}
        output = next(node for node in program.graph.nodes if node.op == "output")
        output.args = (tuple(program.outputs),)

    def _copy(self, value: fx.Node) -> fx.Node:
        """Return a value in the other memory."""
        if value not in self._copies:
            graph = self._program.graph
            is_given = value.op == "placeholder"
            first = next((node for node in graph.nodes if node.op != "placeholder"), None)
            with graph.inserting_before(first) if is_given else graph.inserting_after(value):
                kind: Any = "to_device" if self._on_host.get(value, False) else "to_host"
                given = {"collective": Collective(kind, ())}
                name = f"{value.name}_{kind}"  # no other stage of a pipeline has it
                made = graph.create_node("call_function", apply_collective, (value,), given, name)  # type: ignore[arg-type]
            keys = (ORIGIN,) if is_given else (ORIGIN, MODULE_PATH)
            made.meta = {key: value.meta[key] for key in keys if key in value.meta}
            self._copies[value] = made
        return self._copies[value]


def find_readers(value: fx.Node) -> set[fx.Node]:
    """Return the operators that read a value, or what collectives make of it."""
    found: set[fx.Node] = set()
    for user in value.users:
        if user.target is apply_collective:
            found |= find_readers(user)
        elif user.op == "call_function":
            found.add(user)
    return found


def _is_tensor(value: fx.Node) -> bool:
    """Return whether a value is one; operators may also give numbers, which both sides read."""
    captured = value.meta.get(ORIGIN)
    known = None if captured is None else captured.meta.get("val")
    return known is None or isinstance(known, torch.Tensor | list | tuple)


def _use_host_memory(node: fx.Node) -> None:
    """Let an operator that makes tensors of nothing make them on the host."""

    def moved(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    node.args = fx.node.map_aggregate(node.args, moved)
    node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
