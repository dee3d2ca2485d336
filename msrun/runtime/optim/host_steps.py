"""Optimizers that work on the host: state and wide weights in its memory, the step on its processor.

The optimizer object stays the user's: its groups hold the network's parameters, its state dict everything that goes on
with it. Its step runs on a stand-in, whose groups hold the wide copies with the gradients that were brought to them.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from msrun.errors import StrategyError
from msrun.runtime.optim.host_weights import (
    HOST,
    MASTER,
    Copies,
    HostWeights,
    Room,
    changed_rows,
    held_gradient,
    is_narrow,
    local_gradient,
    put_gradient,
    wide_room,
    wide_type,
)
from msrun.runtime.parts.part import Part, lying_as
from msrun.runtime.tensors.plain_tensors import local_part, plain

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


LOOK_AT_WHOLES = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
"""Optimizers of torch whose steps are run so; those that look at all parameters at once, such as LBFGS, cannot be."""


def stand_in_with_wholes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer whose groups hold one whole parameter each; to be stepped once, by all ranks together."""
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer), param_groups=_one_at_a_time(optimizer, stand_in))
    return stand_in


def _one_at_a_time(optimizer: torch.optim.Optimizer, stand_in: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    stand_in.state = optimizer.state  # and a hook of the optimizer's own may have loaded other state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or (isinstance(parameter, Part) and not parameter.placement.is_held):
                continue
            if not isinstance(parameter, Part):
                yield {**group, "params": [parameter]}
                continue
            whole = nn.Parameter(_whole(parameter), requires_grad=False)
            whole.grad = _whole(parameter.grad)
            state = {key: _whole(value) for key, value in optimizer.state.get(parameter, {}).items()}
            try:
                optimizer.state[whole] = state
                yield {**group, "params": [whole]}
                local_part(parameter).copy_(local_part(_cut_whole(whole.detach(), parameter)))
                optimizer.state[parameter] = {key: _cut_whole(value, parameter) for key, value in state.items()}
            finally:
                optimizer.state.pop(whole, None)


def _whole(value: Any) -> Any:
    if isinstance(value, Part):
        return value.gather_in_stage()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _cut_whole(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of what has the parameter's shape; everything else as it is."""
    assert isinstance(parameter, Part)
    placed = parameter.placement
    if not (isinstance(value, Tensor) and value.dim() and tuple(value.shape) == placed.shape):
        return value
    return lying_as(parameter, placed.cut(value).clone())


_log = logging.getLogger("msrun.runtime")
_ATTRIBUTE = "_msrun_offload"


def offload(optimizer: Optimizer, *, ratio: float = 1.0, master_weights: bool = True) -> Optimizer:
    """Let an optimizer, torch's, ours or your own, work on the host; returns the same object.

    The weights stay on the device. At `step()` gradients are copied to the host a few parameters at a time, stepped
    there on float32 copies of the weights (float64 of such weights), with torch's fused kernels where the optimizer has
    them, and the new weights are copied back, both through pinned memory where the device is not the CPU. Of weights of
    16 bits the copies are part of the optimizer's state, as `master_weight`.

    Weights may be changed in place between steps, but not through `.data`, which torch does not count as a change.

    Args:
        ratio: share of the parameters' bytes whose optimizer works on the host; the others' stays on the device.
        master_weights: False keeps no float32 copies of 16-bit weights, as in MindSpore's sample of an optimizer on the
            host: updates smaller than half a unit in the last place of a weight are lost.

    Raises:
        StrategyError: not an optimizer, one that cannot work so, or a ratio that is none.
    """
    if not isinstance(optimizer, Optimizer):
        raise StrategyError(f"offload({type(optimizer).__name__}): give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StrategyError("offload(LBFGS): its step evaluates the network many times: use AdamW or another one")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise StrategyError(f"offload(ratio={ratio!r}): must be a number above 0, 1 at most")
    known = find_offload(optimizer)
    if known is not None:
        known.bring_back(optimizer)
    Offload(optimizer, float(ratio), keeps_masters=master_weights)
    return optimizer


def find_offload(optimizer: Optimizer) -> Offload | None:
    """Return how an optimizer works on the host; None if it works on the device."""
    found: Offload | None = vars(optimizer).get(_ATTRIBUTE)
    return found


class Offload:
    """How one optimizer works on the host."""

    def __init__(self, optimizer: Optimizer, ratio: float, *, keeps_masters: bool) -> None:
        self.ratio = ratio
        self.weights = HostWeights(keeps=keeps_masters)
        self._room = Room()
        self._copied = Copies()
        self.last_step = Copies()
        """Bytes copied for the last step, from the end of the one before."""
        self._is_warned = keeps_masters
        self._loaded: dict[Any, Any] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        vars(optimizer)[_ATTRIBUTE] = self

    def bring_back(self, optimizer: Optimizer) -> None:
        """Let the optimizer work on the device again, with its state."""
        for hook in self._hooks:
            hook.remove()
        del vars(optimizer)[_ATTRIBUTE]
        saved = optimizer.state_dict()
        for values in saved["state"].values():
            values.pop(MASTER, None)
        optimizer.load_state_dict(saved)

    def chosen(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of the parameters whose optimizer works on the host: `ratio` of the bytes, evenly spread."""
        found, chosen, seen = set(), 0.0, 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                size = parameter.numel() * parameter.element_size()
                seen += size
                if chosen + size / 2 <= self.ratio * seen:
                    found.add(id(parameter))
                    chosen += size
        return found

    def stand_in(self, optimizer: Optimizer, whole: Optimizer | None = None) -> Optimizer:
        """Return what steps in the optimizer's place, once; then `finish` it.

        Args:
            whole: the optimizer with all of its parameters, where `optimizer` is to step some of them.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if isinstance(optimizer, LOOK_AT_WHOLES) and any(isinstance(value, Part) for value in parameters):
            raise StrategyError(
                f"{type(optimizer).__name__} on the host looks at whole tensors, and of {len(parameters)} parameters "
                "some are cut: let it work on the device, or use an element-wise optimizer such as AdamW"
            )
        if not self._is_warned and any(is_narrow(parameter) for parameter in parameters):
            self._is_warned = True
            _log.warning(
                "%s: weights of 16 bits without master weights: updates smaller than half a unit in the last place of "
                "a weight are lost; use master_weights=True",
                type(optimizer).__name__,
            )
        stand_in: Optimizer = object.__new__(type(optimizer))
        state: defaultdict[Any, Any] = defaultdict(dict)
        groups: Any = HostGroups(self.weights, self._room, optimizer, state, self.chosen(whole or optimizer))
        vars(stand_in).update(vars(optimizer), param_groups=groups, state=state)
        return stand_in

    def finish(self, optimizer: Optimizer, stand_in: Optimizer) -> None:
        """Take over what the step has left on its stand-in."""
        groups: Any = stand_in.param_groups
        groups.finish()
        own = {key: value for key, value in vars(stand_in).items() if key not in ("param_groups", "state")}
        vars(optimizer).update(own)

    def note_step(self) -> None:
        """Begin to count the copies of another step; a step that copied nothing is none."""
        copied = self.weights.copies - self._copied
        if copied != Copies():
            self.last_step = copied
            self._copied = self.weights.copies - Copies()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.stand_in(optimizer), *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, _: Any) -> None:
        self.finish(optimizer, args[0])
        self.note_step()

    def _before_load(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        self._loaded = {index: dict(state_dict["state"].get(number, {})) for index, number in enumerate(numbers)}

    def _after_load(self, optimizer: Optimizer) -> None:
        """Put the state on the host as it was saved; torch would narrow it and put it on the device."""
        chosen = self.chosen(optimizer)
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            values = self._loaded.get(index)
            if values:
                place = HOST if id(parameter) in chosen else parameter.device
                optimizer.state[parameter] = {key: _own(value, place) for key, value in values.items()}
        self._loaded = {}


def _own(value: Any, place: torch.device) -> Any:
    """Return a copy of a loaded value; a DTensor is cut, or joined, when the step finds it."""
    if isinstance(value, DTensor):
        return copy.deepcopy(value)
    return value.to(place, copy=True) if isinstance(value, Tensor) else value
