"""Functions of functions: gradients, maps over trees, functions of several types, jit; and norms of several tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.mindspore.ops.table import define_all, refuse_unknown, taking
from msrun.mindspore.parallel import in_context
from msrun.runtime import value_and_grad as _value_and_grad

JIT = """
JitConfig constexpr jit jit_class lazy_inline ms_class ms_function ms_memory_recycle mutable no_inline
"""
"""Marks of functions and values for MindSpore's compiler; AutoParallel captures what it is given without them."""
__all__ = [
    "GradOperation", "HyperMap", "Map", "MultitypeFuncGraph", "clip_by_global_norm", "clip_by_norm", "grad", "jvp",
    "value_and_grad", "vjp", *JIT.split(),
]  # fmt: skip
_OF_JIT = (
    *("mode", "input_signature", "hash_args", "jit_config", "compile_once", "capture_mode", "jit_level", "dynamic"),
    *("fullgraph", "backend", "options", "infer_boost", "exc_mode", "jit_syntax_level", "debug_level"),
)


def jit(fn: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Return the function as it is; `@jit` and `@jit(...)` both work.

    Raises:
        UsageError: not a function, or an unknown setting.
    """
    refuse_unknown("jit", settings, _OF_JIT)
    if fn is None:
        return lambda function: jit(function)
    if not callable(fn):
        raise UsageError(f"jit({fn!r}): decorate a function with it")
    return fn


ms_function = jit


class JitConfig:
    """Settings of MindSpore's compiler, kept for whoever reads them."""

    def __init__(
        self, jit_level: str = "", exc_mode: str = "auto", jit_syntax_level: str = "", **settings: Any
    ) -> None:
        self.jit_config_dict = {"jit_level": jit_level, "exc_mode": exc_mode, "jit_syntax_level": jit_syntax_level}
        self.jit_config_dict.update(settings)


def as_it_is(target: Any = None, **settings: Any) -> Any:
    """Return what it decorates: MindSpore's compiler alone needs the mark."""
    return target if target is not None else lambda one: one


jit_class = ms_class = ms_memory_recycle = lazy_inline = no_inline = constexpr = as_it_is


def mutable(input_data: Any, dynamic_len: bool = False) -> Any:
    """Return the value: all values may change here."""
    return input_data


def _kept(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Keep the last steps that were made: one that is made anew for a function at every call is captured once."""
    made = functools.lru_cache(maxsize=8)(make)
    return lambda fn, *more: (made if isinstance(fn, Hashable) else make)(fn, *more)


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Iterable[Tensor] | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`msrun.runtime.value_and_grad`, run by AutoParallel where the context asks for it and there are weights.

    The gradients of a result of several elements are those of their sum, as in MindSpore.
    """
    if weights is None:
        return _of_inputs(fn, grad_position, has_aux)
    return _weights_step(fn, grad_position, tuple(weights), has_aux)


def _of_inputs(
    fn: Callable[..., Any], grad_position: int | tuple[int, ...] | None, has_aux: bool
) -> Callable[..., tuple[Any, Any]]:
    """Return `value_and_grad` of inputs, which another one around it can differentiate again."""
    places = (grad_position,) if isinstance(grad_position, int) else grad_position or ()

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        wanted = [args[place] for place in places]
        if not any(one.requires_grad and not isinstance(one, nn.Parameter) for one in wanted):
            return _of_sum(fn, grad_position, None, has_aux)(*args, **kwargs)
        result = fn(*args, **kwargs)
        loss = _total(result[0] if has_aux else result)
        found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True, materialize_grads=True)
        return result, found[0] if isinstance(grad_position, int) else found

    return run


@_kept
def _weights_step(fn: Any, grad_position: Any, weights: tuple[Tensor, ...], has_aux: bool) -> Callable[..., Any]:
    return in_context(_of_sum(fn, grad_position, weights, has_aux), fn)


def with_sum(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """Return a function that gives what is differentiated, the sum of all elements of the loss, and what `fn` returns.

    Args:
        has_aux: the loss is the first of several results.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = fn(*args, **kwargs)
        return _total(result[0] if has_aux else result), result

    return run


def _of_sum(fn: Callable[..., Any], grad_position: Any, weights: Any, has_aux: bool) -> Callable[..., tuple[Any, Any]]:
    """Return `value_and_grad` of the sum of the elements of what `fn` returns."""

    step = _value_and_grad(with_sum(fn, has_aux), grad_position, weights, has_aux=True)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        (_, result), gradients = step(*args, **kwargs)
        return result, gradients

    return run


def grad(
    fn: Callable[..., Any], grad_position: int | tuple[int, ...] | None = 0, weights: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that gives the gradients of `fn`; see `value_and_grad`."""
    single = isinstance(weights, Tensor)
    with_value = value_and_grad(fn, grad_position, [weights] if single else weights, has_aux)

    def run(*args: Any, **kwargs: Any) -> Any:
        result, gradients = with_value(*args, **kwargs)
        if single:
            gradients = (gradients[0], gradients[1][0]) if grad_position is not None else gradients[0]
        return (gradients, tuple(result[1:])) if has_aux else gradients

    return run


def _total(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return functools.reduce(torch.add, map(_total, result))
    return result.sum() if result.dim() else result


class GradOperation:
    """`GradOperation(get_all, get_by_list, sens_param)(fn, weights)(*inputs)` gives the gradients of `fn`.

    Args:
        get_all: of all inputs; else of the first one.
        get_by_list: of the weights.
        sens_param: the last input is the gradient of the result.
    """

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, fn: Callable[..., Any], weights: Iterable[Tensor] | None = None) -> Callable[..., Any]:
        step = self.with_value(fn, weights)
        return lambda *inputs: step(*inputs)[1]

    def with_value(self, fn: Callable[..., Any], weights: Iterable[Tensor] | None = None) -> Callable[..., Any]:
        """Return a function that gives what `fn` returns, and the gradients."""
        if not self.get_by_list:
            return _gradient_step(fn, None, self.get_all, self.sens_param)
        if weights is None:
            if not isinstance(fn, nn.Module):
                raise UsageError("GradOperation(get_by_list=True)(fn): give the weights; fn is no cell")
            weights = [parameter for parameter in fn.parameters() if parameter.requires_grad]
        return _gradient_step(fn, tuple(weights), self.get_all, self.sens_param)


@_kept
def _gradient_step(
    fn: Any, weights: tuple[Tensor, ...] | None, get_all: bool, has_sens: bool
) -> Callable[..., tuple[Any, Any]]:
    def step(*inputs: Any) -> tuple[Any, Any]:
        inputs, sens = (inputs[:-1], inputs[-1]) if has_sens else (inputs, None)
        places = tuple(i for i, one in enumerate(inputs) if isinstance(one, Tensor) and one.is_floating_point())
        wanted: Any = places if get_all else 0 if weights is None else None
        if sens is None:
            found = _of_sum(fn, wanted, weights, False) if weights else _of_inputs(fn, wanted, False)
            return found(*inputs)
        weighted = _weighted(fn, sens)
        found = _value_and_grad(weighted, wanted, weights, True) if weights else _of_inputs(weighted, wanted, True)
        (_, result), gradients = found(*inputs)
        return result, gradients

    return step if weights is None else in_context(step, fn)


def _weighted(fn: Callable[..., Any], sens: Any) -> Callable[..., Any]:
    """Return a function that gives the sum of all elements, each times its gradient `sens`, and what `fn` returns."""

    def run(*args: Any) -> tuple[Any, Any]:
        result = fn(*args)
        results = result if isinstance(result, list | tuple) else (result,)
        factors = sens if isinstance(sens, list | tuple) else (sens,)
        return _total([one * factor for one, factor in zip(results, factors, strict=True)]), result

    return run


class MultitypeFuncGraph:
    """One name for several functions, chosen by the types of what they are called with.

    `@graph.register("Tensor", "Number")` adds one; the words are Tensor, Number, Bool, Int, Float, String, Tuple, List,
    None, Function and RowTensor.

    Raises:
        UsageError: an unknown word, or a call with types that none was registered for.
    """

    def __init__(self, name: str, read_value: bool = False) -> None:
        self.name = name
        self._entries: list[tuple[tuple[Any, ...], Callable[..., Any]]] = []

    def register(self, *type_names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the function that follows, for arguments of these types."""
        for word in type_names:
            if isinstance(word, str) and word not in _TYPES:
                raise UsageError(f"{self.name}.register({word!r}): one of {', '.join(_TYPES)}")

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self._entries.append((type_names, function))
            return function

        return add

    def __call__(self, *args: Any) -> Any:
        for words, function in reversed(self._entries):
            if len(words) == len(args) and all(map(_is_of, args, words)):
                return function(*args)
        kinds = ", ".join(type(one).__name__ for one in args)
        raise UsageError(f"{self.name}({kinds}): no function is registered for these types; add one with register")


_TYPES: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: isinstance(value, Tensor),
    "Number": lambda value: isinstance(value, int | float | np.number) and not isinstance(value, bool),
    "Bool": lambda value: isinstance(value, bool),
    "Int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "Float": lambda value: isinstance(value, float),
    "String": lambda value: isinstance(value, str),
    "Tuple": lambda value: isinstance(value, tuple),
    "List": lambda value: isinstance(value, list),
    "Dictionary": lambda value: isinstance(value, dict),
    "None": lambda value: value is None,
    "NoneType": lambda value: value is None,
    "Function": callable,
    "RowTensor": lambda value: isinstance(value, Tensor) and value.is_sparse,
}


def _is_of(value: Any, word: Any) -> bool:
    return _TYPES[word](value) if isinstance(word, str) else isinstance(value, Tensor) and value.dtype == word


class HyperMap:
    """`HyperMap()(fn, *trees)` or `HyperMap(fn)(*trees)`: a function of each set of leaves of equal lists and tuples.

    Args:
        reverse: call it for the last leaves first.
    """

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        self._function, self._reverse = ops, reverse

    def __call__(self, *args: Any) -> Any:
        function, trees = (args[0], args[1:]) if self._function is None else (self._function, args)
        return _mapped(function, trees, self._reverse)


Map = HyperMap


def _mapped(function: Callable[..., Any], trees: Sequence[Any], reverse: bool) -> Any:
    if not isinstance(trees[0], list | tuple):
        return function(*trees)
    rows = list(zip(*trees, strict=True))
    found = [_mapped(function, row, reverse) for row in (reversed(rows) if reverse else rows)]
    return tuple(reversed(found)) if reverse else tuple(found)


def print_(*inputs: Any) -> None:
    """Print tensors as MindSpore does. In a network that AutoParallel captures nothing is printed."""
    if not torch.compiler.is_compiling():
        sys.stdout.write("\n".join(str(one) for one in inputs) + "\n")


def clip_by_global_norm(x: Sequence[Tensor], clip_norm: float = 1.0, use_norm: Any = None) -> tuple[Tensor, ...]:
    """Return tensors scaled so that their common norm is `clip_norm` at most."""
    if use_norm is not None:
        raise UsageError("clip_by_global_norm(use_norm=...): None; divide the tensors by hand")
    norm = torch.stack([one.float().square().sum() for one in x]).sum().sqrt()
    factor = clip_norm / torch.clamp(norm, min=clip_norm)
    return tuple(one * factor.to(one.dtype) for one in x)


def clip_by_norm(x: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """Return a tensor, or tensors of a common norm, scaled so that the norm is `max_norm` at most."""
    tensors = [x] if isinstance(x, Tensor) else list(x)
    norm = torch.stack([one.norm(norm_type) for one in tensors]).norm(norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"clip_by_norm: the norm is {float(norm)}; a gradient overflowed")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scaled = [one * factor for one in tensors]
    return scaled[0] if isinstance(x, Tensor) else type(x)(scaled)


def jvp(fn: Callable[..., Any], inputs: Any, v: Any, has_aux: bool = False) -> Any:
    """Return what `fn` gives for inputs, and the product of its Jacobian with `v`."""
    many = isinstance(inputs, tuple | list)
    given, vectors = (tuple(inputs), tuple(v)) if many else ((inputs,), (v,))
    return torch.func.jvp(fn, given, vectors, has_aux=has_aux)


def vjp(fn: Callable[..., Any], *inputs: Any, weights: Any = None, has_aux: bool = False) -> Any:
    """Return what `fn` gives for inputs, and a function of a vector: its product with the Jacobian."""
    if weights is not None:
        raise UsageError("vjp(weights=...): GradOperation(get_by_list=True, sens_param=True) takes weights")
    value, product, *aux = torch.func.vjp(fn, *inputs, has_aux=has_aux)
    return value, lambda *v: products[0] if len(products := product(*v)) == 1 else products, *aux


OPERATORS = define_all((
    ("Depend depend", lambda value, expr: value),
    ("Print print_", print_),
    ("is_tensor", lambda obj: isinstance(obj, Tensor)),
    ("deepcopy", lambda input_x: input_x.clone()),
    ("Partial partial", functools.partial),
    ("vmap", taking("fn>func in_axes>in_dims=0 out_axes>out_dims=0", torch.vmap)),
    ("jacrev", taking("fn>func grad_position>argnums=0 has_aux=False", torch.func.jacrev)),
    ("jacfwd", taking("fn>func grad_position>argnums=0 has_aux=False", torch.func.jacfwd)),
))  # fmt: skip
