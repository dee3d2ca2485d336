"""From dynamo's graph of torch functions to aten operators: the graph that strategies are given to.

Torch functions are run on fake tensors and their operators recorded before autograd and autocast take part, so that
`linear`, `layer_norm` or `cross_entropy_loss` stay one operator. What holds bodies of its own is taken apart here:
checkpointed blocks stand in the graph, marked to be recomputed; custom functions and hooks become operators;
regions of autocast and of gradient modes become notes on operators and `detach`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import CaptureError, ParallelError
from msrun.runtime.capture.dynamo import TracedCall
from msrun.runtime.capture.equal_blocks import REGION, RecordedBlock, block_of, kind_of
from msrun.runtime.capture.marked_calls import MARK
from msrun.runtime.sharding.operators.custom import CustomFunction, hook_as_function, without_gradient_modes
from msrun.runtime.sharding.operators.rule import CHECKPOINT, IS_CAST, user_line

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def unflatten_linears(graph: fx.Graph) -> None:
    """Take out reshapes to two dimensions before a linear layer that are undone behind it."""
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        before, behind = node.args[0], list(node.users)
        shape = _common_shape(behind)
        if before.target not in _RESHAPES or before.meta["val"].dim() != 2 or shape is None or len(shape) < 3:
            continue
        width = before.meta["val"].shape[-1]
        if shape[-1] != node.meta["val"].shape[-1] or math.prod(shape[:-1]) != node.meta["val"].shape[0]:
            continue
        with graph.inserting_before(node):
            leading = graph.call_function(aten.reshape.default, (before.args[0], [*shape[:-1], width]))
        leading.meta = {**before.meta, "val": before.meta["val"].reshape(*shape[:-1], width)}
        node.args = (leading, *node.args[1:])
        node.meta["val"] = behind[0].meta["val"]
        for reader in behind:
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)
        if not before.users:
            graph.erase_node(before)


def _common_shape(nodes: list[fx.Node]) -> list[int] | None:
    """Return the shape that all these nodes reshape to, if that is all they do."""
    shapes = [list(node.meta["val"].shape) if node.target in _RESHAPES else None for node in nodes]
    return shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None


Stack = dict[str, tuple[str, type]]
"""Path -> path and class of every module around an operator, outermost first."""
_STACK = "msrun_stack"
"""node.meta key of dynamo's nn_module_stack, by modules and not by their paths"""
_NOTES = "custom"
"""node.meta key whose value torch copies from a traced node to what it becomes"""
_IS_MARK = "msrun_mark"
"""note of a mark: its numbers"""
_WITHOUT = "a form without it (x / x.max() for x / x.max().item(), torch.where for a choice by values)"
_LONGEST = 200
"""Characters of an error of torch's"""
_higher = torch.ops.higher_order
_autocast = torch.amp.autocast_mode
_inference_mode = torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode


def trace_aten(traced: TracedCall, root: nn.Module, symbols: ShapeEnv | None = None) -> fx.GraphModule:
    """Return the same graph of aten operators; `nn_module_stack` holds paths in `root`, functions their objects.

    Args:
        symbols: gets one for every free size, in arguments and shapes of the operators; None: these are numbers.
    """
    paths = {str(id(module)): (path, type(module)) for path, module in root.named_modules()}
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)
    mode.cache_enabled &= symbols is None  # as in dynamo
    tensors = {index: value for index, value in enumerate(traced.inputs) if isinstance(value, Tensor)}
    samples = [_sample(mode, value, *traced.free.get(index, (0, ()))) for index, value in tensors.items()]
    interpreter = _Interpreter(traced.graph, paths)

    def run(*values: Tensor) -> list[Any]:
        found = dict(zip(tensors, values, strict=True))
        given = [found.get(index, value) for index, value in enumerate(traced.inputs)]
        for index, value in enumerate(given if symbols is not None else ()):
            if not isinstance(value, Tensor):
                place, dimension = traced.size_of[index]
                given[index] = found[place].shape[dimension]
        parameters = [index for index, value in tensors.items() if isinstance(value, nn.Parameter)]
        return interpreter.run_flat(parameters, *given)

    try:
        with mode, torch.enable_grad(), fx_traceback.preserve_node_meta():
            module = make_fx(
                run,
                tracing_mode="fake" if symbols is None else "symbolic",
                pre_dispatch=True,
                _allow_non_fake_inputs=True,
            )(*samples)
    except ParallelError:
        raise
    except Exception as error:  # torch's, in its own words; of the user's code only its operators run here
        raise interpreter.explain(error) from error
    for node in reversed(module.graph.nodes):  # regions of autocast are notes on operators
        if node.target in (_autocast._enter_autocast, _autocast._exit_autocast):
            module.graph.erase_node(node)
    _put_sizes(module.graph)
    module.meta["functions"] = interpreter.functions  # operators name them by number alone
    for node in module.graph.nodes:
        node.meta |= node.meta.pop(_NOTES, None) or {}
        if _IS_MARK in node.meta:
            node.target, node.args = MARK, (node.args[0], *node.meta.pop(_IS_MARK))
    return module


