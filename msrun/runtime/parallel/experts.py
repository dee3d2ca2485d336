"""Experts of a mixture that the ranks share out: the word `expert` of a plan by names."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.capture import marked_calls
from msrun.runtime.sharding.operators.experts import OPERATOR, experts_of, register_experts

EXPERT = "expert"
_NUMBER, _WEIGHTS = "_msrun_experts", "_msrun_weights"


def share_out_experts(name: str, module: nn.Module, ranks: int) -> None:
    """Let a module of experts, as those of transformers' models, send tokens to the ranks of its experts.

    Outside of AutoParallel it computes as before.

    Args:
        ranks: 0 = not known yet.
    """
    down = getattr(module, "down_proj", None)
    ups = [getattr(module, each, None) for each in ("gate_up_proj", "up_proj")]
    weights = [weight for weight in (*ups, down) if isinstance(weight, nn.Parameter) and weight.dim() == 3]
    if len(weights) != 2 or not isinstance(down, nn.Parameter) or len(weights[0]) != len(weights[1]):
        raise StrategyError(
            f"plan {name!r}: {type(module).__name__} has no weights of experts to be shared out: a gate_up_proj (or "
            "up_proj) and a down_proj with one matrix for each expert; name the module that has them"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise StrategyError(f"plan {name!r}: {type(module).__name__} norms what its experts make; leave it whole")
    if ranks and len(down) % ranks:
        raise StrategyError(
            f"plan {name!r}: {len(down)} experts cannot be shared out over {ranks} ranks; give a number of ranks that "
            "divides them"
        )
    number = register_experts(module)
    vars(module).update({_NUMBER: number, _WEIGHTS: experts_of(number).names, "forward": MethodType(_forward, module)})


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    if not marked_calls.MSRUN_CAPTURING:
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    weights = [getattr(self, name) for name in self._msrun_weights]
    return OPERATOR(hidden_states, top_k_index, top_k_weights, weights, self._msrun_experts)


def expert_load(network: nn.Module) -> dict[str, list[int]]:
    """Return how many tokens each expert got in the newest forward pass, for every module under the word `expert`.

        parallelize(model, {"layers.*.experts": "expert"})
        ...
        expert_load(model)  # {"model.layers.0.mlp.experts": [31, 7, 12, 14], ...}

    All ranks call it. A token that k experts work on counts for each of them.

    Raises:
        StrategyError: the network has no such module.
    """
    found = {path: vars(module)[_NUMBER] for path, module in network.named_modules() if _NUMBER in vars(module)}
    if not found:
        raise StrategyError("expert_load: the network has no experts that are shared out; name them in a plan first")
    loads: dict[str, list[int]] = {}
    for path, number in found.items():
        experts = experts_of(number)
        whole = torch.zeros(experts.count, dtype=torch.int64, device=world.device())
        begin = (world.get_rank() - experts.first_rank) * len(experts.load)
        whole[begin : begin + len(experts.load)] = experts.load
        if world.get_group_size() > 1:
            dist.all_reduce(whole)
        loads[path] = whole.tolist()
    return loads
