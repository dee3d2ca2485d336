"""What a value is, as text that is equal in every process in which it is the same: of code, classes and settings too.

Two values of equal text do the same in a capture; what has no such text, as an object that only its identity tells
apart, is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_CODE = (
    "co_name",
    "co_filename",
    "co_firstlineno",
    "co_linetable",
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_exceptiontable",
)
"""Attributes of code beside its constants; lines too, which messages name."""


_ANSWERS = (
    importlib.util.find_spec,
    importlib.metadata.version,
    torch.cuda.current_device,
    torch.cuda.get_device_properties,
    torch.xpu.current_device,
    torch.xpu.get_device_properties,
    torch.accelerator.current_device_index,
    torch.distributed.get_rank,
)
"""Functions whose result dynamo takes for a constant that nothing guards: on another rank or host it is another."""


class UnportableError(Exception):
    """Something has no text that is equal in another process."""


def hash_of(text: str) -> str:
    """Return a digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def text_of(value: Any, known: Mapping[int, str] = types.MappingProxyType({})) -> str:
    """Return the text of a value.

    Args:
        known: id of an object -> its text.

    Raises:
        UnportableError: it has none.
    """
    kind = type(value)
    if id(value) in known:
        return known[id(value)]
    if kind in _PLAIN or isinstance(value, _OF_TORCH):
        return f"{kind.__name__} {value!r}"
    if isinstance(value, type):
        return text_of_class(value)
    if isinstance(value, types.CodeType):
        return _text_of_code(value)
    if isinstance(value, types.FunctionType):
        return _text_of_function(value, ())
    if isinstance(value, types.MethodType):
        owner = value.__self__
        return f"method {text_of(value.__func__)} of {text_of(owner if isinstance(owner, type) else type(owner))}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, _BUILTIN):
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType | type) or "pybind11" in type(owner).__module__:
            return f"builtin {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')} {value.__name__}"
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
        return f"operator {value}"
    if isinstance(value, enum.Enum):
        return f"{text_of_class(kind)} {value.name} {text_of(value.value, known)}"
    if isinstance(value, functools.partial):
        return f"partial {text_of((value.func, value.args, value.keywords), known)}"
    if isinstance(value, pathlib.PurePath):
        return f"path {value}"
    inner = _parts(value, known)
    if inner is None:
        raise UnportableError(f"a {kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}.{kind.__qualname__}({inner})"


def _parts(value: Any, known: Mapping[int, str]) -> str | None:
    """Return the text of what a value consists of; None where nobody knows."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return ", ".join(f"{each.name}={text_of(getattr(value, each.name), known)}" for each in fields)
    if isinstance(value, Mapping):
        return ", ".join(f"{text_of(key, known)}: {text_of(value[key], known)}" for key in value)
    if isinstance(value, Set):
        return ", ".join(sorted(text_of(each, known) for each in value))
    if isinstance(value, Sequence):
        return ", ".join(text_of(each, known) for each in value)
    return None


def _text_of_code(code: types.CodeType) -> str:
    return f"code {_hash_of_code(code)}"


@functools.lru_cache(1 << 14)
def _hash_of_code(code: types.CodeType) -> str:
    parts = [repr(getattr(code, name)) for name in _CODE]
    return hash_of("\n".join([*parts, *map(text_of, code.co_consts)]))


def _text_of_function(function: types.FunctionType, around: tuple[Any, ...]) -> str:
    """Return the text of a function with its defaults and, where they are functions or plain, what it closes over."""
    if function in _ANSWERS or "_dynamo_marked_constant" in vars(function):
        raise UnportableError(f"the result of {function.__qualname__}, which is taken for a constant")
    cells = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # nothing was put there yet
            value = None
        if isinstance(value, types.FunctionType) and value not in around and value is not function:
            cells.append(_text_of_function(value, (*around, function)))
        else:
            cells.append(text_of(value) if type(value) in _PLAIN else type(value).__qualname__)
    defaults = [_or_kind(each) for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())]
    return f"function {function.__module__} {_text_of_code(function.__code__)} {defaults} {cells}"


def _or_kind(value: Any) -> str:
    """Return the text of what stands in a class or a signature, which a guard looks at where it is read."""
    try:
        return text_of(value)
    except UnportableError:
        return type(value).__qualname__


_classes: dict[type, str] = {}


def text_of_class(kind: type) -> str:
    """Return the text of a class with the code of its methods, and of those that it inherits."""
    if kind not in _classes:
        _classes[kind] = f"class {kind.__module__}.{kind.__qualname__}"  # in what its own methods refer to
        _classes[kind] += f" {hash_of(repr([_text_of_body(each) for each in kind.__mro__[:-1]]))}"
    return _classes[kind]


def _text_of_body(kind: type) -> list[str]:
    found = [f"{kind.__module__}.{kind.__qualname__}"]
    if kind.__flags__ & (1 << 9):  # a class that Python code has made: others cannot be changed
        for name, value in vars(kind).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            is_told = isinstance(function, types.FunctionType) or type(function) in _PLAIN
            if is_told and not (name.startswith("__") and not isinstance(function, types.FunctionType)):
                found.append(f"{name} {text_of(function)}")
    return found


def text_of_modules(root: nn.Module) -> str:
    """Return the text of what a network consists of, but for its attributes: these are guarded.

    Raises:
        UnportableError: it is called with what has no text.
    """
    if nn.modules.module._has_any_global_hook():
        raise UnportableError("a hook of all modules")
    _classes.clear()  # some may have got other methods since the last call
    classes: dict[type, None] = dict.fromkeys(map(type, root.modules()))
    shapes = [
        (
            name,
            type(value).__qualname__,
            tuple(value.shape),
            value.stride(),
            str(value.dtype),
            str(value.device),
            value.requires_grad,
        )
        for name, value in (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        )
    ]
    first: dict[int, str] = {}
    tied = [
        first.setdefault(id(value), name)
        for table in (root.named_parameters, root.named_buffers)
        for name, value in table(remove_duplicate=False)
    ]
    modules = [
        (name, type(each).__qualname__, each.training, len(each._backward_hooks) + len(each._backward_pre_hooks))
        for name, each in root.named_modules()
    ]
    return "\n".join([*map(text_of_class, classes), repr(shapes), repr(tied), repr(modules)])
