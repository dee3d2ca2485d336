"""Capture: one call of a network becomes one graph of aten operators on global shapes.

Fakes of global shape stand in for parameters and inputs, so no value is computed and no memory is used; a network whose
parameters were never initialised, or are cut already, is captured like any other. Names of parameters are the user's.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError
from msrun.runtime.capture.assignment import assign_strategies
from msrun.runtime.capture.aten import trace_aten
from msrun.runtime.capture.batch_rows import trace_batch_rows
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.capture.divisions import check_wrappers
from msrun.runtime.capture.dynamo import TracedCall, trace_call
from msrun.runtime.capture.fakes import Fakes, GlobalShape, faked
from msrun.runtime.capture.flattened_linear import unflatten_linears
from msrun.runtime.capture.host_calls import HostOrDevice, assign_targets, note_functions
from msrun.runtime.capture.marked_calls import TOP, marking, number_calls
from msrun.runtime.capture.process_state import unchanged_process
from msrun.runtime.capture.target import Target
from msrun.runtime.capture.writes import make_functional
from msrun.runtime.sharding.operators.dropout import number_dropouts
from msrun.runtime.sharding.operators.rule import line_of_use, user_line
from msrun.runtime.sharding.strategies import OperatorStrategy


def capture(
    target: Target,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    input_shapes: Sequence[GlobalShape],
    parameter_shapes: Mapping[str, GlobalShape],
    strategies: Mapping[str, OperatorStrategy] | None = None,
    targets: Mapping[str, HostOrDevice] | None = None,
    wrappers: Sequence[Any] = (),
) -> CapturedGraph:
    """Trace `target` once.

    Args:
        args, kwargs: one call's arguments; tensors become inputs of the graph, everything else is guarded.
        input_shapes: global shape of every tensor among them, in order.
        parameter_shapes: global shape of every parameter, which may be sharded already.
        strategies: module path -> the user's strategy. Those of functions come with their calls.
        targets: module path -> where the user wants it to run. Those of functions come with their calls.
        wrappers: those of the network that divide its batch, outermost first; one part of it is traced.

    Raises:
        CaptureError: a construct that cannot be captured; names it, its line and what to do.
        StrategyError: a strategy of a module or function in which it could mean several operators, or none.
    """
    root = target.root
    _refuse_backward_hooks(root)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with (
        faked(root, given, input_shapes, parameter_shapes) as fakes,
        marking(root, strategies or {}) as marked,
        unchanged_process({"cpu", *(fake.device.type for fake in fakes.inputs)}),
    ):
        fake = iter(fakes.inputs)
        filled = [next(fake) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
        unguarded = fakes.ids | {id(table) for table, _ in marked.hooks}
        traced = trace_call(target.call, call_args, call_kwargs, unguarded=unguarded)
        traced.hooks = marked.hooks
        module = trace_aten(traced, root)
        roles = _Roles(traced, fakes, root, parameter_shapes)
    graph = roles.rewrite(module)
    _drop_bookkeeping(graph)
    note_functions(graph)
    regions = number_calls(graph, marked.names)
    check_wrappers(graph, wrappers, roles.inputs, traced.stores.results)
    assignment = assign_strategies(graph, regions, roles.parameters, root)
    missing = sorted({name for name, _ in marked.names.values()} - {region.name for region in regions})
    if missing:
        assignment.notes.append(f"strategies of modules that the graph does not call: {', '.join(missing)}")
    outputs, assigned, updates = _settle_outputs(graph, traced, roles, root)
    unflatten_linears(graph)
    number_dropouts(graph)
    trace_batch_rows(graph, roles.inputs)
    idle = sorted(set(targets or {}) - assign_targets(graph, targets or {}))
    if idle:
        assignment.notes.append(f"targets of modules that the graph does not call: {', '.join(idle)}")
    return CapturedGraph(
        graph=graph,
        parameters=roles.parameters,
        buffers=roles.buffers,
        constants=roles.constants,
        inputs=roles.inputs,
        outputs=outputs,
        traced=traced,
        placeholders=roles.placeholders,
        stored=frozenset(range(len(outputs))) - traced.stores.results - set(assigned),
        buffer_updates=updates,
        assigned=assigned,
        assignment=assignment,
        regions=regions,
    )


class _Roles:
    """What every input of the graph is."""

    def __init__(
        self, traced: TracedCall, fakes: Fakes, root: nn.Module, parameter_shapes: Mapping[str, GlobalShape]
    ) -> None:
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self.inputs = [f"input_{index}" for index in range(len(fakes.inputs))]
        self._fake_inputs = fakes.inputs
        self._given = traced.inputs
        self.placeholders: list[str | None] = []
        of_inputs = {id(fake): name for fake, name in zip(fakes.inputs, self.inputs, strict=True)}
        parameters = {id(value): name for name, value in root.named_parameters()}
        buffers = {id(value): name for name, value in root.named_buffers()} | fakes.names
        names = {name for name, _ in root.named_buffers(remove_duplicate=False)}
        nodes = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
        for value, source, node in zip(traced.inputs, traced.sources, nodes, strict=True):
            if id(value) in of_inputs:
                name = of_inputs[id(value)]
            elif isinstance(value, nn.Parameter) and (path := fakes.names.get(id(value))) is not None:
                name = _new(self.parameters, f"p_{path}", path)
            elif isinstance(value, nn.Parameter) and (path := parameters.get(id(value))) is not None:
                if tuple(value.shape) != tuple(parameter_shapes.get(path, value.shape)):
                    raise CaptureError(
                        f"parameter {path} is read as {source}, past the module that has it, and this rank holds a "
                        "part of it: read it through its module",
                        where=line_of_use(node),
                    )
                name = _new(self.parameters, f"p_{path}", path)
            elif (path := buffers.get(id(value))) is not None and path in names:
                name = _new(self.buffers, f"b_{path}", path)
            elif "L['args']" in source or "L['kwargs']" in source:
                named = source.replace("L['args']", "args").replace("L['kwargs']", "kwargs")
                raise CaptureError(
                    f"argument {named} holds a tensor inside an object that torch.utils._pytree does not know: "
                    "register its class there (register_dataclass), or pass a tuple or dict of tensors",
                    where=line_of_use(node),
                )
            else:
                name = _new(self.constants, "c", value)
            self.placeholders.append(name)

    def rewrite(self, module: fx.GraphModule) -> fx.Graph:
        """Return the graph with placeholders for all inputs, used or not, under the names of what they are."""
        graph = fx.Graph()
        made: dict[str, fx.Node] = {}
        old = [node for node in module.graph.nodes if node.op == "placeholder"]
        for of_input, fake in zip(self.inputs, self._fake_inputs, strict=True):
            made[of_input] = _placeholder(graph, of_input)
            made[of_input].meta["val"] = fake
        copies: dict[fx.Node, Any] = {}
        for node, name, value in zip(old, self.placeholders, self._given, strict=True):
            assert name is not None
            node.meta["val"].requires_grad_(value.requires_grad)  # make_fx keeps what it saw detached
            if name not in made:
                made[name] = _placeholder(graph, name)
            copies[node] = made[name]
            made[name].meta = dict(node.meta)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = getattr(module, str(node.target))
                if not isinstance(value, Tensor):
                    raise CaptureError(
                        f"{node.target} of the network cannot stand in a captured graph", where=line_of_use(node)
                    )
                constant = _new(self.constants, "c", value)
                with graph.inserting_after(next(n for n in reversed(graph.nodes) if n.op == "placeholder")):
                    copies[node] = _placeholder(graph, constant)
                copies[node].meta["val"] = node.meta.get("val", value)
            elif node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], lambda n: copies[n]))
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.owning_module = module
        return graph


def _new(table: dict[str, Any], name: str, value: Any) -> str:
    """Put a value into a table under a name that a graph may have, made unique."""
    plain = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    found, count = plain, 0
    while found in table:
        count += 1
        found = f"{plain}_{count}"
    table[found] = value
    return found


def _placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder of just this name; `Graph.placeholder` would write it in small letters."""
    return graph.create_node("placeholder", name, name=name)


