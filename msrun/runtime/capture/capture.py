"""Capture: one call of a network becomes one graph of aten operators on global shapes.

Fakes of global shape stand in for parameters and inputs, so no value is computed and no memory is used; a network whose
parameters were never initialised, or are cut already, is captured like any other. Names of parameters are the user's.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import random
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.capture.assignment import Assignment, assign_strategies
from msrun.runtime.capture.aten import trace_aten, unflatten_linears
from msrun.runtime.capture.batch_rows import trace_batch_rows
from msrun.runtime.capture.captured_graph import CapturedGraph, Target
from msrun.runtime.capture.dynamo import TracedCall, order_in_memory, trace_call
from msrun.runtime.capture.equal_blocks import find_equal_blocks
from msrun.runtime.capture.marked_calls import (
    TOP,
    HostOrDevice,
    MarkedCall,
    assign_targets,
    calls_of,
    erase_marks,
    marking,
    note_functions,
    number_calls,
    skip_marks,
)
from msrun.runtime.capture.writes import make_functional
from msrun.runtime.sharding.operators.dropout import number_dropouts
from msrun.runtime.sharding.operators.rule import line_of_use, user_line
from msrun.runtime.sharding.sizes import Place, Sizes
from msrun.runtime.sharding.strategies import OperatorStrategy

GlobalShape = tuple[int, ...]


@dataclass
class Fakes:
    """What stands in for what."""

    inputs: list[Tensor]
    """One for every tensor that the call is given, in order."""
    names: dict[int, str] = field(default_factory=dict)
    """id of a stand-in -> the parameter's or buffer's first name"""
    kept: dict[int, Any] = field(default_factory=dict)
    """id of what is stood for -> its stand-in"""

    @property
    def ids(self) -> set[int]:
        """Of all stand-ins, of the lists that hold some, and of what they stand for, which references may reach."""
        return {id(value) for value in (*self.inputs, *self.kept.values())} | self.kept.keys()


@contextlib.contextmanager
def faked(
    root: nn.Module, given: Sequence[Tensor], shapes: Sequence[GlobalShape], of_parameters: Mapping[str, GlobalShape]
) -> Iterator[Fakes]:
    """Put fakes in place of the parameters, and of buffers without values; tied ones stay tied.

    Args:
        given: the tensors of the call.
        shapes: their global shapes.
        of_parameters: parameter name -> global shape, of those that hold a part.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of([*given, *root.parameters(), *root.buffers()])
    fakes = Fakes([_like(mode, tensor, shape, device) for tensor, shape in zip(given, shapes, strict=True)])
    stand_ins: dict[int, Any] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    names: dict[int, str] = {}
    for name, value in (*root.named_parameters(), *root.named_buffers()):
        names[id(value)] = name
    for module in root.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        for table in tables:
            for key, value in table.items():
                if not isinstance(value, Tensor) or not (isinstance(value, nn.Parameter) or value.is_meta):
                    continue
                if id(value) not in stand_ins:
                    name = names.get(id(value), key)
                    shape = of_parameters.get(name, tuple(value.shape))
                    fake = _like(mode, value, shape, device)
                    stand_ins[id(value)] = fake
                    fakes.names[id(fake)] = name
                undo.append((table, key, value))
        flat_weights = vars(module).get("_flat_weights")
        if isinstance(module, nn.RNNBase) and flat_weights is not None:  # recurrent layers read this list instead
            undo.append((vars(module), "_flat_weights", flat_weights))
            stand_ins[id(flat_weights)] = [stand_ins.get(id(weight), weight) for weight in flat_weights]
            # ... unless the weights are others than those that were in it, which reads what this rank holds
            references = module._flat_weight_refs
            undo.append((vars(module), "_flat_weight_refs", references))
            stand_ins[id(references)] = [weakref.ref(weight) for weight in stand_ins[id(flat_weights)]]
    fakes.kept = stand_ins
    for table, key, value in undo:
        table[key] = stand_ins[id(value)]
    try:
        yield fakes
    finally:
        for table, key, value in undo:
            table[key] = value


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device that a network is captured for; some of its tensors may lie on the host beside it."""
    host = torch.device("cpu")
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), host)


def _like(mode: FakeTensorMode, value: Tensor, shape: GlobalShape, device: torch.device) -> Tensor:
    order = order_in_memory(value) if value.dim() == len(shape) else ()
    with no_dispatch():  # what the mode itself does for `torch.empty`, at a tenth of the time
        empty = torch.empty_permuted(shape, order or tuple(range(len(shape))), dtype=value.dtype, device="meta")
        is_parameter = isinstance(value, nn.Parameter)
        return FakeTensor(mode, empty, device, requires_grad=value.requires_grad, _is_param=is_parameter)


def forget_shapes() -> None:
    """Let torch forget what operators make of the shapes that it has seen, which it keeps for ever."""
    FakeTensorMode.cache_clear()


_KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Python's random numbers": (random.getstate, random.setstate),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
}
"""What a network may change in one process, in every call, and cannot where its Python code does not run again."""
_RESTORED: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
_STACKS: tuple[tuple[Callable[[], int], Callable[[], Any]], ...] = (
    (lambda: len(torch._C._functorch.get_interpreter_stack() or ()), torch._C._functorch.pop_dynamic_layer_stack),
    (torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    (torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack),
)
"""How many contexts are entered, and how the innermost one is left."""


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Let no cycles be looked for meanwhile: a large graph would be walked again and again, and all of it stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def unchanged_process(devices: Collection[str]) -> Iterator[None]:
    """Give the process back the settings and random streams that it had, also when a capture fails halfway.

    Args:
        devices: kinds of devices whose autocast the network may switch.
    """
    kept = {name: read() for name, (read, _) in _KEPT.items()}
    restored = [read() for read, _ in _RESTORED]
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    depths = [depth() for depth, _ in _STACKS]
    changed: list[str] = []
    try:
        yield
        changed += [name for name, (read, _) in _KEPT.items() if read() != kept[name]]
    finally:
        for (depth, leave), before in zip(_STACKS, depths, strict=True):
            for _ in range(depth() - before):
                leave()
        for name, (_, write) in _KEPT.items():
            write(kept[name])
        for (_, write), value in zip(_RESTORED, restored, strict=True):
            write(value)
        for device, is_on, dtype in autocast:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
    if changed:
        raise CaptureError(
            f"the network changes {changed[0]} in its forward pass, which a captured graph does not do again in each "
            "call: do that outside the network, "
            'or use parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows'
        )


class Wrapper(Protocol):
    """A network whose batch is divided; its calls are marked with its number."""

    number: int


def check_wrappers(
    graph: fx.Graph, wrappers: Sequence[Wrapper], inputs: Collection[str], results: Collection[int]
) -> None:
    """Check that the step hands its own batch to the wrappers and returns what they return; take their marks out.

    Args:
        wrappers: outermost first.
        inputs: names of the placeholders of the step's own batch.
        results: indexes of the outputs that are the step's results.
    """
    if not wrappers:
        return
    calls = {wrapper.number: calls_of(graph, wrapper.number) for wrapper in wrappers}
    for wrapper in wrappers:
        name = type(wrapper).__name__
        if not calls[wrapper.number]:
            raise StrategyError(f"{name} is not called by the step that uses its network: call it, or take it out")
        if len(calls[wrapper.number]) > 1:
            raise StrategyError(f"{name} is called twice in one step: call it once, on the whole batch")
        entering, _ = calls[wrapper.number][0]
        if any(skip_marks(mark).name not in inputs for mark in entering):
            raise StrategyError(
                f"{name} is called with tensors that the step has computed, so its copies cannot be interleaved: hand "
                "the step's own inputs to it, and put what you do with them before into its network"
            )
    own = {node for wrapper in wrappers for node in calls[wrapper.number][0][1]}
    output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    for value in (output[index] for index in sorted(results)):
        if isinstance(value, fx.Node) and value not in own and skip_marks(value).name not in inputs:
            raise StrategyError(
                "the step computes with the result of a network whose batch is divided (MicroBatchInterleaved, "
                "GradAccumulation, Pipeline), so its parts cannot be run apart: return it as it is, and put the rest "
                "into the network"
            )
    for wrapper in wrappers:
        for entering, leaving in calls[wrapper.number]:
            erase_marks([*entering, *leaving])


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
    known: Sequence[TracedCall] = (),
    free: Collection[Place] = (),
    keeps_sizes: bool = False,
) -> CapturedGraph:
    """Trace `target` once, unless a known trace is of this call but for sizes.

    Args:
        args, kwargs: one call's arguments; tensors become inputs of the graph, everything else is guarded.
        input_shapes: global shape of every tensor among them, in order.
        parameter_shapes: global shape of every parameter, which may be sharded already.
        strategies: module path -> the user's strategy. Those of functions come with their calls.
        targets: module path -> where the user wants it to run. Those of functions come with their calls.
        wrappers: those of the network that divide its batch, outermost first; one part of it is traced.
        known: earlier traces that hold for this call, but for sizes.
        free: what differs from call to call.
        keeps_sizes: the graph is for all of these sizes, with symbols in their places.
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
        blocks = find_equal_blocks(root)
        call = target.call, call_args, call_kwargs
        traced = next(filter(None, (each.of_other_sizes(*call, fakes.inputs) for each in known)), None)
        reasons = [] if traced else list(filter(None, (each.sizes.why_not(input_shapes) for each in known)))
        if traced is None:
            traced = trace_call(*call, unguarded=unguarded, given=fakes.inputs, free=free, blocks=blocks)
            traced.marked = marked
        symbols = ShapeEnv() if keeps_sizes and traced.free else None
        module = trace_aten(traced, root, symbols)
        roles = _Roles(traced, fakes, root, parameter_shapes)
    graph = roles.rewrite(module)
    _drop_bookkeeping(graph)
    note_functions(graph)
    check_wrappers(graph, wrappers, roles.inputs, traced.stores.results)
    regions, assignment = _assign(graph, traced, roles.parameters, root)
    assignment.notes += [f"tensor {i} may have any size in dimension {dimension}" for i, dimension in sorted(free)]
    assignment.notes += [f"captured again for a size, as {reason} is no longer true" for reason in reasons[:1]]
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
        sizes=[traced.sizes, Sizes(symbols)] if symbols else [],
    )


