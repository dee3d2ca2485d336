"""Pickles of captured graphs and of what refers to their operators, for other processes of the same program.

Tensors of a graph are shapes and types, operators are names. What stands for objects of the process, as parameters and
modules, is named by who pickles, and given again by who loads. Other objects are pickled only where they are values:
an object of the user's is refused.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import io
import marshal
import operator
import pickle
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from msrun.runtime.capture.marked_calls import MARK
from msrun.runtime.capture.portable import UnportableError

_VALUES = tuple(f"{name}." for name in ("msrun", "torch", "sympy", "collections", "pathlib", "functools", "types"))
_VALUES += ("builtins.", "enum.")
"""Modules whose objects are values."""
_NOT_OURS = {"seq_nr", "tensor_meta", "source_fn_stack", "original_aten", "from_node", "example_value", "msrun_stack"}
"""What torch notes of operators, and nobody reads once a graph is captured."""
_STACK = "nn_module_stack"
_LARGEST_CONSTANT = 1 << 20
_FAKES = object()
"""The mode of the fake tensors, one for all."""
_OF_LOADER = {id(vars(builtins)): "builtins", id(_FAKES): "fakes"}


def dump(value: Any, known: Mapping[int, str]) -> bytes:
    """Return the pickle of something.

    Args:
        known: id of an object -> its name, by which who loads has another one.

    Raises:
        UnportableError: there is something in it that is no value.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, known).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise UnportableError(" ".join(str(error).split())) from error
    return file.getvalue()


def load(content: bytes, named: Mapping[str, Any]) -> Any:
    """Return what a pickle holds.

    Args:
        named: what stands for the objects with a name.
    """
    return _Unpickler(io.BytesIO(content), named).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._known = known
        self._nodes: dict[fx.Graph, tuple[_Nodes, dict[fx.Node, int]]] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Return the name of what who loads has an own one of."""
        return _OF_LOADER.get(id(obj)) or self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """Return how something is made again."""
        if isinstance(obj, torch._ops.OpOverload) and obj.namespace not in ("aten", "prims") and obj is not MARK:
            raise UnportableError(f"{obj}, which is no operator of torch,")
        for kinds, reduce in _REDUCERS.items():
            if isinstance(obj, kinds):
                return reduce(obj)
        if isinstance(obj, fx.Node):
            nodes, places = self._nodes_of(obj.graph)
            return operator.getitem, (nodes, places[obj])
        if isinstance(obj, _Nodes):
            return _list_nodes, (obj.graph,)
        if isinstance(obj, fx.Graph):
            return _graph, (self._records(obj),)
        if isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType):
            return NotImplemented
        module = f"{type(obj).__module__}."
        if isinstance(obj, nn.Module) or not module.startswith(_VALUES):
            raise UnportableError(f"a {module}{type(obj).__qualname__}")
        if isinstance(obj, Tensor) and (
            obj.device.type != "cpu" or obj.requires_grad or obj.nbytes > _LARGEST_CONSTANT
        ):
            raise UnportableError("a tensor that is no constant")
        return NotImplemented

    def _nodes_of(self, graph: fx.Graph) -> tuple[_Nodes, dict[fx.Node, int]]:
        if graph not in self._nodes:
            self._nodes[graph] = _Nodes(graph), {node: index for index, node in enumerate(graph.nodes)}
        return self._nodes[graph]

    def _records(self, graph: fx.Graph) -> list[Any]:
        """Return what each operator of a graph is made of; operators of the same graph are numbers."""
        _, places = self._nodes_of(graph)

        def place(value: Any) -> Any:
            return _Place(places[value]) if isinstance(value, fx.Node) else value

        records = []
        for node in graph.nodes:
            meta = {key: value for key, value in node.meta.items() if key not in _NOT_OURS}
            if _STACK in meta:  # classes are of no use there
                meta[_STACK] = {key: (path, None) for key, (path, _) in meta[_STACK].items()}
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), place)
            records.append((node.op, node.target, tuple(args), dict(kwargs), node.name, node.type, meta))
        return records


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, named: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._named = {"builtins": vars(builtins), "fakes": FakeTensorMode(allow_non_fake_inputs=True), **named}

    def persistent_load(self, pid: Any) -> Any:
        """Return what has a name."""
        return self._named[pid]


class _Place(int):
    """An operator of the graph that is pickled."""


@dataclasses.dataclass(eq=False)
class _Nodes:
    """All operators of a graph, for what refers to them from outside."""

    graph: fx.Graph


def _graph(records: list[Any]) -> fx.Graph:
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, target, args, kwargs, name, kind, meta in records:
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda v: nodes[v] if isinstance(v, _Place) else v)
        node = graph.create_node(op, target, args, kwargs, name, kind)
        node.meta = meta
        nodes.append(node)
    return graph


def _list_nodes(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.nodes)


def _tensor(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    needs_gradient: bool,
    is_parameter: bool,
) -> Tensor:
    with no_dispatch():
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, device, requires_grad=needs_gradient, _is_param=is_parameter)


def _source(kind: type[Source], values: tuple[Any, ...]) -> Source:
    """Return a source as it was, where making one would install guards of a trace that runs."""
    made = object.__new__(kind)
    for each, value in zip(dataclasses.fields(kind), values, strict=True):
        object.__setattr__(made, each.name, value)
    return made


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)


_REDUCERS: dict[Any, Any] = {
    FakeTensor: lambda x: (
        _tensor,
        (_FAKES, tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, isinstance(x, nn.Parameter)),
    ),
    Source: lambda x: (_source, (type(x), tuple(getattr(x, each.name) for each in dataclasses.fields(x)))),
    torch._ops.OpOverload: lambda x: (_operator, (x.namespace, x._opname, x._overloadname)),
    torch._ops.HigherOrderOperator: lambda x: (_higher_order, (x.name(),)),
    types.CodeType: lambda x: (marshal.loads, (marshal.dumps(x),)),
    types.ModuleType: lambda x: (importlib.import_module, (x.__name__,)),
    types.MappingProxyType: lambda x: (types.MappingProxyType, (dict(x),)),
}
