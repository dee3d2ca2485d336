"""Training steps that leave no trace in a network, nor in what its code writes to."""

from __future__ import annotations

import io
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.parallel.parameters.storage import after_placement
from msrun.runtime.tensors.plain_tensors import local_part

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, hooks, ... The training flag is the user's."""
_MANY = 1000
"""A container of more elements is put back, but not what these hold."""
_LARGE = 1 << 22
"""Containers and tensors of more elements are data, which a step reads: they are left alone."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class Before:
    """What a step changes in a network and in what its code can reach, as it was before.

    That is: parameters, buffers, attributes of modules, tensors in them with their gradients, lists, dicts, sets and
    generators that the modules, their hooks and `code` hold, the stream of dropout.
    """

    def __init__(self, root: nn.Module, code: Callable[..., Any] | None = None) -> None:
        self._root = root
        self._code = code
        self.take()

    def take(self) -> None:
        """Remember everything as it is now."""
        modules = list(self._root.modules())
        self._buffers = [
            (module, name, buffer, None if buffer.is_meta else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        with torch.no_grad():
            parts = [local_part(p) for p in self._root.parameters() if not p.is_meta]
            self._parameters = [(part, part.clone()) for part in parts]
        self._attributes = [(module, _attributes_of(module)) for module in modules]
        self._puts: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        for module, attributes in self._attributes:
            for value in attributes.values():
                self._look(value)
            for name in _HOOKS:
                for hook in getattr(module, name).values():
                    self._look(hook)
        self._look(self._code)
        self._stream = stream_of(self._root)
        self._draws = self._stream.seed, self._stream.step

    def _look(self, value: Any) -> None:
        """Remember what a value holds that code can write to."""
        if isinstance(value, (*_PLAIN, nn.Module, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_meta and type(value) is Tensor and value.numel() <= _LARGE:
                self._puts.append(partial(_put_tensor, value, value.detach().clone()))
                if value.requires_grad and value.is_leaf:
                    gradient = value.grad
                    self._puts.append(partial(_put_gradient, value, gradient, _copy_of(gradient)))
        elif isinstance(value, _GENERATORS):
            self._puts.append(_state_of(value))
        elif type(value) in _CONTAINERS and len(value) <= _LARGE:
            held: list[Any] = list(value.items() if isinstance(value, dict) else value)
            self._puts.append(partial(_put_content, value, held))
            for inner in held if len(held) <= _MANY else ():
                self._look(inner)
        elif isinstance(value, tuple):
            for inner in value:
                self._look(inner)
        elif isinstance(value, partial):
            self._look((value.func, value.args, *value.keywords.values()))
        elif isinstance(value, MethodType):
            self._look((value.__func__, *getattr(value.__self__, "__dict__", {}).values()))
        elif isinstance(value, FunctionType) and value.__module__.partition(".")[0] not in ("torch", "msrun"):
            for cell in value.__closure__ or ():
                try:
                    self._look(cell.cell_contents)
                except ValueError:  # it is empty
                    continue
            for name in value.__code__.co_names:
                if type(held_by := value.__globals__.get(name)) in _CONTAINERS or isinstance(held_by, FunctionType):
                    self._look(held_by)

    def put_back(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for part, value in self._parameters:
                _put_tensor(part, value)
            for module, name, buffer, kept in self._buffers:
                module._buffers[name] = buffer
                if kept is not None:
                    _put_tensor(buffer, kept)
            for module, attributes in self._attributes:
                present = vars(module)
                for name in _attributes_of(module).keys() - attributes.keys():
                    del present[name]
                present.update(attributes)
            for put in self._puts:
                put()
        self._stream.seed, self._stream.step = self._draws


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its code may assign in a step."""
    kinds = (*_PLAIN, *_CONTAINERS, *_GENERATORS, Tensor, tuple)
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, kinds) and (name not in _OF_MODULES or name == "training")
    }


def _put_tensor(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape and not torch.equal(tensor, value):
        tensor.copy_(value)


def _copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _put_gradient(leaf: Tensor, gradient: Tensor | None, kept: Tensor | None) -> None:
    if gradient is not None and kept is not None:
        gradient.copy_(kept)
    leaf.grad = gradient


def _put_content(container: Any, held: list[Any]) -> None:
    present = list(container.items() if isinstance(container, dict) else container)
    if len(present) == len(held) and all(_is_same(a, b) for a, b in zip(present, held, strict=True)):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(held)
    else:
        container.extend(held)


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two elements are one object; of items of a dict, whether key and value are."""
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second) == 2:
        return first[0] is second[0] and first[1] is second[1]
    return first is second


def _state_of(generator: Any) -> Callable[[], None]:
    """Return what sets a random generator back to where it stands."""
    if isinstance(generator, torch.Generator):
        return partial(_put_state, generator, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def _put_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


class _SilentHere(io.TextIOBase):
    """A stdout that forgets what one thread prints and hands on what others do."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._real = sys.stdout

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._real.write(text)

    def flush(self) -> None:
        self._real.flush()


@contextmanager
def untouched(root: nn.Module, code: Callable[..., Any] | None = None) -> Iterator[Before]:
    """Let training steps run without a trace: at the end the network is as it was, or as its first call has placed it.

    Hooks that run after gradients were accumulated, such as an optimizer's, do not run inside. What is printed is not
    shown: the step that counts prints it.

    Args:
        code: runs in these steps, beside the network's own.
    """
    before = Before(root, code)
    kept = [(parameter, parameter.grad) for parameter in root.parameters()]
    hooks = [(h, dict(h)) for p, _ in kept if (h := getattr(p, "_post_accumulate_grad_hooks", None))]
    for parameter, _ in kept:
        parameter.grad = None
    for of_parameter, _ in hooks:
        of_parameter.clear()
    token = after_placement.set(before.take)
    try:
        with redirect_stdout(_SilentHere()):
            yield before
    finally:
        after_placement.reset(token)
        before.put_back()
        for of_parameter, all_of_them in hooks:
            of_parameter.update(all_of_them)
        for parameter in root.parameters():
            parameter.grad = None
        for parameter, gradient in kept:
            if gradient is None or local_part(gradient).shape == local_part(parameter).shape:  # a first call cuts them
                parameter.grad = gradient
