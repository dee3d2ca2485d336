"""A traced call in a form that another process can load: its guards are looked at there, and built for its objects.

A guard says what of a value must stay as it is. Of each the portable form has a text, of what was found when the call
was traced (`portable.py`); a process that loads it finds the same texts of its own network, arguments and functions,
and gets guards of these, or it finds others, and traces the call itself. All code that was traced has such a text, too.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import config
from torch._dynamo.guards import GUARD_VALUE_DISPATCH, CheckFunctionManager, GuardBuilder, GuardCheckSpec
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._functorch._aot_autograd.utils import top_saved_tensors_hooks
from torch._guards import Guard, GuardsSet, Source
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._ordered_set import OrderedSet
from torch.utils.weak import TensorWeakRef

from msrun.runtime.capture.dynamo import ENTRY, Stores, TracedCall, reader, settings, without_reports
from msrun.runtime.capture.marked_calls import Marking
from msrun.runtime.capture.portable import UnportableError, hash_of, text_of
from msrun.runtime.sharding.sizes import Place, Sizes

_OF_STATE = frozenset(
    {
        "GRAD_MODE",
        "DETERMINISTIC_ALGORITHMS",
        "FSDP_TRAINING_STATE",
        "GLOBAL_STATE",
        "TORCH_FUNCTION_STATE",
        "DEFAULT_DEVICE",
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
    }
)
"""Kinds of guards that speak of the process."""
_TORCH = f"{Path(torch.__file__).parent}/"
_OWN = f"{Path(__file__).parents[2]}/"
"""Folders of torch and of this package: versions tell their code apart, where nobody has patched it."""
_FROM_C = {"torch", "_operator", "builtins", "math", "None"}
"""Modules of functions in C that may stand in a graph."""
Arguments = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A call: the function, what stands for its arguments, and for those by name."""


@dataclass
class PortableGuards:
    """Guards that say when a traced call holds."""

    guards: list[tuple[Source, str, tuple[Any, ...], dict[str, Any]]]
    """Of each what it is about, its kind, and the kind's further arguments."""
    ordered: list[Source]
    """Dicts whose keys have to stay in their order."""
    modules: dict[str, str]
    """name that dynamo gave a module -> the module"""
    builtins: str | None
    """The name that it gave the builtins."""
    functions: list[tuple[str, str]]
    """Module and qualified name of all functions that were traced."""
    called: list[tuple[str, str]]
    """Module and name of what torch's functions among them may call: dynamo guards none of it."""
    text: str
    """Digest of what was found."""

    @classmethod
    def of(cls, output: Any, ran: Iterable[types.CodeType]) -> PortableGuards:
        """Return those of a capture, without their text.

        Args:
            output: what dynamo has left of it.
            ran: code that dynamo did not follow.

        Raises:
            UnportableError: a guard, or code that was traced, could not be found again in another process.
        """
        graph = output.output_graph
        if graph.aotautograd_guards:
            raise UnportableError("a guard of memory that tensors share")
        functions, called = _find_functions([*output.traced_code, *ran])
        return cls(
            [_parts(guard) for guard in sorted(graph.guards)],
            sorted(graph.guard_on_key_order, key=lambda source: str(source.name)),
            dict(output.import_sources),
            graph.name_of_builtins_dict_key_in_fglobals,
            functions,
            called,
            "",
        )

    def globals(self) -> dict[str, Any]:
        """Return what dynamo has named, in this process."""
        found: dict[str, Any] = {name: importlib.import_module(module) for name, module in self.modules.items()}
        return found if self.builtins is None else {**found, self.builtins: builtins.__dict__}

    def find(self, value_of: Callable[[Source], Any], known: Mapping[int, str]) -> str:
        """Return a digest of what the guards are about and of the code that was traced, as they are in this process.

        Raises:
            UnportableError: something of it is not there, or has no text.
        """
        found = [_text_of_process(), *(text_of(_function(*place).__code__) for place in self.functions)]
        found += [_text_of_called(vars(importlib.import_module(module)).get(name)) for module, name in self.called]
        for source, kind, _, named in self.guards:
            if kind in _OF_STATE:
                continue
            try:
                value = value_of(source)
                found.append(f"{source.name} {kind} {self._text(source, kind, value, named, value_of, known)}")
            except UnportableError:
                raise
            except Exception as error:
                raise UnportableError(f"no {source.name}") from error
        return hash_of("\n".join(found))

    def _text(
        self,
        source: Source,
        kind: str,
        value: Any,
        named: Mapping[str, Any],
        value_of: Callable[[Source], Any],
        known: Mapping[int, str],
    ) -> str:
        if kind == "DUPLICATE_INPUT":
            return str(value is value_of(named["source_b"]))
        check = GUARD_VALUE_DISPATCH.get(kind)
        if not isinstance(check, GuardCheckSpec):
            raise UnportableError(f"a guard {kind} of {source.name}")
        guard = source.make_guard(_create(kind, (), dict(named)))
        metadata = check.get_metadata_fn(guard, value)
        try:
            if isinstance(value, types.FunctionType):  # the guard is of its code alone
                text_of(value)
            return f"{bool(check.eval_fn(value, metadata))} {text_of(metadata, known)}"
        except UnportableError as error:
            raise UnportableError(f"a guard {kind} of {source.name}, {error}") from None

    def build(self, scope: Mapping[str, Any], value_of: Callable[[Source], Any]) -> Any:
        """Return torch's guards of the objects in this process, for which `find` has returned the same text."""
        guards = [
            source.make_guard(_create(kind, args, _anew(named, value_of(source)) if named else named))
            for source, kind, args, named in self.guards
        ]
        tensors = {source: value_of(source) for source, kind, *_ in self.guards if kind == "TENSOR_MATCH"}
        state = OutputGraphGuardsState(
            local_scope=scope["L"],
            global_scope=scope["G"],
            torch_function_mode_stack=_get_current_function_mode_stack(),
            guard_on_key_order=set(self.ordered),
            input_source_to_sizes_strides={
                source: {"size": tensor.size(), "stride": tensor.stride()} for source, tensor in tensors.items()
            },
            dual_level=-1,
            functorch_layers=[],
            current_device=_device.CURRENT_DEVICE,
            global_state_guard=GlobalStateGuard(),
            _guards=GuardsSet(OrderedSet(guards)),
            _aotautograd_guards=[],
            name_of_builtins_dict_key_in_fglobals=self.builtins,
        )
        timed = get_metrics_context(), dynamo_timed("msrun_guards")
        with timed[0], timed[1], config.patch(settings()):
            return CheckFunctionManager(ENTRY, OutputGraphCommon(state)).guard_manager

    def scope(self, call: Arguments) -> dict[str, dict[str, Any]]:
        """Return the names that the guards use: L, the locals of the call, and G, what dynamo has named."""
        return {"L": dict(zip(("function", "args", "kwargs"), call, strict=True)), "G": self.globals()}


