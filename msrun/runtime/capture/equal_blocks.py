"""Equal blocks of a network, as the layers of a transformer, are traced once, by dynamo and to aten, and repeated.

Dynamo traces the call of a block into a graph of its own (torch's `nested_compile_region`) and puts that graph where it
meets a block for which the guards of the first one hold, and which is called alike. Torch looks at guards of some of
what was read, and leaves out those of the repeated blocks; here every guard that speaks of the first block is looked at
for each other one, and becomes one of its own. Whatever cannot be repeated is traced as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._dynamo.guards import GUARD_VALUE_DISPATCH, GuardCheckSpec
from torch._dynamo.variables import invoke_subgraph as regions
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable, record_nn_module_stack
from torch._guards import Guard, GuardsSet, InvokeSubgraphCache, Source
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor,
)
from torch.utils._ordered_set import OrderedSet
from torch.utils.weak import TensorWeakRef

REGION = torch.ops.higher_order.invoke_subgraph
"""In dynamo's graph, the call of a block: its graph, a name, and what it is given."""
_BLOCK = "msrun_block"
"""Key of the meta of a block's graph: the id of the module that was traced, as text."""


class NotEqualError(Exception):
    """A block that torch has repeated is not like the one that was traced."""


def find_equal_blocks(root: nn.Module) -> set[int]:
    """Return the ids of modules whose calls may be repeated: those in lists that look like one another."""
    found: set[int] = set()
    for module in root.modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        alike: dict[Any, set[int]] = {}
        for child in module.children():
            if next(child.children(), None) is not None:
                alike.setdefault(_form(child), set()).add(id(child))
        found |= {each for group in alike.values() if len(group) > 1 for each in group}
    return found


def _form(module: nn.Module) -> Any:
    """Return what equal blocks have in common at least; which of their tensors are one is nowhere else looked at."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, int] = {}
    return type(module), *(
        (name, first.setdefault(id(tensor), place), tensor.shape, tensor.dtype, tensor.requires_grad)
        for place, (name, tensor) in enumerate(tensors)
    )


# -- while dynamo traces -----------------------------------------------------------------------------------------------


def _call_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Be what dynamo traces into a graph of its own."""
    return block(*args, **kwargs)


vars(_call_block)["__marked_compile_region_max_reuse_entries__"] = 1 << 30  # else the ninth kind of block is an error


ValueOf = Callable[[Source], Any]
"""Returns the value that a source has in the call."""


class Repeated:
    """What dynamo does not trace again."""

    def __init__(self, value_of: Callable[[Any], ValueOf]) -> None:
        """Args:
        value_of: what dynamo knows of a call -> what finds its values.
        """
        self._value_of = value_of
        self._blocks: list[tuple[dict[Source, Source], dict[Guard, Guard]]] = []
        """of every repeated block: where is in it what stands somewhere in the traced one, and its guards"""

    def fits(self, is_reusable: Callable[..., bool], tx: Any, condition: Any, given: Any, traced: Any) -> bool:
        """Return whether a block is like one that was traced; its guards are noted.

        Args:
            is_reusable: what torch thinks of that.
            tx: dynamo's translator.
            condition, traced: what torch has noted of the traced block.
            given: what the other block is called with.
        """
        # torch looks only at guards of what it has seen being read, and at what was read even where nothing is written
        read = condition.traced_sources if tx.output.side_effects.mutated_sources else OrderedSet[Source]()
        if not is_reusable(tx, dataclasses.replace(condition, guards=[], traced_sources=read), given, traced):
            return False
        value_of = self._value_of(tx.output)
        pairs = zip(traced.arg_sources, given.arg_sources, strict=True)
        blocks = [
            ({old: new}, dict[Guard, Guard]()) for old, new in pairs if old is not None and new not in (None, old)
        ]
        try:
            for block in blocks:
                _guard_block(tx.output.guards, *block, value_of)
        except NotEqualError:
            return False
        self._blocks += blocks
        return True

    def add_guards(self, found: Any) -> None:
        """Guard repeated blocks as the traced ones are.

        Args:
            found: dynamo's output graph.
        """
        guards = list(found.guards)
        added: list[Guard] = []
        for known, own in self._blocks:
            _guard_block(guards, known, own, self._value_of(found))
            added += [own[guard] for guard in guards if guard in own]
            ordered = [source for source in found.guard_on_key_order if _is_inside(source.name, known)]
            found.guard_on_key_order |= {_in_block(source, known) for source in ordered}
        found._guards = GuardsSet(OrderedSet([*guards, *added]))


def _guard_block(
    guards: Iterable[Guard], known: dict[Source, Source], own: dict[Guard, Guard], value_of: ValueOf
) -> None:
    """Add to a block's own guards those that say of it what these say of the traced one."""
    for guard in guards:
        if guard not in own and _is_inside(guard.name, known):
            own[guard] = _guard_again(guard, known, value_of)


def _is_inside(name: str, known: dict[Source, Source]) -> bool:
    """Return whether something is the traced block, or a part of it."""
    block = next(iter(known)).name
    return name == block or name.startswith((f"{block}.", f"{block}["))


