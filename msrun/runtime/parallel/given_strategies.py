"""shard: say how a module, a function or an operator is cut, in MindSpore's tuples or with named axes."""

from __future__ import annotations

import fnmatch
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.capture.marked_calls import MarkedFunction, call_marked
from msrun.runtime.parallel.experts import EXPERT, share_out_experts
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.sharding.operators.attention import RING, ULYSSES
from msrun.runtime.sharding.strategies import Entry, NamedCut, OperatorStrategy

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


OUTPUTS, INPUTS = "colwise", "rowwise"
OF_ATTENTION = (RING, ULYSSES)
"""Words for a module that attends: how it does where its sequence is cut."""
WORDS = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), OUTPUTS),
    **dict.fromkeys(("rowwise", "rowwise_rep", "packed_rowwise", "vocab", "embedding_rowwise"), INPUTS),
    **dict.fromkeys(
        ("replicated", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "moe_tp_experts"), ""
    ),
    **{word: word for word in (*OF_ATTENTION, EXPERT)},
}
"""What a plan may say of a module -> by which side of its weight that cuts it; empty = not at all."""
_STYLES = {
    "ColwiseParallel": OUTPUTS,
    "RowwiseParallel": INPUTS,
    **dict.fromkeys(("SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"), ""),
}
"""Classes of torch.distributed.tensor.parallel; those that say how values travel are what AutoParallel decides."""
_OF_MODEL = ("tp_plan", "_tp_plan")
Network = TypeVar("Network", bound=nn.Module)


def parallelize(network: Network, plan: Mapping[str, Any] | None = None, *, tensor_parallel: int = 0) -> Network:
    """Say by name how the layers of a network are cut; takes effect when AutoParallel captures it.

        parallelize(net, {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "embed": "vocab"})
        step = AutoParallel(WithLoss(net, loss)).dataset_strategy("full_batch")

    A name is a module's path; `*` stands for any part of it, and prefixes such as `model.` may be left out. `colwise`
    cuts a layer by its outputs, `rowwise` by its inputs, of which it sums; of an embedding `colwise` cuts the columns
    and `rowwise` or `vocab` the rows. It does not matter how the layer stores its weight. `ring` and `ulysses` say how
    an attention computes whose sequence is cut; `expert` shares a module's experts out over all ranks and sends tokens
    to them.

    Args:
        plan: name -> word, or -> one of torch's `ColwiseParallel()`, `RowwiseParallel()`, ...; None for the plan that
            a model of transformers brings.
        tensor_parallel: into how many parts; 0 = as many as there are ranks. It must divide their number: the others
            share out the rows of the batch.

    Returns:
        The network itself.

    Raises:
        StrategyError: a name that no module has, an unknown word, a module without a weight, or a weight that cannot
            be cut into so many parts.
    """
    if not isinstance(network, nn.Module):
        raise StrategyError(f"parallelize({type(network).__name__}): a torch module is expected")
    given = _plan_of_model(network) if plan is None else plan
    ranks = world.get_group_size() if world.is_initialized() else 0
    parts = tensor_parallel or ranks
    if tensor_parallel < 0 or (ranks and ranks % max(1, tensor_parallel)):
        raise StrategyError(f"tensor_parallel={tensor_parallel}: must divide the {ranks} ranks; give a divisor")
    modules = {path: module for path, module in network.named_modules() if path}
    for pattern, word in given.items():
        side = _side_of(pattern, word)
        found = [*_matching(pattern, modules)]
        if not found and plan is None:
            continue  # a model's plan also names layers that other models of its kind have
        if not found:
            raise StrategyError(
                f"plan {pattern!r}: no module has that name{near_miss(pattern, modules)}; the network's are "
                f"{', '.join(list(modules)[:12])}{', ...' if len(modules) > 12 else ''}"
            )
        for path in found if side else ():
            if side == EXPERT:
                share_out_experts(path, modules[path], ranks)
                continue
            if side in OF_ATTENTION:
                give_strategy(modules[path], OperatorStrategy(named=NamedCut(side, tensor_parallel, ())))
                continue
            weight = getattr(modules[path], "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
                raise StrategyError(
                    f"plan {pattern!r}: {path} ({type(modules[path]).__name__}) has no weight of two dimensions to be "
                    f"cut {side}; name its layers"
                )
            shape = tuple(weight.shape)
            if parts and not any(size % parts == 0 for size in shape):
                raise StrategyError(f"plan {pattern!r}: no dimension of {path}.weight {shape} has {parts} equal parts")
            give_strategy(modules[path], OperatorStrategy(named=NamedCut(side, tensor_parallel, shape)))
    return network


def _side_of(pattern: str, word: Any) -> str:
    name = word if isinstance(word, str) else type(word).__name__
    known: Mapping[str, str] = WORDS if isinstance(word, str) else _STYLES
    if name not in known:
        raise StrategyError(
            f"plan {pattern!r}: {name!r} is no word of a plan{near_miss(name, known)}; they are {', '.join(known)}"
        )
    return known[name]


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths that a pattern means: whole, or behind a prefix where none is it as a whole."""
    whole = re.compile(fnmatch.translate(pattern))
    found = [path for path in modules if whole.match(path)]
    behind = re.compile(fnmatch.translate(f"*.{pattern}"))
    yield from found or [path for path in modules if behind.match(path)]


def _plan_of_model(network: nn.Module) -> Mapping[str, Any]:
    plans = [getattr(network, name, None) for name in _OF_MODEL]
    plans.append(getattr(getattr(network, "config", None), "base_model_tp_plan", None))
    found = next((plan for plan in plans if isinstance(plan, Mapping) and plan), None)
    if found is None:
        raise StrategyError(
            f"parallelize({type(network).__name__}): it brings no tp_plan; give one, e.g. "
            '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'
        )
    return found
