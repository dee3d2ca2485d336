"""load_param_into_net: whole tensors by name, as load_checkpoint returns them, into a network cut anyhow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.dict_tensors import DictTensors
from msrun.runtime.checkpoint.load import load_tensors
from msrun.runtime.checkpoint.tensor_key import key_of
from msrun.runtime.parallel.parameters.network_state import NetworkState, find_box, find_network_state


def load_param_into_net(
    net: Any, parameter_dict: Mapping[str, Any], strict_load: bool = False
) -> tuple[list[str], list[str]]:
    """Load parameters and buffers by name; each rank takes the part that it holds. Nothing is exchanged.

    AutoParallel's first call may come before or after: parameters without memory get their values with their place.
    Where names do not agree, one prefix that those of the network have and those of `parameter_dict` lack is left out,
    as MindSpore does.

    Args:
        net: a module, or an AutoParallel of one.
        parameter_dict: name -> whole tensor, such as `load_checkpoint(path)` or a state dict; other values are not
            used. A parameter marked `layerwise_parallel` takes this rank's own.
        strict_load: refuse another type of element and leave no prefix out. False: floating-point types are converted.

    Returns:
        Names of the network's tensors that were not loaded, and names of `parameter_dict` that were not used.

    Raises:
        CheckpointError: a tensor of another shape, or of another type of element that is not converted.
    """
    if not isinstance(parameter_dict, Mapping):
        raise CheckpointError(
            f"parameter_dict is a {type(parameter_dict).__name__}: give the dict that load_checkpoint(path) returns"
        )
    network = find_network_state(net)
    given = {name: value for name, value in parameter_dict.items() if isinstance(value, Tensor)}
    source_of = {name: name for name in network.tensors if name in given}
    if not strict_load:
        source_of |= _without_prefix([name for name in network.tensors if name not in given], given)
    for name, source in source_of.items():
        _check(name, network.tensors[name], given[source], strict_load=strict_load)
    values = DictTensors(Path("parameter_dict"), {key_of(network, name): given[s] for name, s in source_of.items()})
    load_tensors(values, NetworkState({n: network.tensors[n] for n in source_of}, {}, network.module, network.own))
    used = set(source_of.values())
    return [n for n in network.tensors if n not in source_of], [n for n in parameter_dict if n not in used]


def _without_prefix(missing: list[str], given: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name of the network -> name in the dict, for the prefix of the longest name that the dict lacks."""
    longest = max(missing, key=len, default="")
    parts = longest.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        if longest.removeprefix(prefix) in given:
            return {
                n: n.removeprefix(prefix) for n in missing if n.startswith(prefix) and n.removeprefix(prefix) in given
            }
    return {}


def _check(name: str, tensor: Tensor, value: Tensor, *, strict_load: bool) -> None:
    shape = find_box(tensor).shape
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{name} has shape {shape}, in parameter_dict {tuple(value.shape)}: give the values of this network, whole"
        )
    are_floats = tensor.is_floating_point() and value.is_floating_point()
    if tensor.dtype != value.dtype and (strict_load or not are_floats):
        remedy = "convert it, or give strict_load=False" if are_floats else "convert it"
        raise CheckpointError(f"{name} is {tensor.dtype}, in parameter_dict {value.dtype}: {remedy}")
