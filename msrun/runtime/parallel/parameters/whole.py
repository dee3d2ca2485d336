"""Whole values: what the ranks hold in parts, joined on every rank; and a network that holds them for a while."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.modes.fsdp import unsharded
from msrun.runtime.parallel.modes.own_gradients import is_layerwise
from msrun.runtime.parallel.network_module import NetworkModule
from msrun.runtime.parallel.parameters.network_state import Chunk, find_box, find_chunk
from msrun.runtime.parallel.parameters.storage import digest
from msrun.runtime.parts.on_servers import refuse_on_servers
from msrun.runtime.parts.part import PartParameter
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.layout import Box
from msrun.runtime.tensors.plain_tensors import holding, local_part


def join_chunks(parts: Sequence[Chunk]) -> list[Tensor]:
    """Return the whole tensors of which every rank holds parts. All ranks call it together, with the same tensors.

    A tensor that is whole on every rank is returned as it is. Of the others every part travels once: each rank sends
    what no lower rank holds, in one message.

    Args:
        parts: of this rank; the box of a tensor that it does not hold is empty.
    """
    boxes = gather([part.box for part in parts])
    is_cut = [not all(of_rank[i].is_whole for of_rank in boxes) for i in range(len(parts))]
    wholes = [
        torch.empty(part.box.shape, dtype=part.tensor.dtype, device=world.device()) if cut else part.tensor
        for part, cut in zip(parts, is_cut, strict=True)
    ]
    for sender, numbers in enumerate(_sent_by(boxes, is_cut)):
        if numbers:
            _send(
                sender, [boxes[sender][i] for i in numbers], [parts[i] for i in numbers], [wholes[i] for i in numbers]
            )
    return wholes


def _sent_by(boxes: Sequence[Sequence[Box]], is_cut: Sequence[bool]) -> list[list[int]]:
    """Return for each rank the numbers of the tensors of which it sends its part: the first one that holds it does."""
    sent: list[list[int]] = [[] for _ in boxes]
    known: set[tuple[int, Box]] = set()
    for rank, of_rank in enumerate(boxes):
        for number, box in enumerate(of_rank):
            if is_cut[number] and 0 not in box.sizes and (number, box) not in known:
                known.add((number, box))
                sent[rank].append(number)
    return sent


def _send(sender: int, boxes: Sequence[Box], parts: Sequence[Chunk], wholes: Sequence[Tensor]) -> None:
    """Put a rank's parts into the whole tensors of all ranks; as bytes, so that types travel together."""
    sizes = [torch.Size(box.sizes).numel() * whole.element_size() for box, whole in zip(boxes, wholes, strict=True)]
    if world.get_rank() == sender:
        flat = torch.cat([part.tensor.to(world.device()).reshape(-1).view(torch.uint8) for part in parts])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device())
    with waiting_in(lambda: f"broadcast of parts of tensors from rank {sender}"):
        dist.broadcast(flat, sender)
    for box, whole, piece in zip(boxes, wholes, flat.split(sizes), strict=True):
        whole[box.slices] = piece.clone().view(whole.dtype).view(box.sizes)  # a clone begins where its type may


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
        network: a module, or an AutoParallel of one; under FSDP2 take parameters from it inside, not from before.

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
    whole values; only those of FSDP2 (DTensors) are replaced in their modules. What gradients are left on them inside
    is dropped at the end, and what was on the parts comes back. A rank holds its parts and the whole network.
    """
    parameters = list(root.parameters())
    parts = [find_chunk(parameter, find_box(parameter)) for parameter in parameters]
    with torch.no_grad():
        pairs = list(zip(parameters, join_chunks(parts), strict=True))
    sharded = {id(p): nn.Parameter(whole, p.requires_grad) for p, whole in pairs if isinstance(p, DTensor)}
    local = [(p, whole) for p, whole in pairs if isinstance(p, PartParameter)]
    with ExitStack() as stack:
        stack.enter_context(holding(local))
        stack.enter_context(unsharded(root, sharded))
        yield