def _assign(
    graph: fx.Graph, traced: TracedCall, parameters: Mapping[str, str], root: nn.Module
) -> tuple[list[MarkedCall], Assignment]:
    """Return the regions of strategies that the user gave, and what they are assigned to."""
    names = traced.marked.names if traced.marked else {}
    regions = number_calls(graph, names)
    assignment = assign_strategies(graph, regions, parameters, root)
    missing = sorted({name for name, _ in names.values()} - {region.name for region in regions})
    if missing:
        assignment.notes.append(f"strategies of modules that the graph does not call: {', '.join(missing)}")
    return regions, assignment


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
        self._given = [value for value in traced.inputs if isinstance(value, Tensor)]
        self.placeholders: list[str | None] = []
        of_inputs = {id(fake): name for fake, name in zip(fakes.inputs, self.inputs, strict=True)}
        parameters = {id(value): name for name, value in root.named_parameters()}
        buffers = {id(value): name for name, value in root.named_buffers()} | fakes.names
        names = {name for name, _ in root.named_buffers(remove_duplicate=False)}
        nodes = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
        for value, source, node in zip(traced.inputs, traced.sources, nodes, strict=True):
            if not isinstance(value, Tensor):
                self.placeholders.append(None)
                continue
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
        for node, name, value in zip(old, filter(None, self.placeholders), self._given, strict=True):
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
