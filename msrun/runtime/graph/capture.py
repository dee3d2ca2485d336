"""Capture: a network, or a function that calls networks, becomes one graph of operators on global shapes.

torch.export traces it once on fake tensors: no value is computed, no memory is used, and a network whose parameters
were never initialised is captured like any other. Names of parameters are the user's own.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, ParallelError
from msrun.runtime.graph.assignment import Assignment, assign_strategies
from msrun.runtime.graph.autocast import inline_autocast
from msrun.runtime.graph.batch_rows import trace_batch_rows
from msrun.runtime.graph.flattened_linear import unflatten_linears
from msrun.runtime.graph.gradient_modes import inline_gradient_modes
from msrun.runtime.graph.marked_calls import TOP, Region, recording_regions
from msrun.runtime.graph.operators.dropout import number_dropouts
from msrun.runtime.graph.strategies import OperatorStrategy
from msrun.runtime.graph.writes import assignments_as_writes, make_functional

GlobalShape = tuple[int, ...]


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
    output_spec: pytree.TreeSpec
    outputs: list[fx.Node | Any]
    """flattened results"""
    buffer_updates: dict[str, fx.Node] = field(default_factory=dict)
    """buffer name -> its value after the forward pass, of every buffer that the network changes"""
    assignment: Assignment = field(default_factory=Assignment)
    """what the user's strategies mean, beside what is written on the operators"""
    regions: list[Region] = field(default_factory=list)
    """calls that have a strategy of the user"""


@dataclass(frozen=True)
class Target:
    """What is captured: something to call, and the modules whose parameters it uses."""

    call: Callable[..., Any]
    root: nn.Module
    """Holds the modules; its parameter names are the user's."""


def find_target(function: Callable[..., Any]) -> Target:
    """Return what to capture for a module or for a function that closes over modules.

    Raises:
        CaptureError: a function in which no module can be found.
    """
    if isinstance(function, nn.Module):
        return Target(function, function)
    modules = _closed_over_modules(function)
    if not modules:
        name = getattr(function, "__qualname__", repr(function))
        raise CaptureError(
            f"{name} uses no torch module by name: give value_and_grad a function that calls the network it trains"
        )
    with_parameters = {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}
    if len(with_parameters) == 1:
        return Target(function, next(iter(with_parameters.values())))
    root = nn.Module()
    for name, module in with_parameters.items():
        root.add_module(name, module)
    return Target(function, root)


def _closed_over_modules(function: Callable[..., Any], depth: int = 3) -> dict[str, nn.Module]:
    """Return the modules that a function's names lead to, through functions it calls as well."""
    found: dict[str, nn.Module] = {}
    owner = getattr(function, "__self__", None)
    values: dict[str, Any] = {}
    if owner is not None and not isinstance(owner, nn.Module):
        values.update(vars(owner) if hasattr(owner, "__dict__") else {})
    elif isinstance(owner, nn.Module):
        values[type(owner).__name__] = owner
    with contextlib.suppress(TypeError):
        names = inspect.getclosurevars(inspect.unwrap(function))
        values.update(names.globals)
        values.update(names.nonlocals)
    for name, value in values.items():
        if isinstance(value, nn.Module):
            found.setdefault(name, value)
        elif depth and inspect.isroutine(value) and getattr(value, "__module__", "").partition(".")[0] != "torch":
            for inner, module in _closed_over_modules(value, depth - 1).items():
                found.setdefault(inner, module)
    unique: dict[int, str] = {}
    for name, module in found.items():
        unique.setdefault(id(module), name)
    return {name: found[name] for name in unique.values()}


