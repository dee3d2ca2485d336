"""shard: say how a module, a function or an operator is cut, in MindSpore's tuples or with named axes."""

from __future__ import annotations

import fnmatch
import functools
import os
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
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.experts import EXPERT, share_out_experts
from msrun.runtime.parallel.named_plan import WORDS_OF_PLANS, give_plan, read_plan
from msrun.runtime.parallel.pipeline.pipeline import give_stage
from msrun.runtime.parallel.recomputation import recompute
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


def parallelize(
    network: Network, plan: Mapping[str, Any] | str | os.PathLike[str] | None = None, *, tensor_parallel: int = 0
) -> Network:
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
            a model of transformers brings. With such names under `names`, it may also hold `tensor_parallel`,
            `recompute` (names of modules), `stages` (name of a module -> stage) and every setter of AutoParallel with
            its arguments. A path is that of a YAML file that says the same.
        tensor_parallel: into how many parts; 0 = as many as there are ranks. It must divide their number: the others
            share out the rows of the batch.

    Returns:
        The network itself.

    Raises:
        StrategyError: a name that no module has, an unknown word, a module without a weight, a weight that cannot be
            cut into so many parts, or a setting that AutoParallel does not take; with the line of a file.
    """
    if not isinstance(network, nn.Module):
        raise StrategyError(f"parallelize({type(network).__name__}): a torch module is expected")
    given = read_plan(plan)
    ranks = world.get_group_size() if world.is_initialized() else 0
    asked = tensor_parallel or given.tensor_parallel
    with given.at("tensor_parallel"):
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0 or (ranks and ranks % max(1, asked)):
            raise StrategyError(
                f"tensor_parallel={asked!r}: must divide the {ranks or 'number of'} ranks; give a divisor"
            )
    modules = {path: module for path, module in network.named_modules() if path}
    names = _plan_of_model(network) if given.names is None else given.names
    for pattern, word in names.items():
        with given.at("names", pattern):
            side = _side_of(pattern, word)
            if given.names is None and not any(_matching(pattern, modules)):
                continue  # a model's plan also names layers that other models of its kind have
            for path in _named(f"plan {pattern!r}", pattern, modules):
                _cut(pattern, path, modules[path], side, asked, ranks)
    for pattern in given.recompute:
        with given.at("recompute"):
            found = _named(f"plan recompute: {pattern!r}", pattern, modules)
            for path in found:
                if not any(path.startswith(f"{other}.") for other in found):
                    recompute(modules[path])
    for pattern, stage in given.stages.items():
        with given.at("stages", pattern):
            for path in _named(f"plan stages: {pattern!r}", pattern, modules):
                give_stage(modules[path], stage)
    give_plan(network, given)
    return network


def _named(what: str, pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths that a pattern means.

    Raises:
        StrategyError: none.
    """
    found = [*_matching(pattern, modules)]
    if not found:
        raise StrategyError(
            f"{what}: no module has that name{near_miss(pattern, modules)}; the network's are "
            f"{', '.join(list(modules)[:12])}{', ...' if len(modules) > 12 else ''}"
        )
    return found


def _cut(pattern: str, path: str, module: nn.Module, side: str, asked: int, ranks: int) -> None:
    """Let a module be cut by a side into so many parts as are asked for; 0 = as many as a stage has ranks."""
    if not side:
        return
    if side == EXPERT:
        share_out_experts(path, module, ranks)
        return
    if side in OF_ATTENTION:
        give_strategy(module, OperatorStrategy(named=NamedCut(side, asked, ())))
        return
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
        raise StrategyError(
            f"plan {pattern!r}: {path} ({type(module).__name__}) has no weight of two dimensions to be "
            f"cut {side}; name its layers"
        )
    cut = NamedCut(side, asked, tuple(weight.shape))
    if asked:
        _check_size(path, module, cut, asked)
    give_strategy(module, OperatorStrategy(named=cut))


def check_named_cuts(root: nn.Module, ranks: int) -> None:
    """Refuse plans whose layers cannot be cut over so many ranks; before anything is captured.

    Raises:
        StrategyError: names the nearest plan of the same kind.
    """
    modules = dict(root.named_modules())
    for path, strategy in strategies_of(root).items():
        cut = strategy.named
        if cut is not None and cut.weight:
            _check_size(user_name(path), modules[path], cut, cut.parts or ranks)


def _check_size(path: str, module: nn.Module, cut: NamedCut, parts: int) -> None:
    sizes = _sizes(module, cut.weight)
    may_be = sizes.get(cut.side, cut.weight)
    if any(size % parts == 0 for size in may_be):
        return
    legal = max(n for n in range(1, parts) if parts % n == 0 and any(size % n == 0 for size in may_be))
    ways = [f"{cut.side} with tensor_parallel={legal}"] if legal > 1 else []
    ways += [
        f"{word}, whose {found[0]} do" for word, found in sizes.items() if word != cut.side and not found[0] % parts
    ]
    raise StrategyError(
        f"plan: {cut.side} cuts the {' or '.join(map(str, may_be))} of {path}.weight {cut.weight}, which do not go "
        f"into {parts} equal parts: say {' or '.join((*ways, 'nothing of it'))}"
    )


def _sizes(module: nn.Module, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the size that each side cuts, of layers that are known to store their weight so."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return {INPUTS: shape[:1], OUTPUTS: shape[1:]}
    if isinstance(module, nn.Linear):
        return {OUTPUTS: shape[:1], INPUTS: shape[1:]}
    return {}


def _side_of(pattern: str, word: Any) -> str:
    name = word if isinstance(word, str) else type(word).__name__
    known: Mapping[str, str] = WORDS if isinstance(word, str) else _STYLES
    if pattern in WORDS_OF_PLANS and name not in known:
        raise StrategyError(f"plan {pattern!r}: with settings beside them, names of modules stand under `names:`")
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
