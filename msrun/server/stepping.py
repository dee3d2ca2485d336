"""Where a worker's optimizer steps: gradients of parameters on the servers go there, and are gone for the optimizer.

One message to every server brings all gradients of a step; its reply brings the new values of parameters that every
worker has whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from msrun.errors import ParallelError
from msrun.runtime import world
from msrun.runtime.execute.gradients import summed_rows
from msrun.runtime.nn.replaced import follow
from msrun.runtime.parts.on_servers import before_remote_steps, find_remote, find_remotes
from msrun.server.connection import ask
from msrun.server.frames import MAX_BODY_BYTES, Message
from msrun.server.lookup import empty_like_nan
from msrun.server.remote import Piece, RemoteParameter, number_rows, split_numbers
from msrun.server.shard import describe_group, name_optimizer

_BATCH_BYTES = MAX_BODY_BYTES // 2
_told: WeakSet[torch.optim.Optimizer] = WeakSet()


@functools.cache
def send_gradients_at_steps() -> None:
    """Do so from now on, with all optimizers; once in a process."""
    register_optimizer_step_pre_hook(_before_step)


@dataclass
class _Batch:
    """One request to one server."""

    pushes: list[list[Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[tuple[RemoteParameter, Piece, Tensor]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    size: int = 0

    def message(self) -> Message:
        pulls = [remote.key(piece) for remote, piece, _ in self.pulls]
        return Message("step", {"pushes": self.pushes, "groups": self.groups, "pulls": pulls}, self.tensors)

    def add(
        self, remote: RemoteParameter, piece: Piece, group: dict[str, Any], tensors: list[Tensor], how: str
    ) -> None:
        if not self.groups or self.groups[-1] != group:
            self.groups.append(group)
        self.pushes.append([remote.key(piece), how, len(self.groups) - 1])
        self.tensors += tensors


@torch.no_grad()
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    follow(optimizer)
    groups = [(group, list(find_remotes(group["params"]))) for group in optimizer.param_groups]
    if not any(found for _, found in groups):
        return
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):  # args[0] is the optimizer
        raise ParallelError("optimizer.step(closure) with parameters on servers: compute the loss before step()")
    name = name_optimizer(optimizer)
    described = [(describe_group(group), found) for group, found in groups]
    for group, found in described:
        for parameter, remote in found:
            _introduce(optimizer, parameter, remote, name, group)
    for prepare in before_remote_steps:
        prepare(optimizer)
    for _, found in described:
        for parameter, remote in found:
            if optimizer.state.get(parameter):  # loaded with load_state_dict
                _give_state(optimizer, parameter, remote)
    _exchange(described)


def _introduce(
    optimizer: torch.optim.Optimizer, parameter: Tensor, remote: RemoteParameter, name: str, group: dict[str, Any]
) -> None:
    if not remote.is_placed:
        remote.place(parameter.detach())
        if remote.is_table:
            parameter.data = empty_like_nan(parameter)
    if not remote.optimizer:
        remote.configure(name, group)
        _tell_of_state(optimizer)


def _give_state(optimizer: torch.optim.Optimizer, parameter: Tensor, remote: RemoteParameter) -> None:
    """Send what the optimizer here knows of a parameter, rank 0's, and forget it."""
    state = optimizer.state.pop(parameter)
    if world.get_rank() != 0:
        return
    shaped = {key: value for key, value in state.items() if _has_shape(value, parameter, key)}
    for key, value in shaped.items():
        remote.write(key, 0, remote.rows_of(value))
    remote.write_numbers({key: value for key, value in state.items() if key not in shaped})


def _has_shape(value: Any, parameter: Tensor, key: str) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() > 0 or key != "step")


def _exchange(described: list[tuple[dict[str, Any], list[tuple[Tensor, RemoteParameter]]]]) -> None:
    """Send all gradients, and take new values for the parameters that are whole here."""
    rounds: dict[int, list[_Batch]] = {}
    for group, found in described:
        for parameter, remote in found:
            for piece, tensors, how in _cut_gradient(parameter.grad, remote):
                batches = rounds.setdefault(piece.server, [_Batch()])
                size = sum(tensor.nbytes for tensor in tensors) + remote.pulled_bytes(piece)
                if batches[-1].pushes and batches[-1].size + size > _BATCH_BYTES:
                    batches.append(_Batch())
                batches[-1].add(remote, piece, group, tensors, how)
                batches[-1].size += size
                if not remote.is_table:
                    batches[-1].pulls.append((remote, piece, parameter))
            parameter.grad = None
            remote.pushed += 1
    for number in range(max(map(len, rounds.values()))):
        batches_now = {server: batches[number] for server, batches in rounds.items() if number < len(batches)}
        replies = ask({server: batch.message() for server, batch in batches_now.items()})
        for server, batch in batches_now.items():
            for (remote, piece, parameter), values in zip(batch.pulls, replies[server].tensors, strict=True):
                piece.of(remote.rows_of(parameter.detach())).copy_(values)


def _cut_gradient(gradient: Tensor | None, remote: RemoteParameter) -> Iterator[tuple[Piece, list[Tensor], str]]:
    """Yield for every piece what is sent of a gradient, and how."""
    if gradient is None:
        yield from ((piece, [], "none") for piece in remote.pieces)
    elif gradient.is_sparse:
        numbers = number_rows(remote.pieces, gradient._indices()[0].to("cpu"))
        numbers, values = summed_rows(numbers, gradient._values().to("cpu"))
        for piece, part, own in split_numbers(remote.pieces, numbers):
            yield piece, [own, values[part]], "sparse" if remote.is_sparse else "rows"
    else:
        gradient = remote.rows_of(gradient)
        yield from ((piece, [piece.of(gradient)], "dense") for piece in remote.pieces)


def _tell_of_state(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.state_dict()` hold the state that the servers have."""
    if optimizer not in _told:
        _told.add(optimizer)
        optimizer.register_state_dict_post_hook(_add_state)


def _add_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        remote = find_remote(parameter)
        if remote is not None and remote.optimizer and not optimizer.state.get(parameter):
            numbers, dtypes = remote.describe_state()
            state_dict["state"][number] = {**numbers, **{key: remote.read_all(key, dtypes[key]) for key in dtypes}}
