"""Parameters on parameter servers: which they are, for whoever asks in the runtime. The room `server` notes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import StrategyError

VALUE = "value"
"""The name of the values among the tensors of a parameter's state."""


on_servers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> the `RemoteParameter` of msrun.server.remote, which says what can be asked of it"""

before_remote_steps: list[Callable[[torch.optim.Optimizer], None]] = []
"""What is done before an optimizer's step sends gradients, when the servers know the optimizer already."""


def find_remote(parameter: Tensor) -> Any:
    """Return what is known of a parameter on the servers; None of others."""
    return on_servers.get(parameter)


def find_remotes(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Any]]:
    """Yield those of some parameters that are on the servers."""
    for parameter in parameters if len(on_servers) else ():
        remote = find_remote(parameter)
        if remote is not None:
            yield parameter, remote


def refuse_on_servers(parameters: Iterable[Tensor], what: str) -> None:
    """Refuse parameters on servers, whose mean gradients no rank has.

    Raises:
        StrategyError: there is one.
    """
    for _, found in find_remotes(parameters):
        raise StrategyError(
            f"{what} of {found.label}, which is on the parameter servers: no rank has its mean gradient; give the "
            "other parameters only"
        )
