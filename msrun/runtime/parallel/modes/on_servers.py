"""Parameters on parameter servers, as the modes see them: the servers average their gradients, no mode does."""

from __future__ import annotations

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime.parallel.modes.hybrid import check_no_layerwise
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.server.remote import find_remote

ON_SERVERS = "on the parameter servers, which step it"
"""Reason of a parameter in a plan."""


def check_no_servers(root: nn.Module, what: str) -> None:
    """Refuse parameters on servers where they would be cut, or trained otherwise than by the servers.

    Raises:
        StrategyError: there is one.
    """
    for name in (name for name, parameter in root.named_parameters() if find_remote(parameter) is not None):
        raise StrategyError(
            f"parameter {user_name(name)} is on the parameter servers, which {what} does not know: use "
            'parallel_mode="data_parallel" without it, or leave set_param_ps out'
        )


def check_captured(root: nn.Module, mode: str) -> None:
    """Refuse parameters that a mode with capture does not know: a rank's own, and those on servers.

    Raises:
        StrategyError: there is one.
    """
    check_no_layerwise(root, mode)
    check_no_servers(root, f"parallel_mode={mode!r}")


def check_servers(root: nn.Module, settings: ParallelSettings) -> None:
    """Refuse parameters on servers with settings that their gradients would not follow.

    Raises:
        StrategyError: another mode, hsdp, a loss scale, or a table that is used other than by
            an embedding's call.
    """
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