@dataclass
class PortableTrace:
    """One call as dynamo traced it, without its graph of torch functions."""

    guards: PortableGuards
    backend_id: str
    environment: Any
    """The Python code around the graph."""
    stores: Stores
    sizes: Sizes
    free: dict[int, tuple[int, list[int]]]
    size_of: dict[int, Place]

    @classmethod
    def of(cls, traced: TracedCall, call: Arguments, known: Mapping[int, str]) -> PortableTrace:
        """Return that of a call that was traced in this process.

        Args:
            known: id of an object -> its name in every process.

        Raises:
            UnportableError: it depends on something of this process alone.
        """
        if traced.output is None:
            raise UnportableError("its trace is that of an earlier call")
        if traced.marked is not None and any(hooks for _, hooks in traced.marked.hooks):
            raise UnportableError("a hook of a module with a strategy")
        guards = PortableGuards.of(traced.output, _code_in(traced.graph))
        with without_reports():
            guards.text = guards.find(reader(guards.scope(call)), known)
        own = {*guards.globals(), traced.backend_id, "__builtins__", "__name__"}
        others = {name: value for name, value in traced.environment.used_globals.items() if name not in own}
        environment = replace(traced.environment, used_globals=others)
        return cls(guards, traced.backend_id, environment, traced.stores, traced.sizes, traced.free, traced.size_of)

    def load(self, call: Arguments, known: Mapping[int, str], marked: Marking) -> TracedCall:
        """Return it for a call of this process.

        Raises:
            UnportableError: the call does not do the same here.
        """
        if any(hooks for _, hooks in marked.hooks):
            raise UnportableError("a hook of a module with a strategy")
        scope = self.guards.scope(call)
        value_of = reader(scope)
        used = {**scope["G"], "__builtins__": builtins, "__name__": __name__, **self.environment.used_globals}
        environment = replace(self.environment, used_globals=used)
        with without_reports():
            if self.guards.find(value_of, known) != self.guards.text:
                raise UnportableError("a guard does not hold")
            built = self.guards.build(scope, value_of)
        graph: Any = None
        return TracedCall(
            graph, [], [], self.stores, environment, self.backend_id, built, self.sizes, self.free, self.size_of, marked
        )


def _parts(guard: Guard) -> tuple[Source, str, tuple[Any, ...], dict[str, Any]]:
    create = guard.create_fn
    if isinstance(create, functools.partial):
        named = {key: None if isinstance(value, TensorWeakRef) else value for key, value in create.keywords.items()}
        return guard.originating_source, guard.create_fn_name(), create.args, named
    return guard.originating_source, guard.create_fn_name(), (), {}


