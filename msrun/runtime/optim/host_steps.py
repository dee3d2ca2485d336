"""Optimizers that work on the host: state and wide weights in its memory, the step on its processor.

The optimizer object stays the user's: its groups hold the network's parameters, its state dict everything that goes on
with it. Its step runs on a stand-in, whose groups hold the wide copies with the gradients that were brought to them.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from msrun.errors import StrategyError
from msrun.runtime.optim.host_groups import HostGroups
from msrun.runtime.optim.host_weights import (
    HOST,
    MASTER,
    Copies,
    HostWeights,
    Room,
    is_narrow,
)
from msrun.runtime.optim.whole_steps import LOOK_AT_WHOLES
from msrun.runtime.parts.part import Part

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

        Raises:
            StrategyError: the step looks at whole tensors of which this rank holds parts.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if isinstance(optimizer, LOOK_AT_WHOLES) and any(isinstance(value, Part | DTensor) for value in parameters):
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
