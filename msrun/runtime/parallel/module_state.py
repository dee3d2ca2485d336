"""A network behind AutoParallel as the user sees it: its own names, whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.parameters.part import Part


def unwrap(network: nn.Module) -> nn.Module:
    """Return a network without the wrappers that give it a loss or divide its batch."""
    while isinstance(network, WithLoss | DividedBatch | DistributedDataParallel):
        inner = "module" if isinstance(network, DistributedDataParallel) else "network"
        network = getattr(network, inner)
    return network


def share_tables(parallel: nn.Module, network: nn.Module) -> None:
    """Let a module have the submodules, parameters and buffers of another one, now and when they change."""
    inner = unwrap(network)
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        vars(parallel)[table] = vars(inner)[table]
    losses = _losses(network)
    if losses:
        vars(parallel)["_modules"] = {**inner._modules, **losses}


def collect_state(network: nn.Module, destination: Any, prefix: str, *, keep_vars: bool) -> Any:
    """Return a network's state dict with whole tensors. All ranks call it together when parameters are cut."""
    state = unwrap(network).state_dict(destination=destination, prefix=prefix, keep_vars=True)
    for name, loss in _losses(network).items():
        loss.state_dict(destination=state, prefix=f"{prefix}{name}.", keep_vars=True)
    if not keep_vars:
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, Tensor):
                state[name] = value.full_tensor() if isinstance(value, Part | DTensor) else value.detach()
    return state


def distribute_state(network: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which whole tensors of what torch has cut (FSDP2) are cut likewise."""
    own = unwrap(network).state_dict(keep_vars=True)
    return {
        name: distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None)
        if isinstance(mine := own.get(name), DTensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }


def _losses(network: nn.Module) -> dict[str, nn.Module]:
    """Return the loss modules of the wrappers that hold parameters or buffers."""
    found: dict[str, nn.Module] = {}
    inner = unwrap(network)
    while network is not inner:
        for name, child in network.named_children():
            is_network = name in ("network", "module")
            if not is_network and (*child.parameters(), *child.buffers()):
                found[name] = child
        network = network.module if isinstance(network, DistributedDataParallel) else network.network  # type: ignore[assignment]
    return found