def _create(kind: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    create = getattr(GuardBuilder, kind)
    return functools.partial(create, *args, **named) if args or named else create


def _anew(named: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return a guard's arguments for the tensor that is guarded here."""
    return {
        key: TensorWeakRef(value) if given is None and isinstance(value, torch.Tensor) else given
        for key, given in named.items()
    }


def _text_of_process() -> str:
    """Return the text of what of a process guards speak about.

    Raises:
        UnportableError: it is in the midst of something that no other process is in.
    """
    stacks = len(_get_current_function_mode_stack()), torch._C._functorch.maybe_current_level()
    if stacks != (0, None) or torch.autograd.forward_ad._current_level != -1 or top_saved_tensors_hooks() is not None:
        raise UnportableError("a transform of torch around the call")
    state = [part for part in str(GlobalStateGuard().__getstate__()).split(",") if "num_threads" not in part]
    return f"{state} {_device.CURRENT_DEVICE} {torch.backends.mha.get_fastpath_enabled()}"


def _code_in(graph: fx.GraphModule) -> set[types.CodeType]:
    """Return the code of torch's functions that stand in a graph as they are, and of those that they call beside.

    Raises:
        UnportableError: a function of somebody else stands there.
    """
    found = set[types.CodeType]()
    bodies = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
    todo = [node.target for body in bodies for node in body.nodes if node.op == "call_function"]
    while todo:
        target = todo.pop()
        code = getattr(target, "__code__", None)
        if code is None:
            name = str(getattr(target, "__module__", None)).partition(".")[0]
            if not isinstance(target, torch._ops.OperatorBase) and name not in _FROM_C:
                raise UnportableError(f"{target}, which stands in the graph as it is,")
        elif code.co_filename.startswith(_TORCH):
            beside = [target.__globals__.get(name) for name in code.co_names if code not in found]
            todo += [each for each in beside if getattr(each, "__module__", "") == target.__module__]
            found.add(code)
        elif not code.co_filename.startswith(_OWN):
            raise UnportableError(f"{target.__qualname__}, which stands in the graph as it is,")
    return found


def _find_functions(codes: Iterable[types.CodeType]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return where the functions are that were traced, and what those of torch may call.

    Raises:
        UnportableError: another process could not find one.
    """
    files: dict[Any, list[str]] = {}
    for name, module in list(sys.modules.items()):
        files.setdefault(getattr(module, "__dict__", {}).get("__file__"), []).append(name)
    found, called = set[tuple[str, str]](), set[tuple[str, str]]()
    each_once = {id(code): code for code in codes if not code.co_filename.startswith(_OWN)}  # copies of files are equal
    for code in each_once.values():
        is_of_torch = code.co_filename.startswith(_TORCH)
        try:
            place = _place_of(code, files.get(code.co_filename, []))
        except UnportableError:
            if is_of_torch:
                continue
            raise
        found.add(place)
        if is_of_torch:
            called |= _find_called(code, sys.modules[place[0]])
    return sorted(found), sorted(called)


def _find_called(code: types.CodeType, module: types.ModuleType) -> set[tuple[str, str]]:
    """Return module and name of what a function of a module names: there, and in modules that it names."""
    named = {name: vars(module)[name] for name in code.co_names if name in vars(module)}
    spaces = [module, *(value for value in named.values() if isinstance(value, types.ModuleType))]
    return {
        (space.__name__, name)
        for space in spaces
        for name in code.co_names
        if sys.modules.get(space.__name__) is space and callable(vars(space).get(name))
    }


def _text_of_called(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return text_of(value.__code__)
    return f"{type(value).__qualname__} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}"


def _place_of(code: types.CodeType, modules: Iterable[str]) -> tuple[str, str]:
    """Return module and qualified name of a function in whose code this one stands.

    Args:
        modules: names of those of its file.

    Raises:
        UnportableError: there is none by which another process could find it.
    """
    outer = code.co_qualname.partition(".<locals>")[0]
    for name in modules:
        try:
            if code in _codes(_function(name, outer).__code__):
                return name, outer
        except UnportableError:
            continue
    raise UnportableError(f"code of {code.co_qualname}, which no name in a module leads to")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _function(module: str, name: str) -> types.FunctionType:
    """Return the function of a module that has this qualified name, without what is wrapped around it."""
    is_of_torch = module.partition(".")[0] == "torch"  # some of it is imported where it is traced
    found: Any = importlib.import_module(module) if is_of_torch else sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    if not isinstance(found, types.FunctionType):
        raise UnportableError(f"no function {name} in {module}")
    return found
