"""shard: say how one module's operator is cut, in MindSpore's tuples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime.graph.strategies import Numbers, OperatorStrategy

_ATTRIBUTE = "_msrun_strategy"


def shard(module: nn.Module, in_strategy: Sequence[Sequence[int]]) -> nn.Module:
    """Cut the operator that `module` calls: one tuple per tensor input, one number of parts per dimension.

    `shard(net.layer1, ((1, 1), (8, 1)))` cuts the weight of a linear layer (out, in) over 8 ranks by its outputs. The
    parameters of a module come after its inputs, in the order in which the operator takes them; a bias follows its
    weight. It takes effect when AutoParallel captures the network. Returns the module.

    Raises:
        StrategyError: not tuples of whole numbers above 0. Whether the operator allows them is checked at capture.
    """
    if not isinstance(module, nn.Module):
        raise StrategyError(f"shard({module!r}): a torch module is expected")
    strategy = _check(in_strategy)
    vars(module)[_ATTRIBUTE] = OperatorStrategy(strategy)
    return module


def _check(in_strategy: Sequence[Sequence[int]]) -> Numbers:
    try:
        numbers = tuple(tuple(row) for row in in_strategy)
    except TypeError:
        numbers = ()
    is_whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for row in numbers for n in row)
    if not numbers or not is_whole:
        raise StrategyError(
            f"strategy {in_strategy!r}: give one tuple of whole numbers above 0 for each input, e.g. ((1, 1), (8, 1))"
        )
    return numbers


def strategies_of(root: nn.Module) -> dict[str, OperatorStrategy]:
    """Return module path -> strategy for every module of a network that has one."""
    return {path: vars(module)[_ATTRIBUTE] for path, module in root.named_modules() if _ATTRIBUTE in vars(module)}