def _sample(mode: FakeTensorMode, value: Tensor, number: int, free: Sequence[int]) -> Tensor:
    if mode.shape_env is None or not free:
        return mode.from_tensor(value, static_shapes=True)
    kinds = [DimDynamic.DYNAMIC if dimension in free else DimDynamic.STATIC for dimension in range(value.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(str(number)))


def _put_sizes(graph: fx.Graph) -> None:
    """Write sizes where they are read, in place of operators that make them."""
    made = [node for node in graph.nodes if isinstance(node.meta.get("val"), _NUMBERS)]
    numbers = {node: node.meta["val"] for node in made}
    for node in graph.nodes:
        if node not in numbers and not numbers.keys().isdisjoint(node.all_input_nodes):
            if node.op == "output":
                raise CaptureError("a result is a size")
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
    for node in reversed(made):
        graph.erase_node(node)


def _moved(path: str, stack: Stack) -> Callable[[Stack], Stack]:
    """Return what makes of the modules around an operator in the block at a path those in another block.

    Args:
        stack: the other block, and the modules around it.
    """

    def moved(around: Stack) -> Stack:
        inside = [(name.removeprefix(path), kind) for name, kind in around.values() if name.startswith(f"{path}.")]
        named = [(next(reversed(stack)) + name, kind) for name, kind in inside]
        return stack | {name: (name, kind) for name, kind in named}

    return moved


class _Interpreter(fx.Interpreter):
    """Runs dynamo's graph on fake tensors while make_fx records."""

    def __init__(
        self, module: fx.GraphModule, paths: Mapping[str, tuple[str, type]], outer: _Interpreter | None = None
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self._paths = paths
        self._parameters: set[int] = outer._parameters if outer else set()
        self._is_grad_enabled: bool = outer._is_grad_enabled if outer else True
        self._autocasts: list[tuple[torch.autocast, Any]] = []
        self._inference: list[bool] = []
        """whether gradients were recorded before each region of inference mode that is open"""
        self._node: fx.Node | None = None
        self._notes: dict[str, Any] = dict(outer._notes) if outer else {}
        self._counter: list[int] = outer._counter if outer else [0]
        self.functions: list[CustomFunction] = outer.functions if outer else []
        self._blocks: dict[Any, RecordedBlock] = outer._blocks if outer else {}
        self._moved: Callable[[Stack], Stack] = outer._moved if outer else dict
        """modules of the block that was traced -> those of the one that runs"""

    def run_flat(self, parameters: Sequence[int], *values: Any) -> list[Any]:
        """Run, and return the results as a list; `parameters` are the indexes of those among the values."""
        self._parameters = {id(values[index]) for index in parameters}
        result = self.run(*values)
        return list(result) if isinstance(result, tuple | list) else [result]

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; its notes go to what is recorded for it."""
        stack = n.meta.setdefault(_STACK, n.meta.get("nn_module_stack") or {})
        known = [self._paths[key.partition("@")[0]] for key in stack if key.partition("@")[0] in self._paths]
        n.meta["nn_module_stack"] = self._moved({path: (path, kind) for path, kind in known})
        n.meta[_NOTES] = dict(self._notes)
        if n.target is MARK:
            n.meta[_NOTES][_IS_MARK] = n.args[1:]
        self._node = n
        for value in pytree.tree_leaves(n.meta.get("example_value")):
            if isinstance(value, (*_NUMBERS, Tensor)) and free_unbacked_symbols(value):
                what = "tensor whose size depends on" if isinstance(value, Tensor) else "Python number from a tensor's"
                raise self._refusal(_name(n.target), f"makes a {what} values")
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, or open what has a body."""
        if target is torch._C._set_grad_enabled:
            self._is_grad_enabled = args[0]
            return None
        if target is _autocast._enter_autocast:
            return self._enter_autocast(*args)
        if target is _autocast._exit_autocast:
            return self._exit_autocast()
        if target in (torch.autograd.grad, torch.autograd.backward):
            raise self._refusal("torch.autograd.grad", "takes gradients inside the forward pass")
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(target, args, kwargs)
        if target is _inference_mode[0]:
            self._inference.append(self._is_grad_enabled)
            self._is_grad_enabled &= not args[0]
            return None
        if target is _inference_mode[1]:
            self._is_grad_enabled = self._inference.pop()
            return None
        if target is torch._C._log_api_usage_once:
            return None
        if not _is_operator(target):
            raise self._refusal(*_no_operator(target))
        if target is MARK:  # shows the memory of what it marks, so that no write into it is lost when it is taken out
            target, args = torch.ops.aten.alias.default, args[:1]
        return self._checked(target, super().call_function, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of a tensor."""
        return self._checked(target, super().call_method, args, kwargs)

    def _checked(self, target: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_grad_enabled:
            name = _name(target)
            first = args[0] if args else None
            writes = (name.endswith("_") and not name.endswith("__")) or name == "setitem" or kwargs.get("inplace")
            if writes and isinstance(first, Tensor) and first.requires_grad:
                raise self._refusal(
                    name, "writes under no_grad into a tensor that has a gradient, which would keep its old gradient"
                )
            args, kwargs = pytree.tree_map_only(Tensor, _without_gradient, (args, kwargs))
        return call(target, args, kwargs)

    def _refusal(self, name: str, what: str, instead: str = _WITHOUT) -> CaptureError:
        return CaptureError(
            f"{name} {what}, which one graph for all ranks cannot hold: use {instead}, or "
            'parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows',
            where=self._line(),
        )

    def explain(self, error: Exception) -> CaptureError:
        """Say of an error of torch's where it was met."""
        text = " ".join(str(error).split())
        name = "an operator" if self._node is None else _name(self._node.target)
        return self._refusal(name, f"raises {type(error).__name__} ({text[:_LONGEST]})")

    def _line(self) -> str:
        """Return the user's line of the node that runs; what enters a context has none, what stands in it does."""
        node = self._node
        while node is not None and node.op != "root":
            if line := user_line(node):
                return line
            node = node.next
        return ""

    # -- autocast -----------------------------------------------------------------------------------------------

    def _enter_autocast(self, device: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None) -> None:
        region = torch.autocast(device, dtype, enabled, cache)
        region.__enter__()
        self._autocasts.append((region, self._notes.get(AUTOCAST_REGION, ...)))
        self._notes[AUTOCAST_REGION] = (dtype or torch.get_autocast_dtype(device)) if enabled else None

    def _exit_autocast(self) -> None:
        region, before = self._autocasts.pop()
        region.__exit__(None, None, None)
        if before is ...:
            del self._notes[AUTOCAST_REGION]
        else:
            self._notes[AUTOCAST_REGION] = before

    # -- bodies -------------------------------------------------------------------------------------------------

    def _higher_order(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _higher.tag_activation_checkpoint:
            return self._checkpointed(args, kwargs)
        if target is _higher.autograd_function_apply:
            forward, backward, *given = args
            if kwargs.get("dirty_idx"):
                raise self._refusal("a custom autograd Function", "writes into its inputs (mark_dirty)")
            function = CustomFunction(
                "custom autograd Function",
                without_gradient_modes(forward),
                without_gradient_modes(backward),
                frozenset(kwargs["non_differentiable_idx"]),
            )
            return tuple(self._apply(function, given))
        if target.name() == "register_hook":
            tensor, body, *freevars = args
            return self._apply(hook_as_function(body, len(freevars)), [tensor, *freevars])[0]
        if target is REGION:
            body, _, *given = args
            return self._block(body, given)
        if target is _higher.wrap:
            body, *given = args
            return self._body(body, given)
        raise self._refusal(target.name(), "holds operators that a captured graph does not show")

    def _apply(self, function: CustomFunction, given: Sequence[Any]) -> list[Tensor]:
        if not all(isinstance(value, Tensor) for value in given):
            raise self._refusal(function.name, "is given something that is no tensor")
        self.functions.append(function)
        if not self._is_grad_enabled:
            given = [_without_gradient(value) for value in given]
        results: list[Tensor] = torch.ops.msrun.custom_function(list(given), function.number)
        return [r.detach() if index in function.fixed else r for index, r in enumerate(results)]

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body, *given = args
        computed = [value for value in given if isinstance(value, Tensor) and id(value) not in self._parameters]
        if kwargs.get("use_reentrant") and self._is_grad_enabled and not any(v.requires_grad for v in computed):
            raise self._refusal(
                "checkpoint(use_reentrant=True)",
                "has no input with a gradient, so that torch would train nothing in it (use_reentrant=False does)",
            )
        is_outermost = CHECKPOINT not in self._notes
        if is_outermost:
            self._counter[0] += 1
            self._notes[CHECKPOINT] = self._counter[0]
        try:
            return self._body(body, given)
        finally:
            if is_outermost:
                del self._notes[CHECKPOINT]

    def _block(self, body: fx.GraphModule, given: Sequence[Any]) -> list[Any]:
        """Run one of several equal blocks, or repeat what another one has recorded."""
        assert self._node is not None, "a node runs"
        stack: Stack = self._node.meta["nn_module_stack"]
        inner = _Interpreter(body, self._paths, self)
        inner._moved = _moved(self._paths[block_of(body)][0], stack)
        key = id(body), self._is_grad_enabled, str(self._notes), *map(kind_of, given)
        if key not in self._blocks:
            recorded = RecordedBlock(next(reversed(stack)), given, lambda: inner.run(*given))
            self._blocks[key] = recorded
            return recorded.results
        recorded, numbers = self._blocks[key], dict[int, int]()
        moved = _moved(recorded.path, stack)

        def meta_of(node: fx.Node) -> dict[str, Any]:
            notes = dict(node.meta.get(_NOTES) or {})
            if CHECKPOINT in notes:
                if notes[CHECKPOINT] not in numbers:
                    self._counter[0] += 1
                    numbers[notes[CHECKPOINT]] = self._counter[0]
                notes[CHECKPOINT] = numbers[notes[CHECKPOINT]]
            return {**node.meta, "nn_module_stack": moved(node.meta.get("nn_module_stack", {})), _NOTES: notes}

        return recorded.again(given, meta_of) or list(inner.run(*given))

    def _body(self, body: fx.GraphModule, given: Sequence[Any]) -> Any:
        return _Interpreter(body, self._paths, self).run(*given)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPERATORS = frozenset(
    {
        "_operator",
        "builtins",
        "math",
        "torch",
        "torch._C._fft",
        "torch._C._linalg",
        "torch._C._nested",
        "torch._C._nn",
        "torch._C._sparse",
        "torch._C._special",
        "torch._dynamo.utils",  # numpy's functions, as torch has them
        "torch._linalg_utils",
        "torch._lowrank",
        "torch._numpy",
        "torch.functional",
        "torch.masked._ops",
        "torch.nn._reduction",
        "torch.nn.attention",  # which choose among kernels
        "torch.nn.functional",
        "torch.nn.init",
        "torch.nn.modules.activation",
        "torch.nn.modules.utils",
        "torch.signal.windows.windows",
        "torch.sparse",
    }
)
"""Modules whose functions compute tensors from tensors and do nothing else."""


def _is_operator(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return "c10d" not in str(target)
    module = str(getattr(target, "__module__", None) or "torch")  # slots of tensors have none
    return module in _OPERATORS or module.partition(".")[0] != "torch"


def _no_operator(target: Any) -> tuple[str, str, str]:
    """Return the name of something that is no operator, as the user knows it, what it does, and what to use instead."""
    where = f"{getattr(target, '__module__', '')} {_name(target)} {target}"
    if any(part in where for part in ("functorch", "forward_ad", "fwd_grad", "_saved_tensors_hooks_disable")):
        what = "changes what the operators inside it mean"
        return "torch.vmap or another transform of torch.func", what, "operators on the whole batch"
    if "distributed" in where or "c10d" in where:
        what = "sends what each rank has, in a network that is one for all ranks"
        return f"torch.distributed ({_name(target)})", what, "the values themselves, which are those of the whole batch"
    return _name(target), "is none of the operators that msrun knows", "operators of torch"


def _name(target: Any) -> str:
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    return name.removeprefix("wrapped_")  # numpy's, as dynamo calls them


def _without_gradient(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


_KEYS = {"npu": "AutocastPrivateUse1"}
"""torch's dispatch key of autocast, where it is not called like the device"""
AUTOCAST_REGION = "autocast_region"
"""node.meta key: dtype of the network's own autocast around an operator, None where it is switched off."""
Policy = Literal["lower", "float32", "widest", "inside", "as it comes"]


def apply_autocast(graph: fx.Graph, parameters: Mapping[str, str], device: str, dtype: torch.dtype | None) -> None:
    """Write the casts of autocast into a captured graph.

    Args:
        parameters: placeholder name -> parameter name.
        device: kind of device that computes; autocast has rules for each.
        dtype: the lower precision of the whole network; None: only where the network says so itself.
    """
    if dtype is None and not any(AUTOCAST_REGION in node.meta for node in graph.nodes):
        return
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        lower = node.meta.get(AUTOCAST_REGION, dtype)
        if lower is not None and isinstance(node.target, torch._ops.OpOverload):
            policy = _policy(node, device, lower)
            if policy == "inside":
                node.target = _under_autocast(node.target, device, lower)
            _cast_inputs(graph, node, _wanted(node, policy, lower), casts)
        node.meta["val"] = _run(node.target, node)
    _fold(graph, parameters)


@functools.cache
def _under_autocast(target: Callable[..., Any], device: str, lower: torch.dtype) -> Callable[..., Any]:
    """Return the operator with the casts that autocast makes between the operators that torch makes of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, lower):
            return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = str(target).replace(".", "_")
    return call


def _wanted(node: fx.Node, policy: Policy, lower: torch.dtype) -> torch.dtype | None:
    """Return the type in which autocast hands an operator its inputs; None where it leaves them alone."""
    if policy == "lower":
        return lower
    if policy == "float32":
        return torch.float32
    types = {n.meta["val"].dtype for n in node.all_input_nodes if _is_float(n.meta.get("val"))}
    return torch.float32 if policy == "widest" and len(types) > 1 and torch.float64 not in types else None


def _policy(node: fx.Node, device: str, lower: torch.dtype) -> Policy:
    args = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)

    def result(given: torch.dtype, is_on: bool) -> torch.dtype | None:
        of_type = pytree.tree_map_only(Tensor, lambda x: x.to(given) if _is_float(x) else x, args)
        with torch.autocast(device, lower, enabled=is_on):
            return _float_type(_try(target, of_type))

    with torch.no_grad():
        if result(torch.float32, is_on=True) == lower != result(torch.float32, is_on=False):
            return "lower"
        if result(lower, is_on=True) == torch.float32 != result(lower, is_on=False):
            return "float32"
        has_rule = torch._C._dispatch_has_kernel_for_dispatch_key(
            target.name(), _KEYS.get(device, f"Autocast{device.upper()}")
        )
        if not has_rule and _casts_inside(target, args, device, lower):
            return "inside"
        with torch.autocast(device, enabled=False):
            return "widest" if has_rule or _try(target, args) is None else "as it comes"


class _Casts(TorchDispatchMode):
    """Notices whether something is cast to a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen = False
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= func is torch.ops.aten._to_copy.default and result.dtype == self._dtype
        return result


def _casts_inside(target: torch._ops.OpOverload, args: Any, device: str, lower: torch.dtype) -> bool:
    """Return whether an operator is made of others, of which autocast casts some."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return False
    of_float32 = pytree.tree_map_only(Tensor, lambda x: x.float() if _is_float(x) else x, args)
    with torch.autocast(device, lower), _Casts(lower) as casts:
        _try(target, of_float32)
    return casts.seen


def _try(target: Callable[..., Any], args: Any) -> Any:
    try:
        return target(*args[0], **args[1])
    except RuntimeError:  # it does not take inputs of such types
        return None


def _float_type(value: Any) -> torch.dtype | None:
    return next((x.dtype for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()), None)


def _is_float(value: Any) -> bool:
    """Return whether autocast looks at a value: it leaves integers and float64 alone."""
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _cast_inputs(
    graph: fx.Graph,
    node: fx.Node,
    wanted: torch.dtype | None,
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> None:
    if wanted is None:
        return

    def cast(given: fx.Node) -> fx.Node:
        value = given.meta.get("val")
        if not isinstance(value, Tensor) or not _is_float(value) or value.dtype == wanted:
            return given
        if (given, wanted) not in casts:
            with graph.inserting_after(given if given.op != "placeholder" else _last_placeholder(graph)):
                made = graph.call_function(torch.ops.aten.to.dtype, (given, wanted))
            made.meta |= {"val": value.to(wanted), IS_CAST: True}
            casts[given, wanted] = made
        return casts[given, wanted]

    node.args = fx.node.map_arg(node.args, cast)
    node.kwargs = fx.node.map_arg(node.kwargs, cast)


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "placeholder")


def _run(target: Any, node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        return target(*args, **kwargs)


def _fold(graph: fx.Graph, parameters: Mapping[str, str]) -> None:
    """Let a parameter that is only read through casts to one type arrive in it; a tied one has several placeholders."""
    placeholders: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in parameters:
            placeholders.setdefault(parameters[node.name], []).append(node)
    for tied in placeholders.values():
        casts = [reader for node in tied for reader in node.users]
        types = {_type_of_cast(reader) for reader in casts}
        if len(types) != 1 or None in types:
            continue
        for node in tied:
            node.meta["val"] = casts[0].meta["val"]
        for cast in casts:
            cast.replace_all_uses_with(cast.all_input_nodes[0])
            graph.erase_node(cast)


def _type_of_cast(node: fx.Node) -> torch.dtype | None:
    """Return the type that an operator casts to; None when it does anything else."""
    is_cast = node.target is torch.ops.aten.to.dtype and len(node.args) == 2 and not node.kwargs
    return node.meta["val"].dtype if is_cast else None
