"""Whole values: what the ranks hold in parts, joined on every rank; and a network that holds them for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.parallel.modes.fsdp import unsharded
from msrun.runtime.parallel.parameters.network_state import Chunk, find_box, find_chunk
from msrun.runtime.parts.part import PartParameter
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.box import Box
from msrun.runtime.tensors.put_value import holding


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


@contextmanager
def whole_parameters(root: nn.Module) -> Iterator[None]:
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