def capture(
    target: Target,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    input_shapes: Sequence[GlobalShape],
    parameter_shapes: Mapping[str, GlobalShape],
    strategies: Mapping[str, OperatorStrategy] | None = None,
) -> CapturedGraph:
    """Trace `target` once.

    Args:
        args, kwargs: one call's arguments; only tensors become inputs of the graph, everything else is fixed.
        input_shapes: global shape of every tensor among them, in order.
        parameter_shapes: global shape of every parameter, which may be sharded already.
        strategies: module path -> the user's strategy. Those of functions come with their calls.

    Raises:
        CaptureError: a construct that cannot be captured; names it and what to do.
        StrategyError: a strategy of a module or function in which it could mean several operators, or none.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given_tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = given_tensors[0].device if given_tensors else torch.device("cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        samples = [
            torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            for shape, tensor in zip(input_shapes, given_tensors, strict=True)
        ]
    box: dict[str, Any] = {}

    class Call(nn.Module):
        """Gives torch.export a module whose forward takes tensors only."""

        def __init__(self) -> None:
            super().__init__()
            self.root = target.root

        def forward(self, *tensors: Tensor) -> list[Any]:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
            with assignments_as_writes(target.root):
                result = target.call(*call_args, **call_kwargs)
            flat, box["output_spec"] = pytree.tree_flatten(result)
            return flat

    with (
        _faked(target.root, parameter_shapes, fake, device),
        recording_regions(target.root, strategies or {}) as regions,
    ):
        try:
            program = torch.export.export(Call(), tuple(samples), strict=False)
        except ParallelError:  # says already what is wrong
            raise
        except Exception as error:
            raise _explain(target, error) from error
    captured = _read(program, box["output_spec"], target.root, regions)
    uncalled = sorted({name or TOP for name in strategies or {}} - {region.name for region in regions})
    if uncalled:
        captured.assignment.notes.append(f"strategies of modules that the graph does not call: {', '.join(uncalled)}")
    return captured


@contextlib.contextmanager
def _faked(
    root: nn.Module, shapes: Mapping[str, GlobalShape], fake: FakeTensorMode, device: torch.device
) -> Iterator[None]:
    """Put fake twins of global shape in place of parameters and buffers while tracing; tied ones stay tied.

    Args:
        device: where parameters without values will be.
    """
    twins: dict[int, Any] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for module in root.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for key, value in table.items():
                if value is None:
                    continue
                if id(value) not in twins:
                    shape = shapes.get(names.get(id(value), ""), tuple(value.shape))
                    with fake:
                        twin: Tensor = torch.empty(
                            shape, dtype=value.dtype, device=device if value.is_meta else value.device
                        )
                    twins[id(value)] = (
                        nn.Parameter(twin, value.requires_grad) if isinstance(value, nn.Parameter) else twin
                    )
                undo.append((table, key, value))
        flat_weights = vars(module).get("_flat_weights")
        if isinstance(module, nn.RNNBase) and flat_weights is not None:  # recurrent layers read this list instead
            undo.append((vars(module), "_flat_weights", flat_weights))
            twins[id(flat_weights)] = [twins.get(id(weight), weight) for weight in flat_weights]
    for table, key, value in undo:
        table[key] = twins[id(value)]
    try:
        yield
    finally:
        for table, key, value in undo:
            table[key] = value


def _read(
    program: torch.export.ExportedProgram, output_spec: pytree.TreeSpec, root: nn.Module, regions: list[Region]
) -> CapturedGraph:
    signature = program.graph_signature
    inline_autocast(program.graph)
    inline_gradient_modes(program.graph_module, signature.inputs_to_buffers)
    _refuse_sizes_from_values(program.graph)
    canonical = _canonical_names(root)
    parameters = {k: canonical[v.removeprefix("root.")] for k, v in signature.inputs_to_parameters.items()}
    assignment = assign_strategies(program.graph, regions, parameters, root)
    updates = make_functional(program.graph, signature.inputs_to_buffers)
    _drop_bookkeeping(program.graph)
    inputs = [name for name in signature.user_inputs if isinstance(name, str)]
    unflatten_linears(program.graph)
    number_dropouts(program.graph)
    trace_batch_rows(program.graph, inputs)
    buffers = {k: canonical[v.removeprefix("root.")] for k, v in signature.inputs_to_buffers.items()}
    output = next(node for node in program.graph.nodes if node.op == "output")
    return CapturedGraph(
        graph=program.graph,
        parameters=parameters,
        buffers=buffers,
        constants={k: program.constants[v] for k, v in signature.inputs_to_lifted_tensor_constants.items()},
        inputs=inputs,
        output_spec=output_spec,
        outputs=list(output.args[0]),
        buffer_updates={buffers[name]: value for name, value in updates.items()},
        assignment=assignment,
        regions=regions,
    )


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


def _refuse_sizes_from_values(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            raise CaptureError(
                f"{node.target} makes a tensor whose size depends on values: use a form of fixed size such as "
                'torch.where, or parallel_mode="data_parallel", which needs no capture'
            )


def _drop_bookkeeping(graph: fx.Graph) -> None:
    """Take out what computes nothing: checks that export writes, and the broadcast that losses make of their inputs."""
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


def _explain(target: Target, error: Exception) -> CaptureError:
    """Say in one line what could not be captured, where, and what to do instead."""
    name = type(target.root).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if "data-dependent" in str(error).lower() or "item()" in str(error):
        reason = "a Python branch or number depends on a tensor's values (" + reason[:120] + ")"
    return CaptureError(
        f"{name} cannot be captured as one graph: {reason[:300]}; change that construct, or use "
        'parallel_mode="data_parallel", which needs no capture'
    )
