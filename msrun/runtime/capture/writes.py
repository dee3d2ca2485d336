"""Writes: operators that write into memory become operators that return the new value.

Memory is followed through views: a write into a part of a tensor (`x[:, 0] = 0`) makes a new whole tensor, and what was
a view of the old one is taken from the new one where it is read again. A buffer's last new value becomes a result of
the graph, which the executor puts into the module's buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from msrun.errors import CaptureError
from msrun.runtime.capture.marked_calls import MARK
from msrun.runtime.sharding.operators.custom import HOOK, OPERATOR, find_function
from msrun.runtime.sharding.operators.rule import CHECKPOINT, operator_call, user_line

aten = torch.ops.aten
BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_TWINS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.set_.source_Tensor: None,
    aten.resize_.default: None,
}
"""Operators whose returning twin is not called like them; None: there is none."""


def make_functional(graph: fx.Graph, buffers: Mapping[str, str]) -> dict[str, fx.Node]:
    """Replace operators that write by those that return a new tensor, in place.

    Args:
        buffers: placeholder name -> name of the module's buffers, the only memory from outside that may be written.

    Returns:
        Placeholder name of every buffer that is written -> its last value.
    """
    return _Writes(graph, buffers).run()


class _Writes:
    def __init__(self, graph: fx.Graph, buffers: Mapping[str, str]) -> None:
        self._graph = graph
        self._buffers = buffers
        self._value: dict[fx.Node, fx.Node] = {}
        """node that owns memory -> its newest value, where it was written"""
        self._version: dict[fx.Node, int] = {}
        """node that owns memory -> how often it was written"""
        self._seen: dict[fx.Node, tuple[int, fx.Node]] = {}
        """view -> version of its memory, and the node that shows it"""
        self._made: list[fx.Node] = []
        """what was added to carry new values; some of it nobody reads"""
        self._alias: dict[fx.Node, fx.Node] = {}
        """new value, or view of one -> the node whose memory it was written to"""
        self._hooked: set[fx.Node] = set()
        """what owns the memory of a tensor that has a hook: under its name later readers find another value"""
        self._first: dict[int, fx.Node] = {}
        """memory -> the first value that shows it"""
        for node in graph.nodes:
            if isinstance(value := node.meta.get("val"), Tensor):
                self._first.setdefault(_memory(value), node)

    def run(self) -> dict[str, fx.Node]:
        for node in list(self._graph.nodes):
            written = self._written(node)
            if self._value:
                self._read_newest(node, written)
            if node.target is OPERATOR and find_function(node.args[1]).name == HOOK:
                self._hooked.add(self._owner(node.args[0][0]))
            if _source(node) is not None:
                self._seen[node] = self._version.get(self._owner(node), 0), node
            if node.target is aten.batch_norm.default:
                self._batch_norm(node)
            elif node.target is aten.instance_norm.default:
                call = operator_call(node)
                if call.argument("use_input_stats") and call.argument("running_mean") is not None:
                    raise self._cannot_write(node, "its running statistics")
            elif written is not None:
                self._write(node, written)
        values = {node.name: value for node, value in self._value.items() if node.name in self._buffers}
        for node in reversed(self._made):
            if not node.users and node not in values.values():
                self._graph.erase_node(node)
        return values

    def _written(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function" or not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            return None
        call = operator_call(node)
        schema = node.target._schema  # type: ignore[union-attr]
        written = [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write]
        given = call.argument(written[0]) if len(written) == 1 else None
        if not isinstance(given, fx.Node):
            raise self._cannot_write(node, "several tensors at once")
        return given

    def _read_newest(self, node: fx.Node, written: fx.Node | None) -> None:
        """Let a node read the newest values of what it reads."""
        newest = {read: self._read(read, node) for read in node.all_input_nodes}
        for old, new in newest.items():
            if new is not old and old is not written:
                node.replace_input_with(old, new)
        if written is not None and newest[written] is not written:  # others may read it under the same name
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: newest[n])

    def _read(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Return what shows the present value of a node, made before a reader of it."""
        node = self._written_to(node)
        owner = self._owner(node)
        if owner not in self._value:
            return node
        if node is owner:
            return self._value[owner]
        version, shown = self._seen[node]
        if version == self._version[owner]:
            return shown
        source = _source(node)
        assert source is not None
        shown = self._copy(node, source, self._read(source, before), before)
        self._alias[shown] = node
        self._seen[node] = self._version[owner], shown
        return shown

    def _copy(self, node: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node) -> fx.Node:
        """Make the view that a node is of a new value."""
        with self._graph.inserting_before(before):
            if node.target is operator.getitem:
                several = node.args[0]
                assert isinstance(several, fx.Node)
                again = self._graph.node_copy(several, lambda n: new if n is source else n)
                return self._graph.node_copy(node, lambda _: again)
            return self._graph.node_copy(node, lambda n: new if n is source else n)

    def _write(self, node: fx.Node, written: fx.Node) -> None:
        twin = _returning(node.target)
        if twin is None:
            raise self._cannot_write(node, "a tensor")
        self._check_memory(node, written)
        node.target = twin
        value, wanted = node.meta["val"], written.meta["val"]
        node.kwargs = {name: given for name, given in node.kwargs.items() if name != "out"}
        if twin is aten.copy.default:  # which has no derivative
            node.target, node.args, node.kwargs = aten.expand.default, (node.args[1], list(wanted.shape)), {}
        elif twin is aten.bernoulli.p and len(node.args) == 1 and "p" not in node.kwargs:
            node.args = (node.args[0], 0.5)  # which only the one that writes has for a default
            node.target = twin
        elif twin is aten.zero.default:
            node.target = aten.zeros_like.default
        result = _run(node)
        if isinstance(result, Tensor) and result.shape != wanted.shape:
            raise self._cannot_write(node, f"the size of a tensor (out= of {tuple(wanted.shape)})")
        new = node
        if isinstance(result, Tensor) and result.dtype != wanted.dtype:
            with self._graph.inserting_after(node):
                new = self._graph.call_function(aten.to.dtype, (node, wanted.dtype))
            new.meta = {**node.meta, "val": value}
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
            node.meta = {**node.meta, "val": result}
        self._alias |= {node: written, new: written}
        self._replace(new, written, new)

    def _batch_norm(self, node: fx.Node) -> None:
        """Running statistics are written without a word in the schema: training with them is another operator."""
        call = operator_call(node)
        mean, var = call.argument("running_mean"), call.argument("running_var")
        if not call.argument("training") or mean is None:
            return
        value, of_channels = node.meta["val"], mean.meta["val"]
        given = tuple(call.argument(name) for name in BATCH_NORM_ARGUMENTS)
        with self._graph.inserting_before(node):
            whole = self._graph.call_function(aten._native_batch_norm_legit_functional.default, given)
            shown = (value, of_channels, of_channels, of_channels, var.meta["val"])
            whole.meta = {**node.meta, "val": shown, "operator": str(node.target)}
            results = {index: self._graph.call_function(operator.getitem, (whole, index)) for index in (0, 3, 4)}
        for index, result in results.items():
            result.meta = {**node.meta, "val": whole.meta["val"][index]}
        node.replace_all_uses_with(results[0])
        self._graph.erase_node(node)
        self._first[_memory(value)] = results[0]
        for index, written in ((3, mean), (4, var)):
            self._check_memory(whole, written)
            self._alias[results[index]] = self._written_to(written)
            self._replace(results[4], written, results[index])

    def _check_memory(self, node: fx.Node, written: fx.Node) -> None:
        owner = self._owner(written)
        first = self._first.get(_memory(written.meta["val"]))
        if owner.target in _ALWAYS_VIEWS or (first is not None and self._owner(first) is not owner):
            raise CaptureError(
                f"{operator_call(node).operator} writes into memory whose owner is lost ({owner} for {first}), so that "
                "nobody would read it; this is a fault of msrun: please report it, and use "
                'parallel_mode="data_parallel" until then',
                where=user_line(node),
            )
        if owner in self._hooked:
            raise self._cannot_write(node, "a tensor after its register_hook, under a name that it had before,")
        if owner.op == "placeholder" and owner.name not in self._buffers:
            kind, _, name = owner.name.partition("_")
            what = {"p": f"parameter {name}", "input": f"tensor {name} of the call"}.get(
                kind, "a tensor of the network"
            )
            raise self._cannot_write(node, what)

    def _written_to(self, node: fx.Node) -> fx.Node:
        while node in self._alias:
            node = self._alias[node]
        return node

    def _owner(self, node: fx.Node) -> fx.Node:
        while (source := self._alias.get(node) or _source(node)) is not None:
            node = source
        return node

    def _replace(self, anchor: fx.Node, written: fx.Node, new: fx.Node) -> None:
        """Let everything after `anchor` read `new` for `written`, and see it through all views of the same memory."""
        written = self._written_to(written)
        owner = self._owner(written)
        view, value, node = written, new, anchor
        while view is not owner:
            source = _source(view)
            assert source is not None
            source = self._written_to(source)
            before = anchor.next
            base = self._read(source, before)
            with self._graph.inserting_before(before):
                made = _put(self._graph, view, base, value)
            if made is None:
                raise self._cannot_write(node, f"a part of a tensor ({view.target})")
            if made is not value:
                self._made.append(made)
                made.meta = {**new.meta, "val": source.meta["val"]}
                self._alias[made] = source
                anchor = made
            view, value = source, made
        if owner.name in self._buffers and CHECKPOINT in node.meta:
            raise CaptureError(
                f"a block under torch.utils.checkpoint changes buffer {self._buffers[owner.name]}, which torch changes "
                "again when it runs the block again: use msrun.runtime.recompute(module), which changes it once",
                where=user_line(node),
            )
        self._value[owner] = value
        self._version[owner] = self._version.get(owner, 0) + 1
        if written is not owner:
            self._seen[written] = self._version[owner], new

    def _cannot_write(self, node: fx.Node, what: str) -> CaptureError:
        return CaptureError(
            f"{operator_call(node).operator.removesuffix('.default')} changes {what} in the forward pass, which a "
            "captured graph does not keep: use the form that returns a new tensor, or "
            'parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows',
            where=user_line(node),
        )


