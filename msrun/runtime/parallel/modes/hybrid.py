"""Hybrid parallel: data parallel around parts that the user has cut by hand.

A parameter marked `layerwise_parallel` belongs to its rank alone: it is not broadcast, its gradient is not reduced, and
what the ranks have to exchange for it, the network does with the operators of `parallel/communication.py`.
The marks and their meaning are MindSpore's (`Parameter(layerwise_parallel=True)`, `DistributedGradReducer`).
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import StrategyError
from msrun.runtime.parallel.user_name import user_name

_ATTRIBUTE = "layerwise_parallel"
_P = TypeVar("_P", bound=nn.Parameter)
_scaled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> (factor, hook) of its gradient"""


def layerwise_parallel(parameter: _P) -> _P:
    """Mark a parameter as this rank's own part, for parallel_mode="hybrid_parallel"; returns it.

    `self.weight = layerwise_parallel(nn.Parameter(part))`. The same as `parameter.layerwise_parallel = True`.

    Raises:
        StrategyError: not a parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise StrategyError(f"layerwise_parallel({type(parameter).__name__}): mark a torch.nn.Parameter")
    setattr(parameter, _ATTRIBUTE, True)
    return parameter


def is_layerwise(parameter: Tensor) -> bool:
    """Return whether a parameter is marked."""
    return getattr(parameter, _ATTRIBUTE, False) is True


def check_no_layerwise(root: nn.Module, mode: str) -> None:
    """Refuse marked parameters in a mode that would reduce or cut them.

    Raises:
        StrategyError: there is one.
    """
    name = next((name for name, parameter in root.named_parameters() if is_layerwise(parameter)), None)
    if name is not None:
        raise StrategyError(
            f"parameter {user_name(name)} is marked layerwise_parallel, which parallel_mode={mode!r} does not know: "
            'use parallel_mode="hybrid_parallel", or take the mark off'
        )


def scale_gradient_of(parameter: nn.Parameter, factor: float) -> None:
    """Multiply every gradient that reaches a parameter from now on; once, however often it is asked for.

    Raises:
        StrategyError: another AutoParallel has asked for another factor.
    """
    known: tuple[float, RemovableHandle] | None = _scaled.get(parameter)
    if known is not None and known[0] != factor:
        raise StrategyError(
            f"a layerwise_parallel parameter of shape {tuple(parameter.shape)} is trained by two AutoParallel with "
            "different gradients_mean or compat: give both the same"
        )
    if known is None and factor != 1.0:
        _scaled[parameter] = (factor, parameter.register_hook(lambda gradient: gradient * factor))
