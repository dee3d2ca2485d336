"""The state of an optimizer, ours or torch's: what has its parameter's shape is cut as the parameter is.

What is read for parameters that have no memory yet, or that AutoParallel has yet to cut, waits for the optimizer's
first step: then every parameter is in its place, and no rank ever holds the state of a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.errors import CheckpointError
from msrun.runtime.agreement import gather
from msrun.runtime.checkpoint.index import TensorKey, key_of
from msrun.runtime.checkpoint.reader import CheckpointReader
from msrun.runtime.execute.placement import find_stages, is_held, placement_of
from msrun.runtime.optim.host_steps import LOOK_AT_WHOLES
from msrun.runtime.optim.of_parts import settle
from msrun.runtime.parallel.parameters.network_state import Chunk, NetworkState, find_box, find_chunk, find_share
from msrun.runtime.parts.on_servers import before_remote_steps, find_remote
from msrun.runtime.parts.part import lying_as
from msrun.runtime.tensors.plain_tensors import local_part
from msrun.runtime.world import world

StateReader = Callable[[], dict[int, dict[str, Any]]]

_waiting: WeakKeyDictionary[torch.optim.Optimizer, StateReader] = WeakKeyDictionary()
"""optimizer -> what reads its state, by parameter number"""
_hooked: WeakSet[torch.optim.Optimizer] = WeakSet()


def find_optimizer_state(
    optimizer: torch.optim.Optimizer, network: NetworkState
) -> tuple[dict[TensorKey, Chunk], dict[str, Any]]:
    """Return the parts of the state, and everything else of it: settings, step counts, which parts there are."""
    finish_waiting(optimizer)
    names = _names(optimizer, network)
    parts: dict[TensorKey, Chunk] = {}
    state: dict[str, Any] = {}
    for parameter, name in names.items():
        if not is_held(parameter):
            continue
        remote = find_remote(parameter)
        if remote is not None and remote.optimizer:
            state[name] = _remote_state(remote, parts, lambda *more, name=name: key_of(network, name, *more))
            continue
        cut: list[str] = []
        values: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and local_part(value).shape == local_part(parameter).shape:
                parts[key_of(network, name, key)] = find_chunk(value, find_box(parameter))
                cut.append(key)
            else:
                if not isinstance(optimizer, LOOK_AT_WHOLES):  # whose state of other shapes is that of the whole
                    _check_whole(value, key, name, parameter)
                values[key] = local_part(value).detach().cpu() if isinstance(value, Tensor) else value
        state[name] = {"parts": cut, "values": values}
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "settings": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return parts, {"groups": groups, "state": state}


def complete_state(network: NetworkState, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with what other stages of a pipeline hold of it. All ranks call it together."""
    if not any(find_stages(tensor) for tensor in network.tensors.values()):
        return state
    everyone = gather(state["state"])
    return {**state, "state": {name: values for of_rank in everyone for name, values in of_rank.items()}}


def _names(optimizer: torch.optim.Optimizer, network: NetworkState) -> dict[Tensor, str]:
    by_id: dict[int, str] = {}
    for name, tensor in network.tensors.items():
        by_id.setdefault(id(tensor), name)
    names: dict[Tensor, str] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in by_id:
            raise CheckpointError(
                f"parameter {index} of the optimizer, of shape {tuple(parameter.shape)}, is not in the network: give "
                "the network that the optimizer was made for"
            )
        names[parameter] = by_id[id(parameter)]
    return names


def _check_whole(value: Any, key: str, name: str, parameter: Tensor) -> None:
    if isinstance(value, Tensor) and value.dim() > 0 and not find_box(parameter).is_whole:
        raise CheckpointError(
            f"optimizer state {key} of {name} has shape {tuple(value.shape)}, its part of the parameter "
            f"{tuple(parameter.shape)}: state of a cut parameter must be a number or have the parameter's shape; "
            "use another optimizer or no hsdp"
        )


def _finish_before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    finish_waiting(optimizer)
    settle(optimizer)  # what looks at the state before every step has looked already


def restore_optimizer(
    optimizer: torch.optim.Optimizer, network: NetworkState, reader: CheckpointReader, saved: Mapping[str, Any]
) -> None:
    """Give an optimizer its settings now and its state as soon as its parameters are in their places."""
    names = _names(optimizer, network)
    _check_groups(optimizer, names, saved)
    _check_shapes(names, network, reader, saved)
    settings = [group["settings"] for group in saved["groups"]]
    _load(optimizer, {}, settings)
    _waiting[optimizer] = _reader_of(names, network, reader, saved)
    alone = world().world_size == 1
    places = (alone or isinstance(p, DTensor) or placement_of(p) is not None for p in names if not p.is_meta)
    if not any(parameter.is_meta for parameter in names) and all(places):
        finish_waiting(optimizer)
    elif optimizer not in _hooked:
        optimizer.register_step_pre_hook(_finish_before_step)
        optimizer.register_state_dict_pre_hook(finish_waiting)
        _hooked.add(optimizer)


