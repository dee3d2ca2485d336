"""shard: say how a module, a function or an operator is cut, in MindSpore's tuples or with named axes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.capture.marked_calls import MarkedFunction, call_marked
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.sharding.strategies import Entry, OperatorStrategy

_ATTRIBUTE = "_msrun_strategy"
_EXAMPLE = "give one tuple of whole numbers above 0 for each input, e.g. ((1, 1), (8, 1))"

GivenEntry = Sequence[int] | Layout | None
Given = Sequence[GivenEntry] | Layout | None
Sharded = TypeVar("Sharded", bound=Callable[..., Any])


@overload
def shard(
    target: Sharded,
    in_strategy: Given = None,
    out_strategy: Given = None,
    parameter_plan: Mapping[str, Sequence[int] | Layout] | None = None,
) -> Sharded: ...
@overload
def shard(
    target: None = None,
    in_strategy: Given = None,
    out_strategy: Given = None,
    parameter_plan: Mapping[str, Sequence[int] | Layout] | None = None,
) -> Callable[[Sharded], Sharded]: ...
def shard(
    target: Any = None,
    in_strategy: Given = None,
    out_strategy: Given = None,
    parameter_plan: Mapping[str, Sequence[int] | Layout] | None = None,
) -> Any:
    """Cut a module, a function or a torch operator; takes effect when AutoParallel captures the network.

    A tuple holds one number of parts per dimension, a `Layout` the names of mesh axes; one call takes tuples only or
    Layouts only.

    - One operator, called by a module (`shard(net.layer1, ((1, 1), (8, 1)))` cuts the weight (out, in) of a linear
      layer by its outputs) or given itself (`matmul = shard(torch.matmul, ((2, 4), (4, 1)))`): one tuple per tensor
      input of the operator, parameters after the module's inputs; a bias follows its weight.
    - Several operators: one tuple per tensor that the module or function is called with. Operators inside keep what
      their inputs and parameters bring; `parameter_plan` says how parameters are stored.
    - `out_strategy` is one tuple per result, and is obeyed: matmul ((A, B), (B, C)) gives (A, C) by an all-reduce, and
      with out_strategy ((A * B, C),) by a reduce-scatter.

    Without a first argument it is a decorator: `@shard(in_strategy=((8, 1), (1, 1)))`.

    Args:
        in_strategy: None for an input that is left as it comes.
        parameter_plan: name of a parameter inside the module, or inside the modules that the function uses -> tuple.
            Names that do not exist are warned about.

    Returns:
        The module itself; for a function or operator one that is called in its place.

    Raises:
        StrategyError: not tuples of whole numbers above 0 or Layouts, or both mixed. Whether the operator allows them
            is checked at capture.
    """
    if marked_calls.MSRUN_CAPTURING:
        raise RuntimeError("shard is called while the network runs: call it once, before the first step")
    if target is None:
        return lambda function: shard(function, in_strategy, out_strategy, parameter_plan)
    if not callable(target) or isinstance(target, type):
        raise StrategyError(f"shard({target!r}): a torch module is expected, or a function or operator")
    inputs, outputs = _entries(in_strategy), _entries(out_strategy, is_result=True)
    plan = {name: _entry(entry, entry) for name, entry in (parameter_plan or {}).items()}
    if not (inputs or outputs or plan):
        raise StrategyError(f"strategy {in_strategy!r}: {_EXAMPLE}, an out_strategy or a parameter_plan")
    kinds = {isinstance(entry, Layout) for entry in (*inputs, *outputs, *plan.values()) if entry is not None}
    if len(kinds) > 1:
        raise StrategyError("shard: tuples and Layouts in one call; give all of them as tuples or all as Layouts")
    strategy = OperatorStrategy(inputs, outputs, _parameters(target, plan))
    if isinstance(target, nn.Module):
        give_strategy(target, strategy)
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or repr(target)
    marked = MarkedFunction(name, strategy, target)
    number = marked.number

    @functools.wraps(target)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        return call_marked(marked, number, args, kwargs)

    return sharded


def give_strategy(module: nn.Module, strategy: OperatorStrategy) -> None:
    """Let a module have a strategy, in the place of an earlier one."""
    vars(module)[_ATTRIBUTE] = strategy


def _entries(given: Given, *, is_result: bool = False) -> tuple[Entry | None, ...]:
    """Return one entry per tensor; a single one may stand alone for a result."""
    if given is None:
        return ()
    if is_result and (isinstance(given, Layout) or _is_row(given)):
        given = (given,)  # type: ignore[assignment]
    if not isinstance(given, list | tuple):
        raise StrategyError(f"strategy {given!r}: {_EXAMPLE}")
    return tuple(None if entry is None else _entry(entry, given) for entry in given)


def _entry(entry: Any, given: Any) -> Entry:
    if isinstance(entry, Layout):
        if entry.tensor_map is None:
            raise StrategyError(f"strategy {given!r}: call the Layout with axis names, e.g. layout('dp', 'None')")
        return entry
    if not _is_row(entry):
        raise StrategyError(f"strategy {given!r}: {_EXAMPLE}")
    return tuple(entry)


def _is_row(entry: Any) -> bool:
    return isinstance(entry, list | tuple | torch.Size) and all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in entry
    )


def _parameters(target: Any, plan: Mapping[str, Entry]) -> tuple[tuple[nn.Parameter, Entry], ...]:
    """Return the parameters that a plan names; warn about names that do not exist."""
    if not plan:
        return ()
    root = find_target(target).root
    parameters = dict(root.named_parameters())
    found = []
    for name, entry in plan.items():
        short = name.removeprefix("self.")
        if short in parameters:
            found.append((parameters[short], entry))
        else:
            warnings.warn(
                f"parameter_plan: there is no parameter {name!r}{near_miss(short, parameters)}; "
                f"the parameters are {', '.join(parameters) or 'none'}",
                stacklevel=3,
            )
    return tuple(found)


def strategies_of(root: nn.Module) -> dict[str, OperatorStrategy]:
    """Return module path -> strategy for every module of a network that has one."""
    return {path: vars(module)[_ATTRIBUTE] for path, module in root.named_modules() if _ATTRIBUTE in vars(module)}
