"""Training steps that leave no trace in a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.parallel.parameters.storage import after_placement

_PLAIN = (bool, int, float, str, type(None))


class Before:
    """What a step changes in a network, as it was before."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.take()

    def take(self) -> None:
        """Remember buffers, plain attributes and the stream of dropout as they are now."""
        modules = list(self._root.modules())
        self._buffers = [
            (module, name, buffer, None if buffer.is_meta else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._plain = [(m, {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)}) for m in modules]
        self._stream = stream_of(self._root)
        self._draws = self._stream.seed, self._stream.step

    def put_back(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                if value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for module, plain in self._plain:
            vars(module).update(plain)
        self._stream.seed, self._stream.step = self._draws


@contextmanager
def untouched(root: nn.Module) -> Iterator[Before]:
    """Let training steps run without a trace: at the end the network is as it was, or as its first call has placed it.

    Hooks that run after gradients were accumulated, such as an optimizer's, do not run inside.
    """
    before = Before(root)
    kept = [(parameter, parameter.grad) for parameter in root.parameters()]
    hooks = [(h, dict(h)) for p, _ in kept if (h := getattr(p, "_post_accumulate_grad_hooks", None))]
    for parameter, _ in kept:
        parameter.grad = None
    for of_parameter, _ in hooks:
        of_parameter.clear()
    token = after_placement.set(before.take)
    try:
        yield before
    finally:
        after_placement.reset(token)
        before.put_back()
        for of_parameter, all_of_them in hooks:
            of_parameter.update(all_of_them)
        for parameter in root.parameters():
            parameter.grad = None
        for parameter, gradient in kept:
            if gradient is None or gradient.shape == parameter.shape:  # a first call cuts them
                parameter.grad = gradient
