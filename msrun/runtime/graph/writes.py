"""Writes: operators that write into memory become operators that return the new value.

A tensor that the network computes itself is followed through the graph: later readers read the new value. A buffer's
last new value becomes a result of the graph, which the executor puts into the module's buffer.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from msrun.errors import CaptureError
from msrun.runtime.graph.operators.rule import operator_call

aten = torch.ops.aten
_TWINS: dict[Any, Any] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}
"""Operators that write, of which those that return have other names."""
BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


@contextlib.contextmanager
def assignments_as_writes(root: nn.Module) -> Iterator[None]:
    """While a network is traced, let `self.buffer = value` write into the buffer; torch.export forgets the value.

    Raises:
        CaptureError: the value has another shape or type than the buffer.
    """
    before = [(path, module, dict(module._buffers)) for path, module in root.named_modules()]
    yield
    for path, module, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is old:
                continue
            if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
                raise CaptureError(
                    f"buffer {'.'.join(filter(None, [path, name]))} is {_describe(old)} before the forward pass and "
                    f"{_describe(new)} after it; give it its final shape and type when the network is made"
                )
            old.copy_(new)
            module._buffers[name] = old


def _describe(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"


def make_functional(graph: fx.Graph, buffers: Collection[str]) -> dict[str, fx.Node]:
    """Replace operators that write by those that return a new tensor, in place.

    Args:
        buffers: placeholder names of the module's buffers, the only memory from outside that may be written.

    Returns:
        Placeholder name of every buffer that is written -> its last value.

    Raises:
        CaptureError: an operator that writes and has no such twin, that writes into an input, a parameter or a part of
            a buffer, or whose written memory is read later under another name.
    """
    return _Writes(graph, buffers).run()


class _Writes:
    def __init__(self, graph: fx.Graph, buffers: Collection[str]) -> None:
        self._graph = graph
        self._holds = {node: node.name for node in graph.nodes if node.op == "placeholder" and node.name in buffers}
        """node that is a buffer's newest value -> that buffer"""
        self._last: dict[str, fx.Node] = {}

    def run(self) -> dict[str, fx.Node]:
        for node in list(self._graph.nodes):
            if node.target is aten.batch_norm.default:
                self._batch_norm(node)
            elif node.target is aten.instance_norm.default:
                call = operator_call(node)
                if call.argument("use_input_stats") and call.argument("running_mean") is not None:
                    raise _cannot_write("aten.instance_norm", "its running statistics")
            elif getattr(getattr(node.target, "_schema", None), "is_mutable", False):
                self._write(node)
        return self._last

    def _write(self, node: fx.Node) -> None:
        name = str(node.target)
        packet, overload = name.removeprefix("aten.").rsplit(".", 1)
        twin = _TWINS.get(node.target) or getattr(getattr(aten, packet.rstrip("_"), None), overload, None)
        written = node.args[0] if node.args else None
        if twin is None or not isinstance(written, fx.Node) or twin._schema.is_mutable:
            raise _cannot_write(name, "a tensor")
        self._check_memory(name, written)
        if twin is aten.bernoulli.p and len(node.args) == 1 and "p" not in node.kwargs:
            node.args = (written, 0.5)  # which only the one that writes has for a default
        node.target = twin
        self._replace(name, written, node, node)

    def _batch_norm(self, node: fx.Node) -> None:
        """Running statistics are written without a word in the schema: training with them is another operator."""
        call = operator_call(node)
        mean, var = call.argument("running_mean"), call.argument("running_var")
        if not call.argument("training") or mean is None:
            return
        for written in (mean, var):
            self._check_memory("aten.batch_norm", written)
        value, of_channels = node.meta["val"], mean.meta["val"]
        given = tuple(call.argument(name) for name in BATCH_NORM_ARGUMENTS)
        with self._graph.inserting_before(node):
            whole = self._graph.call_function(aten._native_batch_norm_legit_functional.default, given)
            whole.meta = {**node.meta, "val": (value, *(of_channels,) * 4), "operator": str(node.target)}
            results = {index: self._graph.call_function(operator.getitem, (whole, index)) for index in (0, 3, 4)}
        for index, result in results.items():
            result.meta = {**node.meta, "val": whole.meta["val"][index]}
        node.replace_all_uses_with(results[0])
        self._graph.erase_node(node)
        self._replace("aten.batch_norm", mean, results[3], whole)
        self._replace("aten.batch_norm", var, results[4], whole)

    def _check_memory(self, name: str, written: fx.Node) -> None:
        memory = _memory(written)
        if memory.op != "placeholder" or self._holds.get(written):
            return
        owner = memory.name.removeprefix("b_root_").removeprefix("p_root_")
        raise _cannot_write(name, f"a part of {owner}" if self._holds.get(memory) else f"{owner} of the network")

    def _replace(self, name: str, written: fx.Node, new: fx.Node, writer: fx.Node) -> None:
        """Let everything after `writer` read `new` instead of `written`."""
        nodes = list(self._graph.nodes)
        later = [node for node in nodes[nodes.index(writer) + 1 :] if node is not new]
        for reader in later:
            reader.replace_input_with(written, new)
        memory = _memory(written)
        if not _is_view(new) and any(_memory(read) is memory for reader in later for read in reader.all_input_nodes):
            raise _cannot_write(name, "a part of a tensor that is read again")
        buffer = self._holds.pop(written, None)
        if buffer is not None:
            self._holds[new] = buffer
            self._last[buffer] = new


def _memory(node: fx.Node) -> fx.Node:
    """Return the node whose memory `node` may show: itself unless it is a view."""
    while node.args and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if not _is_view(source if node.target is operator.getitem else node):
            break
        node = source
    return node


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


def _cannot_write(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"{name} changes {what} in the forward pass, which a captured graph does not keep: use the form that "
        'returns a new tensor, or parallel_mode="data_parallel", which needs no capture'
    )