def _guard_again(guard: Guard, known: dict[Source, Source], value_of: ValueOf) -> Guard:
    new = _in_block(guard.originating_source, known)
    kind = guard.create_fn_name()
    check = GUARD_VALUE_DISPATCH.get(kind)
    try:
        before, now = value_of(guard.originating_source), value_of(new)
        is_equal = kind == "DUPLICATE_INPUT" or (  # that is the blocks' form
            isinstance(check, GuardCheckSpec) and check.eval_fn(now, check.get_metadata_fn(guard, before))
        )
        if kind in ("EQUALS_MATCH", "CONSTANT_MATCH"):  # 1, 1.0 and True are others
            is_equal = is_equal and type(now) is type(before) and repr(now) == repr(before)
    except Exception as error:
        raise NotEqualError(new.name) from error
    if not is_equal:
        raise NotEqualError(new.name)
    create = guard.create_fn
    if isinstance(create, functools.partial):
        named = {
            key: TensorWeakRef(now)
            if isinstance(value, TensorWeakRef)
            else (_in_block(value, known) if isinstance(value, Source) else value)
            for key, value in create.keywords.items()
        }
        create = functools.partial(create.func, *create.args, **named)
    return new.make_guard(create)


def _in_block(source: Source, known: dict[Source, Source]) -> Source:
    """Return where another block has what stands here in the traced one; `clone` would make each link anew."""
    if source not in known:
        links = {
            each.name: _in_block(link, known)
            for each in dataclasses.fields(cast(Any, source))
            if isinstance(link := getattr(source, each.name), Source)
        }
        known[source] = dataclasses.replace(cast(Any, source), **links) if links else source
    return known[source]


@contextlib.contextmanager
def repeating(blocks: Collection[int], repeated: Repeated) -> Iterator[None]:
    """Let dynamo trace blocks with these ids once, where they are equal."""
    call, is_reusable = UnspecializedNNModuleVariable.call_function, regions.is_reusable
    find_same = InvokeSubgraphCache.get_dynamo_installed_submodules

    def call_block(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        is_region = id(self.value) in blocks and self.source and tx.output.current_tracer.parent is None
        if not is_region:
            return call(self, tx, args, kwargs)
        stack = str(id(self.value)), self.get_nn_module_stack_source(), tx, self.value
        with record_nn_module_stack(*stack):
            operator = TorchHigherOrderOperatorVariable.make(REGION)
            result = operator.call_function(tx, [UserFunctionVariable(cast(Any, _call_block)), self, *args], kwargs)
        node = next(node for node in reversed(tx.output.graph.nodes) if node.target is REGION)
        tx.output.nn_modules[node.args[1]].meta.setdefault(_BLOCK, stack[0])
        return result

    UnspecializedNNModuleVariable.call_function = call_block  # type: ignore[method-assign]
    regions.is_reusable = functools.partial(repeated.fits, is_reusable)
    InvokeSubgraphCache.get_dynamo_installed_submodules = lambda *_: []  # type: ignore[method-assign]  # takes 1 for 1.0
    try:
        yield
    finally:
        UnspecializedNNModuleVariable.call_function = call  # type: ignore[method-assign]
        regions.is_reusable = is_reusable
        InvokeSubgraphCache.get_dynamo_installed_submodules = find_same  # type: ignore[method-assign]


# -- while operators are recorded --------------------------------------------------------------------------------------


def block_of(body: fx.GraphModule) -> str:
    """Return the id, as text, of the module whose call is this graph."""
    return cast(str, body.meta[_BLOCK])


def kind_of(value: Any) -> Any:
    """Return what of a value that a block is given decides which operators come of it."""
    if isinstance(value, Tensor):
        layout = [str(size) for size in (*value.shape, *value.stride(), value.storage_offset())]
        return *layout, value.dtype, value.device, value.requires_grad
    return type(value), str(value)


class RecordedBlock:
    """The operators of one block, for others that are given the like."""

    def __init__(self, path: str, given: Sequence[Any], run: Callable[[], Sequence[Any]]) -> None:
        """Run the block at a path, while its operators are recorded."""
        self.path = path
        self._given = _nodes_of(given)
        graph = _tracer().graph
        before = next(reversed(graph.nodes))
        self.results = list(run())
        self._nodes: list[fx.Node] = []
        while before.next.op != "root":
            before = before.next
            self._nodes.append(before)
        self._made = _nodes_of(self.results)
        writes = any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in self._nodes)
        self._is_repeatable = not writes and {*self._made} <= {*self._nodes} and len(self._made) == len(self.results)

    def again(self, given: Sequence[Any], meta_of: Callable[[fx.Node], dict[str, Any]]) -> list[Any] | None:
        """Record the same operators on other values; returns the results, or None if they have to be run.

        Args:
            meta_of: returns the notes of an operator's copy, without its value.
        """
        new = _nodes_of(given)
        is_same = [self._given.index(node) for node in self._given] == [new.index(node) for node in new]
        if not is_same or not self._is_repeatable:
            return None
        made: dict[fx.Node, Tensor] = {}
        for node, value in zip(self._made, self.results, strict=True):
            if (like := _like(value)) is None:
                return None
            made[node] = like
        tracer = _tracer()
        copies = dict(zip(self._given, new, strict=True))
        for node in self._nodes:
            copy = copies[node] = tracer.graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta = meta_of(node)
            if node in made:  # what others read from; inside nothing is written, so whose memory it is plays no part
                with disable_proxy_modes_tracing():
                    copy.meta["val"] = made[node].detach()
        for node, value in made.items():
            track_tensor(value, fx.Proxy(copies[node], tracer), constant=None, tracer=tracer)
        return [made[node] for node in self._made]


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "operators are recorded"
    return mode.tracer


def _nodes_of(values: Sequence[Any]) -> list[fx.Node]:
    """Return the nodes of the tensors among some values."""
    return [get_proxy_slot(value, _tracer()).proxy.node for value in values if isinstance(value, Tensor)]


def _like(value: Tensor) -> Tensor | None:
    """Return what stands for another result of the same operators, which may be written; None where there is none."""
    with disable_proxy_modes_tracing():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        if value.requires_grad:
            made = made.requires_grad_().clone()
    return made if made.stride() == value.stride() and not value.storage_offset() else None
