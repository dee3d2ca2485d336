"""One call traced by torch's dynamo: its graph, the guards that say when it holds, and the Python code around it.

The private names of dynamo that we use are here and in `equal_blocks.py`. Dynamo follows the Python code of one call
and leaves a graph of torch functions. What else the call read (attributes, flags, arguments that are no tensors)
becomes a guard, and what else it did (results put into objects, attributes that it set) becomes code around the graph.
Parameters, buffers and tensors are inputs of the graph, found anew in every call.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import logging
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

# Dynamo imports this at its first capture; here it is imported once for all workers of a host, before they are forked.
import torch._functorch.aot_autograd
from torch import Tensor, fx, nn
from torch._dynamo import config, convert_frame, guards, symbolic_convert
from torch._dynamo.decorators import maybe_mark_dynamic, substitute_in_graph
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.hooks import Hooks
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import RandomValueSource
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._guards import GuardsSet
from torch._subclasses.fake_impls import register_op_impl
from torch.fx.experimental import _config as symbol_config
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound
from torch.nn.modules import transformer
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from msrun.errors import CaptureError, ParallelError
from msrun.runtime.capture.equal_blocks import Repeated, repeating
from msrun.runtime.capture.marked_calls import Marking, NotWhileCapturing
from msrun.runtime.sharding.operators.rule import line_of_use
from msrun.runtime.sharding.sizes import Place, Sizes

Call = Callable[..., Any]
_CONFIG: dict[str, Any] = {
    "allow_rnn": True,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "skip_nnmodule_hook_guards": False,
    "record_runtime_overhead": False,
    "reorderable_logging_functions": {print, warnings.warn},
    "suppress_errors": False,
    "use_numpy_random_stream": True,  # else torch's numbers stand for numpy's, the same in every call
    "verbose": True,  # errors keep their traceback, in which what the network raised is found
}
_LOGGING = {"debug", "info", "warn", "error", "exception", "critical", "log"}
_LONGEST = 300
"""Characters of a reason that dynamo gives."""
_RAISED = re.compile(r"raised exception (\w+)\((['\"])(.*?)\2,?\)", re.DOTALL)
"""How dynamo tells that the network raises something."""
_MET = re.compile(r"run FX node with fake tensors.*got (\w+)\((['\"])(.*?)\2", re.DOTALL)
"""How dynamo tells that an operator of torch refuses what it is given."""
_DRAWS = (
    "it draws from the random of Python or numpy, whose numbers every rank would draw for itself: draw them before the "
    "call and pass them in, or use torch.rand"
)
_KNOWN = {
    "Random.": _DRAWS,
    "use_numpy_random_stream": _DRAWS,
    "of RandomState(": _DRAWS,
    "default_rng": _DRAWS,
    # a fraction that a tensor holds is one; of whole numbers only those that are drawn
    "Pending unbacked symbols {zuf": (
        "an autograd function reads a number out of a tensor (item(), float()), which a graph of all steps cannot do "
        "there: let the number stay a tensor"
    ),
    "Pending unbacked symbols": _DRAWS,
    "torch.compiler.disable": (
        "it calls what torch.compiler.disable keeps out of graphs (an AutoParallel inside: call the network itself "
        "there)"
    ),
    "`manual_seed`": "it seeds the random numbers, which msrun gives each call of the network",
    "trace_autograd_ops": "it takes gradients inside the forward pass",
    "`pack_padded_sequence`": (
        "pack_padded_sequence makes tensors whose sizes depend on the lengths: give the layer the padded batch, and "
        "mask its results"
    ),
}
"""Part of what dynamo says -> what it means."""
_OWN_NAMES = ("MSRUN_CAPTURING", "_detect_is_causal_mask", "_is_fastpath_enabled")
"""Names whose value differs between a capture and a step: no guards of them."""


def _call(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Be what dynamo traces: whatever is called, its names are these three."""
    return function(*args, **kwargs)


