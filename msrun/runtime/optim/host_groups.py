"""The groups of an optimizer while it steps on the host: gradients come and weights go back, a few at a time."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from msrun.runtime.optim.host_gradients import held_gradient
from msrun.runtime.optim.host_weights import (
    HOST,
    MASTER,
    HostWeights,
    Room,
    is_narrow,
    local_gradient,
    put_gradient,
    wide_room,
    wide_type,
)
from msrun.runtime.optim.named_rows import changed_rows
from msrun.runtime.tensors.plain_tensors import plain

CHUNK_BYTES = 1 << 20
"""Gradients of so many bytes are brought to the host while others are stepped; of whole parameters, so that all ranks
step the same ones together."""
_STEPS_ONCE = ("torch.optim.", "msrun.runtime.optim.")
"""Modules of optimizers whose steps go through their groups once, and look at no parameter beside the group's."""


class HostGroups(Sequence[dict[str, Any]]):
    """The groups of a stand-in, which hold wide copies in place of parameters.

    Steps of torch's optimizers and of ours go through them once: gradients then come, and weights leave, a few at a
    time. Others get all copies of a group at once, and may look at them as they like.
    """

    def __init__(
        self,
        weights: HostWeights,
        room: Room,
        optimizer: Optimizer,
        state: defaultdict[Any, Any],
        chosen: set[int],
    ) -> None:
        self._weights, self._room = weights, room
        self._optimizer, self._state, self._chosen = optimizer, state, chosen
        self._is_walked_once = inspect.unwrap(type(optimizer).step).__module__.startswith(_STEPS_ONCE)
        self._whole: list[_Chunk] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._stream() if self._is_walked_once else iter([chunk.group for chunk in self._prepared()])

    def __len__(self) -> int:
        return len(self._prepared())

    def __getitem__(self, index: Any) -> Any:
        return [chunk.group for chunk in self._prepared()][index]

    def finish(self) -> None:
        """Copy back what was handed out all at once."""
        for chunk, group in zip(self._whole or (), self._optimizer.param_groups, strict=False):
            chunk.finish()
            group.update({key: value for key, value in chunk.group.items() if key not in ("params", *_OF_THE_HOST)})
        self._whole = None

    def _prepared(self) -> list[_Chunk]:
        if self._whole is None:
            self._whole = [self._chunk(group, group["params"]) for group in self._optimizer.param_groups]
            for chunk in self._whole:
                chunk.prepare()
        return self._whole

    @torch.no_grad()
    def _stream(self) -> Iterator[dict[str, Any]]:
        """Give a few parameters at a time; those of the device first, which works beside the host."""
        chunks = [
            self._chunk(group, some)
            for on_host in (False, True)
            for group in self._optimizer.param_groups
            for some in _cut([p for p in group["params"] if (id(p) in self._chosen) == on_host])
        ]
        room = self._room  # is written to when a gradient has come, and read no more after its chunk's step
        for chunk, ahead in zip(chunks, [*chunks[1:], None], strict=False):
            chunk.start(room.enter())
            if ahead is not None and chunk.is_fetched and ahead.is_fetched:
                ahead.start(room.enter())
            chunk.prepare()
            yield chunk.group
            chunk.finish()

    def _chunk(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> _Chunk:
        return _Chunk(self._weights, self._optimizer, self._state, group, parameters, self._chosen)


_OF_THE_HOST = ("fused", "foreach")
"""Settings of a group that are others on the host."""


class _Chunk:
    """Some parameters of one group on their way through a step."""

    def __init__(
        self,
        weights: HostWeights,
        optimizer: Optimizer,
        state: defaultdict[Any, Any],
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        chosen: set[int],
    ) -> None:
        self._weights, self._optimizer, self._state = weights, optimizer, state
        self._parameters = [(parameter, id(parameter) in chosen) for parameter in parameters]
        self._gradients: dict[int, Tensor] = {}
        self._is_started = False
        self._stepped: list[tuple[Tensor, Any, bool]] = []
        self.group = {**group, "params": []}

    @property
    def is_fetched(self) -> bool:
        """Whether the copies of gradients run beside the host's work."""
        return all(parameter.device != HOST for parameter, _ in self._parameters)

    @torch.no_grad()
    def start(self, make: Callable[[Tensor], Tensor] = wide_room) -> None:
        """Start bringing the gradients of the parameters on the host, to memory that `make` gives."""
        if self._is_started:
            return
        self._is_started = True
        away: list[tuple[Tensor, Tensor]] = []
        for parameter, on_host in self._parameters:
            held = held_gradient(parameter)
            gradient = local_gradient(parameter) if held is None else held
            if gradient is not None:
                self._gradients[id(parameter)] = gradient
                if on_host and held is None:
                    away.append((parameter, gradient))
        self._fetched = self._weights.fetch([gradient for _, gradient in away], make)
        self._away = [id(parameter) for parameter, _ in away]

    @torch.no_grad()
    def prepare(self) -> None:
        """Have the group hold what is to be stepped, with gradients and state."""
        self.start()
        self._gradients.update(zip(self._away, self._fetched.wait(), strict=True))
        del self._fetched, self._away
        is_sparse = False
        for parameter, on_host in self._parameters:
            gradient = self._gradients.pop(id(parameter), None)
            if gradient is None:
                self.group["params"].append(parameter)
                continue
            own = dict(self._optimizer.state.get(parameter, {}))
            stepped = self._weights.take(parameter, own.pop(MASTER, None), on_host=on_host)
            put_gradient(stepped, gradient.to(stepped.dtype))
            is_sparse = is_sparse or gradient.is_sparse
            place = HOST if on_host else parameter.device
            if own:
                self._state[stepped] = {key: _to(value, place, parameter) for key, value in own.items()}
            self._stepped.append((parameter, stepped, on_host))
            self.group["params"].append(stepped)
        if all(on_host for _, on_host in self._parameters) and not is_sparse:
            self.group.update(_fused(self.group))

    @torch.no_grad()
    def finish(self) -> None:
        """Give the weights back to the device and the state to the optimizer."""
        for parameter, stepped, on_host in self._stepped:
            self._weights.give(parameter, stepped, changed_rows(self._optimizer, self.group, stepped), on_host=on_host)
            stepped.grad = None
            own = self._state.pop(stepped, {})
            if self._weights.keeps and is_narrow(parameter):
                own = {**own, MASTER: stepped.detach() if isinstance(stepped, DTensor) else plain(stepped)}
            if own:
                self._optimizer.state[parameter] = own
        self._stepped.clear()


def _cut(parameters: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Yield parameters a few at a time, by the bytes of whole ones."""
    some: list[Tensor] = []
    size = 0
    for parameter in parameters:
        size += parameter.numel() * parameter.element_size()
        some.append(parameter)
        if size >= CHUNK_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _to(value: Any, place: torch.device, parameter: Tensor) -> Any:
    """Return a value of the state where the step is; what is as narrow as its weight becomes as wide as its copy."""
    if not isinstance(value, Tensor):
        return value
    is_wide = not (value.dim() and value.dtype == parameter.dtype and is_narrow(parameter))
    return value.to(place, value.dtype if is_wide else wide_type(parameter))


def _fused(group: dict[str, Any]) -> dict[str, Any]:
    """Return settings that let torch step with its fused kernels of the CPU, where it has them."""
    is_free = group.get("fused", False) is None and not group.get("foreach") and not group.get("differentiable")
    return {"fused": True, "foreach": False} if is_free and not isinstance(group.get("lr"), Tensor) else {}
