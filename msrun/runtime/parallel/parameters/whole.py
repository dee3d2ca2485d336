"""Whole values: what the ranks hold in parts, joined on every rank; and a network that holds them for a while."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import gather, meetings
from msrun.runtime.nn.replaced import replaced_for_now
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.modes.fsdp import unsharded
from msrun.runtime.parallel.modes.own_gradients import is_layerwise
from msrun.runtime.parallel.network_module import NetworkModule
from msrun.runtime.parallel.parameters.network_state import find_box
from msrun.runtime.parallel.parameters.storage import digest
from msrun.runtime.parts.on_servers import refuse_on_servers
from msrun.runtime.parts.part import Part
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import holding, local_part

holds_wholes: ContextVar[bool] = ContextVar("holds_wholes", default=False)
"""True inside `whole_parameters`."""


@contextmanager
def whole_parameters(network: nn.Module) -> Iterator[None]:
    """Let a network hold whole parameters on every rank, to be read and written, for as long as the context lasts.

    All ranks enter and leave it together, in every mode; before the first call, and where nothing is cut, it gathers
    nothing. In a pipeline every rank holds the parameters of all stages. Inside, the parameters are ordinary ones
    without gradients, which come back at the end; `network` itself may be called, its AutoParallel may not. At the end
    every rank keeps its part of what was written: the same on every rank, or on rank 0 alone. An exception inside
    leaves cut parameters as they were. A rank holds its parts and the whole network meanwhile.

    Args:
        network: a module, or an AutoParallel of one.

    Raises:
        StrategyError: a step function, parameters on servers, without values, or cut by hand.
        ParallelError: at the end, another rank wrote other values than rank 0, or another shape.
    """
    root: Any = network.network if isinstance(network, NetworkModule) else network
    if not isinstance(root, nn.Module):
        raise StrategyError("whole_parameters() of a step function: give the network that it closes over")
    refuse_on_servers(root.parameters(), "whole_parameters()")
    for name, parameter in root.named_parameters():
        if is_layerwise(parameter) or parameter.is_meta:
            what = "has no value yet: call init_parameters(net)" if parameter.is_meta else "is cut by hand"
            raise StrategyError(f"whole_parameters(): {user_name(name)} {what}")
    if world.get_group_size() == 1:
        yield
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    meetings.gather("whole_parameters()")
    owners = dict(root.named_parameters())
    token = holds_wholes.set(True)
    try:
        with gathered_parameters(root):
            tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
            before = {name: digest(tensor) for name, tensor in tensors.items()}
            yield
            written = _agree({**dict(root.named_parameters()), **dict(root.named_buffers())}, before)
    finally:
        holds_wholes.reset(token)
    with torch.no_grad():
        for name, value in written.items():
            if name not in owners:
                continue  # a buffer, which holds it already
            owner, box = owners[name], find_box(owners[name])
            if 0 in box.sizes:
                continue  # of another stage
            local_part(owner).copy_(value[tuple(map(slice, box.offsets, map(operator.add, box.offsets, box.sizes)))])


def _agree(tensors: Mapping[str, Tensor], before: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the values of what was written on any rank, as rank 0 has them."""
    now = {name: digest(tensor) for name, tensor in tensors.items()}
    everyone = gather((now, [name for name in now if now[name] != before.get(name)]))
    written = dict.fromkeys(name for _, names in everyone for name in names)
    of_rank_0 = everyone[0][0]
    for rank, (digests, names) in enumerate(everyone):
        other = next((name for name in names if digests[name] != of_rank_0.get(name)), None)
        if other is not None or digests.keys() != of_rank_0.keys() or now.keys() != before.keys():
            raise ParallelError(
                f"whole_parameters(): rank {rank} wrote other values to {user_name(other or 'it')} than rank 0: "
                "write the same on every rank (torch.manual_seed), or on rank 0 alone"
            )
    values: dict[str, Tensor] = {}
    for name in written:
        value = tensors[name].detach()
        if len({digests[name] for digests, _ in everyone}) > 1:
            flat = value.contiguous().to(world.device())
            with waiting_in(lambda: "broadcast of what was written"):
                dist.broadcast(flat.view(-1).view(torch.uint8), 0)
            value.copy_(flat)
        values[name] = value
    return values


@contextmanager
def gathered_parameters(root: nn.Module) -> Iterator[None]:
    """Let a network hold whole parameters on every rank for as long as the context lasts; then its parts again.

    All ranks enter it together. The parameter objects stay the same and keep their hooks, so whoever holds them sees
    whole values. What gradients are left on them inside is dropped at the end, and what was on the parts comes back. A
    rank holds its parts and the whole network.
    """
    with torch.no_grad():
        wholes = [(p, p.full_tensor()) for p in root.parameters() if isinstance(p, Part | DTensor)]
    own = {id(p): nn.Parameter(whole, p.requires_grad) for p, whole in wholes if isinstance(p, DTensor)}
    parts = [(p, whole) for p, whole in wholes if isinstance(p, Part)]
    with holding(parts), unsharded(root), replaced_for_now(root, own):
        yield
