"""Gradients that torch's DDP and FSDP2 leave alone: of parts that the user has cut by hand, of rows, and of what is on
parameter servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import StrategyError
from msrun.runtime.execute.gradients import mean_over_ranks
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parts.on_servers import find_remote

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
    """Refuse marked parameters in a mode that would reduce or cut them."""
    name = next((name for name, parameter in root.named_parameters() if is_layerwise(parameter)), None)
    if name is not None:
        raise StrategyError(
            f"parameter {user_name(name)} is marked layerwise_parallel, which parallel_mode={mode!r} does not know: "
            'use parallel_mode="hybrid_parallel", or take the mark off'
        )


def scale_gradient_of(parameter: nn.Parameter, factor: float) -> None:
    """Multiply every gradient that reaches a parameter from now on; once, however often it is asked for."""
    known: tuple[float, RemovableHandle] | None = _scaled.get(parameter)
    if known is not None and known[0] != factor:
        raise StrategyError(
            f"a layerwise_parallel parameter of shape {tuple(parameter.shape)} is trained by two AutoParallel with "
            "different gradients_mean or compat: give both the same"
        )
    if known is None and factor != 1.0:
        _scaled[parameter] = (factor, parameter.register_hook(lambda gradient: gradient * factor))


_of_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""weight of a sparse layer -> the hook that averages its gradient"""


def has_own_gradient(parameter: Tensor) -> bool:
    """Return whether a mode without capture must leave a parameter's gradient alone."""
    return parameter in _of_rows or not is_same_everywhere(parameter)


def is_same_everywhere(tensor: Tensor) -> bool:
    """Return whether all ranks hold the same of a tensor, and agree on it among themselves.

    They do not on a rank's own part, on a table whose operator exchanges rows, and on what is on servers.
    """
    placed = placement_of(tensor)
    exchanges_rows = placed is not None and placed.exchanges_rows
    return not (is_layerwise(tensor) or exchanges_rows or find_remote(tensor) is not None)


def average_rows(root: nn.Module) -> None:
    """Let the gradients of sparse layers be averaged over the ranks from now on."""
    for parameter in _weights_of_sparse_layers(root):
        if parameter not in _of_rows and not has_own_gradient(parameter):
            _of_rows[parameter] = parameter.register_hook(mean_over_ranks)


def _weights_of_sparse_layers(root: nn.Module) -> Iterator[Tensor]:
    for module in root.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            yield module.weight


ON_SERVERS = "on the parameter servers, which step it"
"""Reason of a parameter in a plan."""


def check_no_servers(root: nn.Module, what: str) -> None:
    """Refuse parameters on servers where they would be cut, or trained otherwise than by the servers."""
    for name in (name for name, parameter in root.named_parameters() if find_remote(parameter) is not None):
        raise StrategyError(
            f"parameter {user_name(name)} is on the parameter servers, which {what} does not know: use "
            'parallel_mode="data_parallel" without it, or leave set_param_ps out'
        )


def check_captured(root: nn.Module, mode: str) -> None:
    """Refuse parameters that a mode with capture does not know: a rank's own, and those on servers."""
    check_no_layerwise(root, mode)
    check_no_servers(root, f"parallel_mode={mode!r}")


def check_servers(root: nn.Module, settings: ParallelSettings) -> None:
    """Refuse parameters on servers with settings that their gradients would not follow."""
    wrong = {
        f"parallel_mode={settings.parallel_mode!r}": settings.parallel_mode != "data_parallel",
        "hsdp": settings.hsdp is not None,
        "a loss scale": settings.precision is not None and settings.precision.loss_scale is not None,
    }
    for what, is_so in wrong.items():
        if is_so:
            check_no_servers(root, what)
    for module_name, module in root.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            remote = find_remote(parameter)
            if remote is not None and remote.is_table and module not in remote.readers:
                raise StrategyError(
                    f"parameter {user_name(f'{module_name}.{name}'.lstrip('.'))} is a table on the parameter servers, "
                    "of which this module needs the whole: call set_param_ps with a module that holds both"
                )
