"""Whole tensors that come to a cut network: `load_state_dict` takes this rank's part of each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from msrun.runtime.parallel.parameters.part import Part, describe


def take_wholes(root: nn.Module) -> None:
    """Let the `load_state_dict` of every module that holds parts take whole tensors."""
    for module in root.modules():
        hooks = module._load_state_dict_pre_hooks.values()
        is_hooked = any(getattr(hook, "hook", None) is _cut_incoming for hook in hooks)
        if not is_hooked and any(isinstance(value, Part) for value in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_cut_incoming)


def _cut_incoming(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    del strict, missing, unexpected
    name: str
    parameter: Any
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not (isinstance(parameter, Part) and isinstance(value, Tensor)):
            continue
        placed = parameter.placement
        if local_metadata.get("assign_to_params_buffers"):
            errors.append(f"assign=True would replace a cut parameter, {describe(placed)}: load without it")
        elif isinstance(value, Part):
            if not value.placement.is_same_cut(placed):
                errors.append(f"{describe(value.placement)} in the state dict, cut otherwise than the network's own")
        elif tuple(value.shape) == placed.shape:
            state_dict[prefix + name] = placed.cut(value)
        else:
            errors.append(f"{describe(placed)}; the state dict has {tuple(value.shape)}, give the whole")
            state_dict[prefix + name] = parameter.detach()