def _reader_of(
    names: Mapping[Tensor, str], network: NetworkState, reader: CheckpointReader, saved: Mapping[str, Any]
) -> StateReader:
    parameters = list(names.items())

    def read() -> dict[int, dict[str, Any]]:
        state: dict[int, dict[str, Any]] = {}
        parts: dict[TensorKey, Chunk] = {}
        for index, (parameter, name) in enumerate(parameters):
            if not is_held(parameter):
                continue
            of_parameter = saved["state"].get(name, {"parts": [], "values": {}})
            values = dict(of_parameter["values"])
            remote = find_remote(parameter)
            if remote is not None and remote.optimizer:
                _read_remote(reader, remote, {key: key_of(network, name, key) for key in of_parameter["parts"]}, values)
                continue
            for key in of_parameter["parts"]:
                full_key, box = key_of(network, name, key), find_box(parameter)
                part = torch.empty(box.sizes, dtype=reader.tensors[full_key].dtype)
                parts[full_key] = Chunk(part, box)
                values[key] = lying_as(parameter, part)
            if values:
                state[index] = values
        reader.fill(parts)
        return state

    return read


def _remote_state(remote: Any, parts: dict[TensorKey, Chunk], key_of: Callable[[str], TensorKey]) -> dict[str, Any]:
    """Add this rank's share of the state that servers have to the parts, and return the rest."""
    numbers, dtypes = remote.describe_state()
    box = find_share(remote.shape)
    begin, end = (box.offsets[0], box.offsets[0] + box.sizes[0]) if remote.shape else (0, 1)
    for key, dtype in dtypes.items():
        parts[key_of(key)] = Chunk(remote.read(key, begin, end, dtype).reshape(box.sizes), box)
    return {"parts": list(dtypes), "values": numbers}


def _read_remote(reader: CheckpointReader, remote: Any, keys: Mapping[str, TensorKey], numbers: dict[str, Any]) -> None:
    """Send this rank's share of a saved state to the servers. They step when the gradients of all ranks have come."""
    box = find_share(remote.shape)
    parts = {full: Chunk(torch.empty(box.sizes, dtype=reader.tensors[full].dtype), box) for full in keys.values()}
    reader.fill(parts)
    for key, full in keys.items():
        remote.write(key, box.offsets[0] if remote.shape else 0, remote.rows_of(parts[full].tensor))
    remote.write_numbers(numbers)


def finish_waiting(optimizer: torch.optim.Optimizer) -> None:
    """Read the state that waits for an optimizer, if any does."""
    read = _waiting.pop(optimizer, None)
    if read is not None:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        _load(optimizer, read(), settings)


def _load(optimizer: torch.optim.Optimizer, state: Any, settings: list[dict[str, Any]]) -> None:
    """Use torch's own way in: it puts each value on its parameter's device and knows every optimizer's habits."""
    groups = []
    count = 0
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        size = len(group["params"])
        groups.append({**values, "params": list(range(count, count + size))})
        count += size
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_groups(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, Any]) -> None:
    mine = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [group["parameters"] for group in saved["groups"]]
    if len(mine) != len(theirs):
        raise CheckpointError(
            f"the optimizer has {len(mine)} parameter groups, the one in the checkpoint {len(theirs)}: make it alike"
        )
    for index, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        different = sorted(set(here) ^ set(there))
        if different:
            place = "only here" if different[0] in here else "only in the checkpoint"
            raise CheckpointError(
                f"group {index} of the optimizer holds other parameters than in the checkpoint: {different[0]} is "
                f"{place}; make the optimizer as it was, or load without it"
            )


def _check_shapes(
    names: Mapping[Tensor, str], network: NetworkState, reader: CheckpointReader, saved: Mapping[str, Any]
) -> None:
    for parameter, name in names.items():
        for key in saved["state"].get(name, {"parts": []})["parts"]:
            full_key, mine = key_of(network, name, key), find_box(parameter).shape
            if full_key not in reader.tensors:
                raise CheckpointError(
                    f"checkpoint {reader.path} lacks the optimizer state {key} of {name}: load another"
                )
            shape = reader.tensors[full_key].shape
            if shape != mine:
                raise CheckpointError(
                    f"optimizer state {key} of {name} has shape {shape} in the checkpoint, the parameter {mine}: "
                    "load the checkpoint of this network"
                )


before_remote_steps.append(finish_waiting)
