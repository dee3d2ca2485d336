"""Parameters on parameter servers: which they are, for whoever needs the mean gradient that no rank has of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import StrategyError


class OnServers(Protocol):
    """What is known of such a parameter."""

    label: str
    """For errors."""


on_servers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> `OnServers`"""


def refuse_on_servers(parameters: Iterable[Tensor], what: str) -> None:
    """Refuse parameters on servers, whose mean gradients no rank has."""
    for parameter in parameters if len(on_servers) else ():
        found: OnServers | None = on_servers.get(parameter)
        if found is not None:
            raise StrategyError(
                f"{what} of {found.label}, which is on the parameter servers: no rank has its mean gradient; give the "
                "other parameters only"
            )
