"""parallelize: a plan by names, such as {"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}.

The words are those of torch's `ParallelStyle` classes and of the `tp_plan` of transformers' models: Megatron's pairs of
a layer cut by its outputs and one cut by its inputs. What lies between them, and what leaves the network, follows.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.parallel.experts import EXPERT, share_out_experts
from msrun.runtime.parallel.given_strategies import give_strategy
from msrun.runtime.sharding.operators.ring_attention import RING, ULYSSES
from msrun.runtime.sharding.strategies import NamedCut, OperatorStrategy

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
