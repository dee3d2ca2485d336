"""From dynamo's graph of torch functions to aten operators: the graph that strategies are given to.

Torch functions are run on fake tensors and their operators recorded before autograd and autocast take part, so that
`linear`, `layer_norm` or `cross_entropy_loss` stay one operator. What holds bodies of its own is taken apart here:
checkpointed blocks stand in the graph, marked to be recomputed; custom functions and hooks become operators;
regions of autocast and of gradient modes become notes on operators and `detach`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_unbacked_symbols
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, ParallelError
from msrun.runtime.capture.autocast import AUTOCAST_REGION
from msrun.runtime.capture.dynamo import TracedCall
from msrun.runtime.capture.equal_blocks import REGION, RecordedBlock, block_of, kind_of
from msrun.runtime.capture.marked_calls import MARK
from msrun.runtime.sharding.operators.custom import CustomFunction, hook_as_function, without_gradient_modes
from msrun.runtime.sharding.operators.rule import CHECKPOINT, user_line

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
