"""Weights without values: in a dry run no parameter gets memory, whoever builds the network.

Under `no_init_parameters` they have none already. All others lose it as they become parameters of a module: the object
stays the same one, for optimizers and tied modules, and initialisers do nothing to it afterwards.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from msrun.runtime.tensors.put_value import put_value


@functools.cache
def keep_no_values() -> None:
    """Take the memory of every parameter that is registered in a module from now on; once in a process."""
    register = nn.Module.register_parameter

    @functools.wraps(register)
    def register_without_value(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and not param.is_meta and param._use_count() == 1:  # type: ignore[attr-defined]
            put_value(param, torch.empty_like(param, device="meta"))

    nn.Module.register_parameter = register_without_value  # type: ignore[method-assign]
