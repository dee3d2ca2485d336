"""Fakes: stand-ins of global shape for parameters and inputs while a call is traced; nothing of them takes memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

GlobalShape = tuple[int, ...]


@dataclass
class Fakes:
    """What stands in for what."""

    inputs: list[Tensor]
    """One for every tensor that the call is given, in order."""
    names: dict[int, str] = field(default_factory=dict)
    """id of a stand-in -> the parameter's or buffer's first name"""
    kept: dict[int, Any] = field(default_factory=dict)
    """id of what is stood for -> its stand-in"""

    @property
    def ids(self) -> set[int]:
        """Of all stand-ins, of the lists that hold some, and of what they stand for, which references may reach."""
        return {id(value) for value in (*self.inputs, *self.kept.values())} | self.kept.keys()


@contextlib.contextmanager
def faked(
    root: nn.Module, given: Sequence[Tensor], shapes: Sequence[GlobalShape], of_parameters: Mapping[str, GlobalShape]
) -> Iterator[Fakes]:
    """Put fakes in place of the parameters, and of buffers without values; tied ones stay tied.

    Args:
        given: the tensors of the call.
        shapes: their global shapes.
        of_parameters: parameter name -> global shape, of those that hold a part.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of([*given, *root.parameters(), *root.buffers()])
    with mode:
        fakes = Fakes([_like(tensor, shape, device) for tensor, shape in zip(given, shapes, strict=True)])
    stand_ins: dict[int, Any] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    names: dict[int, str] = {}
    for name, value in (*root.named_parameters(), *root.named_buffers()):
        names[id(value)] = name
    for module in root.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        for table in tables:
            for key, value in table.items():
                if not isinstance(value, Tensor) or not (isinstance(value, nn.Parameter) or value.is_meta):
                    continue
                if id(value) not in stand_ins:
                    name = names.get(id(value), key)
                    shape = of_parameters.get(name, tuple(value.shape))
                    with mode:
                        fake = _like(value, shape, device)
                    stand_ins[id(value)] = fake
                    fakes.names[id(fake)] = name
                undo.append((table, key, value))
        flat_weights = vars(module).get("_flat_weights")
        if isinstance(module, nn.RNNBase) and flat_weights is not None:  # recurrent layers read this list instead
            undo.append((vars(module), "_flat_weights", flat_weights))
            stand_ins[id(flat_weights)] = [stand_ins.get(id(weight), weight) for weight in flat_weights]
            # ... unless the weights are others than those that were in it, which reads what this rank holds
            references = module._flat_weight_refs
            undo.append((vars(module), "_flat_weight_refs", references))
            stand_ins[id(references)] = [weakref.ref(weight) for weight in stand_ins[id(flat_weights)]]
    fakes.kept = stand_ins
    for table, key, value in undo:
        table[key] = stand_ins[id(value)]
    try:
        yield fakes
    finally:
        for table, key, value in undo:
            table[key] = value


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device that a network is captured for; some of its tensors may lie on the host beside it."""
    host = torch.device("cpu")
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), host)


def _like(value: Tensor, shape: GlobalShape, device: torch.device) -> Tensor:
    fake = torch.empty(shape, dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, value.requires_grad)
    return fake.requires_grad_(value.requires_grad)


def forget_shapes() -> None:
    """Let torch forget what operators make of the shapes that it has seen, which it keeps for ever."""
    FakeTensorMode.cache_clear()