ENTRY = _call.__code__
"""The code for whose locals a call's guards are."""


@dataclass
class Stores:
    """What a call stores beside what it returns."""

    results: frozenset[int]
    """The outputs of the graph that the call returns, whatever holds them; it stores the others."""
    buffers: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    """output -> module and name of the buffer that it is assigned to"""


@dataclass
class TracedCall:
    """One call as dynamo traced it."""

    graph: fx.GraphModule
    """Of torch functions."""
    inputs: list[Tensor | int]
    """What the graph's placeholders stood for, in order: objects of the call, of modules, of closures, and sizes."""
    sources: list[str]
    """Where the call found them, as Python text: `function.fc.weight`, `args[0]`."""
    stores: Stores
    environment: Any
    backend_id: str
    _guards: Any
    sizes: Sizes
    free: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """input -> which tensor of the call it is, and the dimensions whose size is not that of the traced call alone"""
    size_of: dict[int, Place] = field(default_factory=dict)
    """input that is a size -> input and dimension that have it"""
    marked: Marking | None = None
    """What was marked while the call was traced."""
    output: Any = None
    """What dynamo has left of it, until the call has been put away (`portable_trace.py`) or is not."""

    def holds(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call does what the traced one did; shapes of given tensors are the caller's to compare."""
        if self._has_other_hooks():
            return False
        return bool(self._guards.check({"function": function, "args": args, "kwargs": kwargs}))

    def why_not(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the first guard that does not hold, as text; empty when all hold."""
        if self._has_other_hooks():
            return "the hooks of a module with a strategy are the same"
        failed = self._guards.check_verbose({"function": function, "args": args, "kwargs": kwargs})
        parts = [] if failed.result else failed.verbose_code_parts
        return _in_words(parts[0].partition("  #")[0].strip()) if parts else ""

    def is_of(self, other: TracedCall) -> bool:
        """Return whether both come from one run of dynamo."""
        return self.graph is other.graph

    def _has_other_hooks(self) -> bool:
        """Return whether tables of hooks in which marks stood, which are not guarded, hold others by now."""
        return self.marked is not None and any(table != hooks for table, hooks in self.marked.hooks)

    def of_other_sizes(
        self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
    ) -> TracedCall | None:
        """Return what tracing another call would leave, if the traced one differs from it in free sizes alone.

        Args:
            args, kwargs: what stands for the arguments of a call for which `holds` is true.
            given: the tensors in them.
        """
        if self.sizes.why_not([tensor.shape for tensor in given]):
            return None
        inputs = given_to(self, function, args, kwargs)
        free = {index: dimensions for index, (_, dimensions) in self.free.items()}
        old, new = ([_kind(value, free.get(i, ())) for i, value in enumerate(each)] for each in (self.inputs, inputs))
        return dataclasses.replace(self, inputs=inputs) if old == new else None

    def bind(self, run: Call) -> Call:
        """Return the call's own Python code around `run`, which is called in place of the graph."""
        globals_ = {"__builtins__": builtins, "__name__": __name__}
        return cast(Call, self.environment.forward_callable(self.backend_id, run, extra_globals=globals_))


def _kind(value: Tensor | int, free: Collection[int]) -> Any:
    """Return what of an input is the same in calls that a trace is for."""
    if not isinstance(value, Tensor):
        return int
    sizes = [None if dimension in free else size for dimension, size in enumerate(value.shape)]
    return sizes, order_in_memory(value), value.dtype, value.device, value.requires_grad


def order_in_memory(value: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the outermost inwards, as of channels_last; empty where they are so in their order.

    By it `flatten` and `reshape` are views, through which a write goes, or copies.
    """
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dimension: -strides[dimension])
    real = [dimension for dimension in order if value.shape[dimension] != 1]
    return () if real == sorted(real) else tuple(order)


def trace_call(
    function: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    unguarded: Collection[int],
    given: Sequence[Tensor] = (),
    free: Collection[Place] = (),
    blocks: Collection[int] = (),
) -> TracedCall:
    """Trace one call.

    Args:
        unguarded: ids of objects that stand for others while the call is traced: nothing is guarded about them.
        given: the tensors in the arguments.
        free: which of them, and the dimension, keep their size free, where the Python code lets them.
        blocks: ids of modules that are traced once where they are equal.
    """
    if blocks:
        with contextlib.suppress(Exception):  # what cannot be repeated, or traced: the errors are those without blocks
            return _trace_call(function, args, kwargs, unguarded, given, free, blocks)
    return _trace_call(function, args, kwargs, unguarded, given, free, ())


def _trace_call(
    function: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unguarded: Collection[int],
    given: Sequence[Tensor],
    free: Collection[Place],
    blocks: Collection[int],
) -> TracedCall:
    own_globals = {"__builtins__": builtins, "__name__": __name__}
    entry = types.FunctionType(ENTRY, own_globals)
    found: list[Stores] = []
    repeated = Repeated(lambda output: reader({"L": output.local_scope, "G": output.global_scope}))
    with (
        get_metrics_context(),
        dynamo_timed("msrun_capture"),
        config.patch(settings()),
        config.patch(fake_tensor_cache_enabled=not free),  # a look-up compares sizes, which takes longer
        symbol_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # else sizes that are equal by chance would have to stay so
        _watching_stores(found),
        _without_shortcuts(),
        _without_tracebacks(),
        without_reports(),
        repeating(blocks, repeated),
    ):
        for index, dimension in free:
            maybe_mark_dynamic(given[index], dimension)
        try:
            captured = convert_frame.fullgraph_capture(entry, (function, args, kwargs))
        except ParallelError:
            raise
        except (TorchDynamoException, PendingUnbackedSymbolNotFound) as error:
            own = _own_error(error) or _users_error(error)
            if own is not None:
                raise own from None
            raise explain(error, function) from error
        backend, output = captured.backend_input, captured.graph_capture_output
        if backend is None:
            raise CaptureError(
                f"{name_of(function)} computes nothing with tensors: there is nothing to run in parallel"
            )
        _refuse_python_draws(backend.graph_module, function)
        _leave_out(output.output_graph, unguarded)
        repeated.add_guards(output.output_graph)
        built = output.build_guards(ENTRY, Hooks())
    holds = built.guard_manager
    del built.guard_manager  # for as long as a parameter lives, torch would keep every capture's guards and graph
    environment = _with_names(output.get_runtime_env(), output.f_globals)
    traced = TracedCall(
        backend.graph_module,
        [],
        [],
        found[-1] if found else Stores(frozenset(range(len(_outputs(backend.graph_module))))),
        environment,
        backend.backend_id,
        holds,
        Sizes(),
        output=output,
    )
    traced.inputs = given_to(traced, function, args, kwargs)
    traced.sources = [str(source.name) for source in _sources(backend.graph_module)]
    if free:
        value_of = reader({"L": {"function": function, "args": args, "kwargs": kwargs}, "G": {}})
        number = {id(tensor): index for index, tensor in enumerate(given)}
        symbols = backend.fake_mode.shape_env
        traced.sizes = Sizes(symbols, lambda source: number[id(value_of(source))])
        _note_free_sizes(traced, number, free)
    return traced


def _note_free_sizes(traced: TracedCall, number: Mapping[int, int], free: Collection[Place]) -> None:
    """Write down which inputs have free sizes, and where inputs that are sizes are found in them."""
    for index, value in enumerate(traced.inputs):
        if dimensions := [dimension for tensor, dimension in free if number.get(id(value)) == tensor]:
            traced.free[index] = number[id(value)], dimensions
    values = [node.meta["example_value"] for node in traced.graph.graph.nodes if node.op == "placeholder"]
    has = {str(values[i].shape[d]): (i, d) for i, (_, dimensions) in traced.free.items() for d in dimensions}
    traced.size_of = {
        index: has[str(size)] for index, size in enumerate(values) if not isinstance(size, Tensor) and str(size) in has
    }


def settings() -> dict[str, Any]:
    """Return dynamo's settings for a capture: what a network logs it does not log from a graph."""
    methods = [
        method for name, method in vars(logging.Logger).items() if name in _LOGGING or name.startswith("warning")
    ]
    return {**_CONFIG, "ignore_logging_functions": set(methods)}


def name_of(function: Call) -> str:
    """Return how messages call what is captured."""
    return type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", repr(function))


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    return cast("Sequence[Any]", next(node for node in graph.graph.nodes if node.op == "output").args[0])


def _with_names(environment: Any, globals_: Mapping[str, Any]) -> Any:
    """Let the code around the graph see every name that dynamo gave it."""
    return dataclasses.replace(environment, used_globals={**globals_, **environment.used_globals})


class _Given(Exception):
    def __init__(self, values: tuple[Tensor | int, ...]) -> None:
        self.values = values


def given_to(traced: TracedCall, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | int]:
    """Return what the call gives to its graph, by running its code up to there."""

    def stop(*values: Tensor | int) -> Any:
        raise _Given(values)

    try:
        traced.bind(stop)(function, args, kwargs)
    except _Given as given:
        return list(given.values)
    raise CaptureError(f"{name_of(function)} computes nothing with tensors: there is nothing to run in parallel")


def _sources(graph: fx.GraphModule) -> Iterator[Any]:
    return (node._dynamo_source for node in graph.graph.nodes if node.op == "placeholder")


def _refuse_python_draws(graph: fx.GraphModule, function: Call) -> None:
    """Refuse numbers that dynamo would let Python's own generator draw, before each run of the graph."""
    for node in graph.graph.nodes:
        if node.op == "placeholder" and isinstance(getattr(node, "_dynamo_source", None), RandomValueSource):
            raise _cannot(function, _DRAWS, line_of_use(node))


def reader(scope: Mapping[str, Any]) -> Call:
    """Return what finds the value of a source, of the guards or symbols of a call."""
    known: dict[Any, Any] = {}
    return lambda source: source.get_value(scope, guards._get_closure_vars(), known)


def _leave_out(found: Any, unguarded: Collection[int]) -> None:
    """Take out the guards of stand-ins and of sizes, and of what they hold, before they are built."""
    value_of = reader({"L": found.local_scope, "G": found.global_scope})

    def is_unguarded(source: Any) -> bool:
        try:
            return id(value_of(source)) in unguarded
        except Exception:  # noqa: BLE001  # what it says is that there is no such thing
            return False

    sources = {guard.name: guard.originating_source for guard in found.guards if guard.name}
    left_out = {name for name, source in sources.items() if is_unguarded(source)}
    found._guards = GuardsSet(
        OrderedSet(
            guard
            for guard in found.guards
            if guard.create_fn_name() != "SHAPE_ENV"  # `Sizes` looks after it
            and not any(own in guard.name for own in _OWN_NAMES)
            and left_out.isdisjoint(_wholes(guard.name))
        )
    )


def _in_words(guard: str) -> str:
    """Return a guard as its reader would write it: `net.layer.scale == 2` for `L['function']._modules['layer']...`."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", guard)
    return re.sub(r"L\['(\w+)'\]", lambda found: {"function": "net"}.get(found[1], found[1]), text)


def _wholes(name: str) -> Iterator[str]:
    """Yield a name and those that it is a part of: `a.b['c']`, `a.b` and `a`."""
    yield name
    yield from (name[: found.start()] for found in re.finditer(r"[.\[]", name))


@contextlib.contextmanager
def _watching_stores(found: list[Stores]) -> Iterator[None]:
    """Note what the call stores: dynamo writes the code for it after that for the results.

    Objects that the call makes are filled by that code, too: what the call returns in them are results.
    """
    original, original_suffix = SideEffects.codegen_update_mutated, OutputGraph.codegen_suffix
    returned: list[Any] = []

    def noting(self: Any, tx: Any, stack_values: list[Any], *rest: Any, **named: Any) -> None:
        returned[:] = stack_values
        original_suffix(self, tx, stack_values, *rest, **named)

    def watched(self: Any, cg: Any, *rest: Any, **named: Any) -> None:
        results = len(cg.graph_outputs)
        assigned = [item for variable in self._get_modified_vars() for item in _items(variable, cg)]
        held = _tensors_in(returned, self)
        original(self, cg, *rest, **named)
        index_of = {id(entry.variable): entry.index for entry in cg.graph_outputs.values()}
        slots = {index_of[id(value)]: slot for slot, value in assigned if id(value) in index_of}
        given = {entry.index for key, entry in cg.graph_outputs.items() if entry.index < results or key in held}
        found.append(Stores(frozenset(given), slots))

    SideEffects.codegen_update_mutated = watched  # type: ignore[method-assign]
    OutputGraph.codegen_suffix = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideEffects.codegen_update_mutated = original  # type: ignore[method-assign]
        OutputGraph.codegen_suffix = original_suffix  # type: ignore[method-assign]


def _tensors_in(values: Sequence[Any], effects: SideEffects) -> set[int]:
    """Return the keys, as outputs of the graph, of the tensors in what a call returns and in new objects there."""
    found: set[int] = set()
    seen: dict[int, Any] = {}  # keeps what has been seen alive
    todo = list(values)
    while todo:
        value = todo.pop()
        value = value.unwrap() if isinstance(value, VariableTracker) else value
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, VariableTracker):
            if value.is_tensor():
                found.add(id(value.as_proxy()))
            elif not isinstance(value.mutation_type, AttributeMutationExisting | ValueMutationExisting):
                todo += [each for name, each in vars(value).items() if name not in value._nonvar_fields]
                todo += effects.store_attr_mutations.get(value, {}).values()
    return found


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Let dynamo neither measure its guards, which empties the processor's cache, nor parse files for lines of a log.

    Nor does it parse again what finds the value of a source, the same text for every module. All of it takes a good
    part of a capture.
    """
    measures: dict[str, Any] = vars(guards)
    lines: dict[str, Any] = vars(symbolic_convert)
    sources: dict[str, Any] = vars(torch._guards)
    before = measures["profile_guard_manager"], lines["get_funcname"]
    measures["profile_guard_manager"], lines["get_funcname"] = (lambda *_: 0.0), (lambda *_: None)
    sources["eval"] = _evaluate
    try:
        yield
    finally:
        measures["profile_guard_manager"], lines["get_funcname"] = before
        sources.pop("eval", None)


def _evaluate(text: str, globals_: dict[str, Any], locals_: dict[str, Any]) -> Any:
    return eval(_parsed(text), globals_, locals_)  # noqa: S307  # of a source of dynamo


@functools.lru_cache(1 << 12)
def _parsed(text: str) -> types.CodeType:
    return compile(text, "<source>", "eval")


@contextlib.contextmanager
def _without_shortcuts() -> Iterator[None]:
    """Let nn.Transformer take its masks as they are, and call its layers one by one.

    It looks into masks, and in evaluation calls one kernel for a whole layer, for speed and not for other results.
    """
    before, fast = transformer._detect_is_causal_mask, torch.backends.mha.get_fastpath_enabled()

    def said(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:  # noqa: ARG001
        return is_causal is True

    transformer._detect_is_causal_mask = said
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Let torch not print where in its own code it found fault with an operator: the error says so."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _items(variable: Any, cg: Any) -> Iterator[tuple[tuple[nn.Module, str], Any]]:
    """Yield (module, buffer) and new value of what a table of buffers gets."""
    source = getattr(variable, "source", None)
    if source is None or getattr(source, "member", None) != "_buffers":
        return
    module = cg.tx.output.resolve_source_value(source.base)
    for key, value in variable.items.items():
        if value.is_tensor():
            yield (module, key.vt.as_python_constant()), value


# -- errors ----------------------------------------------------------------------------------------------------------


def _own_error(error: BaseException) -> ParallelError | None:
    """Return the error of ours that dynamo wrapped, if it did."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ParallelError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _users_error(error: BaseException) -> Exception | None:
    """Return what the network itself raised, if it did: its callers may wait for just that type."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "bubble_exception_to_interpreter":
            raised: Any = step.tb_frame.f_locals.get("curr_exc")
            try:
                kind = raised.python_type()
                made = kind(*(argument.as_python_constant() for argument in raised.args))
            except Exception:  # noqa: BLE001  # an argument that only a run could tell, a class that wants others
                return None
            if not isinstance(made, Exception) or isinstance(made, StopIteration):
                return None
            if isinstance(made, NotWhileCapturing):
                return CaptureError(str(made), where=where(error))
            made.add_note(f"raised at {where(error)}, while msrun captured the network")
            return made
        step = step.tb_next
    return None


def explain(error: BaseException, function: Call) -> CaptureError:
    """Say in one line what could not be captured, where, and what to do instead."""
    text = str(error)
    known = next((what for part, what in _KNOWN.items() if part in text), None)
    if raised := _RAISED.search(text):
        what = f"it raises {raised[1]}: {raised[3]}"
    elif met := _MET.search(text):
        what = f"torch raises {met[1]}: {met[3]}"
    elif known is not None:
        what = known
    elif "generator" in text.lower():
        what = "it draws from a generator of its own, not the network's random numbers: pass them in as an input"
    elif "data-dependent" in text.lower() or "item()" in text:
        what = "a Python branch or number depends on a tensor's values"
    else:
        lines = [line.strip().removeprefix("Explanation: ") for line in text.splitlines()]
        what = ": ".join(filter(None, [str(getattr(error, "gb_type", "")), *lines[1:2], lines[0]][:2]))
        what = what if len(what) <= _LONGEST else what[: what.rindex(" ", 0, _LONGEST)] + " ..."
    return _cannot(function, what, where(error))


def _cannot(function: Call, what: str, line: str) -> CaptureError:
    return CaptureError(
        f"{name_of(function)} cannot be captured as one graph: {what}; change that construct, or use "
        'parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows',
        where=line,
    )


def where(error: BaseException) -> str:
    """Return "file:line" of the user's line that an error of dynamo names; empty when it names none."""
    stack = list(getattr(error, "real_stack", None) or ())
    own = [frame for frame in stack if "/torch/" not in frame.filename and "/msrun/runtime/" not in frame.filename]
    frames = own or stack
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno}"


# -- functions of torch that dynamo does not follow --------------------------------------------------------------------


@substitute_in_graph(checkpoint_sequential, skip_signature_check=True)
def _checkpoint_sequential(
    functions: Any,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **settings: Any,  # noqa: ARG001  # of random streams, which msrun gives each layer
) -> Any:
    """Do what torch's does: the last segment is not computed again."""
    layers = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    size = len(layers) // segments
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_in_turn(layers[start : start + size]), input, use_reentrant=use_reentrant is not False)
    return _in_turn(layers[size * (segments - 1) :])(input)


def _in_turn(layers: Sequence[Call]) -> Call:
    def run(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    return run


@register_op_impl(torch.ops.aten._ctc_loss.Tensor)
def _fake_ctc_loss(_mode: Any, _operator: Any, log_probabilities: Tensor, targets: Tensor, *_: Any, **__: Any) -> Any:
    """Give the loss of every row; what it keeps for the backward pass, by the longest target, nobody asks."""
    length, *rows, _classes = log_probabilities.shape
    return log_probabilities.new_empty(rows), log_probabilities.new_empty((*rows, length, 2 * targets.shape[-1] + 1))