def _settle_outputs(
    graph: fx.Graph, traced: TracedCall, roles: _Roles, root: nn.Module
) -> tuple[list[Any], dict[int, str], dict[str, fx.Node]]:
    """Return what the graph gives back, the outputs that are assigned to buffers, and the buffers' new values."""
    canonical = _canonical_names(root)
    paths = {id(module): path for path, module in root.named_modules()}
    output = next(node for node in graph.nodes if node.op == "output")
    assigned: dict[int, str] = {}
    for index, (module, key) in traced.stores.buffers.items():
        path = ".".join(filter(None, [paths.get(id(module), ""), key]))
        new, old = output.args[0][index], module._buffers.get(key)
        value = new.meta["val"]
        if old is None or old.shape != value.shape or old.dtype != value.dtype:
            raise CaptureError(
                f"buffer {path} is {_describe(old)} before the forward pass and {_describe(value)} after it; give it "
                "its final shape and type when the network is made",
                where=user_line(new),
            )
        assigned[index] = canonical.get(path, path)
        if canonical.get(path, path) not in roles.buffers.values():  # it is written and not read
            name = _new(roles.buffers, f"b_{path}", canonical.get(path, path))
            with graph.inserting_before(next(iter(graph.nodes))):
                _placeholder(graph, name).meta["val"] = value
    updates = make_functional(graph, roles.buffers)
    outputs = list(output.args[0])
    found = {roles.buffers[name]: value for name, value in updates.items()}
    found |= {name: outputs[index] for index, name in assigned.items()}
    return [None if index in assigned else value for index, value in enumerate(outputs)], assigned, found


def _describe(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"


def _canonical_names(root: nn.Module) -> dict[str, str]:
    """Return any name of a parameter or buffer -> its first name, which `named_parameters` gives to tied ones."""
    first: dict[int, str] = {}
    names = {}
    for name, value in [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]:
        names[name] = first.setdefault(id(value), name)
    return names


def _refuse_backward_hooks(root: nn.Module) -> None:
    for path, module in root.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {path or TOP} ({type(module).__name__}) has a backward hook, which a captured graph does not "
                "call: register a hook on the tensor in forward (tensor.register_hook), or use "
                'parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows'
            )


def _drop_bookkeeping(graph: fx.Graph) -> None:
    """Take out what computes nothing: checks of types, and the broadcast that losses make of their inputs."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is operator.getitem and node.args[0].target is torch.ops.aten.broadcast_tensors.default:
            given = node.args[0].args[0][node.args[1]]
            if given.meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(given)
                graph.erase_node(node)
            else:
                node.target, node.args = torch.ops.aten.expand.default, (given, list(node.meta["val"].shape))
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.broadcast_tensors.default and not node.users:
            graph.erase_node(node)