def _returning(target: Any) -> torch._ops.OpOverload | None:
    """Return the operator that gives back what this one writes; None where there is none."""
    if target in _TWINS:
        return _TWINS[target]
    packet, overload = str(target).removeprefix("aten.").rsplit(".", 1)
    of_packet = getattr(aten, packet.removesuffix("_"), None)
    twin = getattr(of_packet, overload, None)
    if overload.endswith("out") and of_packet is not None:
        given = [(each.name, str(each.type)) for each in target._schema.arguments if not each.is_out]
        others = (getattr(of_packet, name) for name in of_packet.overloads())
        twin = next((o for o in others if [(a.name, str(a.type)) for a in o._schema.arguments] == given), None)
    return None if twin is None or twin._schema.is_mutable else twin


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _run(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _source(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a view shows; None for what has memory of its own."""
    view = node
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        view = node.args[0]
    schema = getattr(view.target, "_schema", None)
    if view.op != "call_function" or schema is None or schema.is_mutable or not view.args:
        return None
    source = view.args[0]
    is_view = view.target is MARK or any(returned.alias_info is not None for returned in schema.returns)
    if not isinstance(source, fx.Node) or not is_view:
        return None
    shown, shows = node.meta.get("val"), source.meta.get("val")
    if not isinstance(shown, Tensor) or not isinstance(shows, Tensor):
        return None
    # `reshape`, `contiguous` and `to` are views or copies as it comes
    return source if _memory(shown) == _memory(shows) else None


# -- the other way round: what becomes of a tensor when a view of it is written ----------------------------------------


def _put(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    """Return `base` with `value` in the place that `view` shows of it; None where nobody knows how."""
    if view.target is operator.getitem:
        return _put_item(graph, view, base, value)
    call = operator_call(view)
    put = _PUTS.get(view.target)
    return None if put is None else put(graph, call.argument, base, value)


def _put_item(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    several, index = view.args
    assert isinstance(several, fx.Node)
    assert isinstance(index, int)
    dim = operator_call(several).argument("dim", 0)
    if several.target is aten.unbind.int:
        return graph.call_function(aten.select_scatter.default, (base, value, dim, index))
    if several.target in _SPLITS:
        sizes = [part.shape[dim] for part in several.meta["val"]]
        ends = list(accumulate(sizes))
        return graph.call_function(
            aten.slice_scatter.default, (base, value, dim, ends[index] - sizes[index], ends[index])
        )
    return None


_SPLITS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
Argument = Callable[..., Any]
_Put = Callable[[fx.Graph, Argument, fx.Node, fx.Node], fx.Node]


def _same(_graph: fx.Graph, _argument: Argument, _base: fx.Node, value: fx.Node) -> fx.Node:
    return value


def _reshaped(graph: fx.Graph, _argument: Argument, base: fx.Node, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.reshape.default, (value, list(base.meta["val"].shape)))


def _sliced(graph: fx.Graph, argument: Argument, base: fx.Node, value: fx.Node) -> fx.Node:
    given = (argument("dim"), argument("start"), argument("end"), argument("step"))
    return graph.call_function(aten.slice_scatter.default, (base, value, *given))


def _narrowed(graph: fx.Graph, argument: Argument, base: fx.Node, value: fx.Node) -> fx.Node:
    start = argument("start")
    return graph.call_function(
        aten.slice_scatter.default, (base, value, argument("dim"), start, start + argument("length"))
    )


def _selected(graph: fx.Graph, argument: Argument, base: fx.Node, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.select_scatter.default, (base, value, argument("dim"), argument("index")))


def _transposed(graph: fx.Graph, argument: Argument, _base: fx.Node, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.transpose.int, (value, argument("dim0"), argument("dim1")))


def _turned(graph: fx.Graph, _argument: Argument, _base: fx.Node, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.t.default, (value,))


def _permuted(graph: fx.Graph, argument: Argument, base: fx.Node, value: fx.Node) -> fx.Node:
    ndim = base.meta["val"].dim()
    dims = [dim % ndim for dim in argument("dims")]
    return graph.call_function(aten.permute.default, (value, [dims.index(dim) for dim in range(ndim)]))


_SOMETIMES_VIEWS = (
    aten.contiguous.default,
    aten.to.dtype,
    aten.reshape.default,
    aten.flatten.using_ints,
)
"""Operators whose result is a view or a copy, as it comes."""
_PUTS: dict[Any, _Put] = {
    **dict.fromkeys((MARK, aten.alias.default, aten.contiguous.default, aten.to.dtype, aten.view_as.default), _same),
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        ),
        _reshaped,
    ),
    aten.slice.Tensor: _sliced,
    aten.narrow.default: _narrowed,
    aten.select.int: _selected,
    aten.transpose.int: _transposed,
    aten.t.default: _turned,
    aten.permute.default: _permuted,
}
_ALWAYS_VIEWS = (
    *(each for each in _PUTS if each not in _SOMETIMES_VIEWS),
    aten.detach.default,
    aten.expand.default,
    aten.as_strided.default,
)
"""Operators whose result never has memory of its own."""
