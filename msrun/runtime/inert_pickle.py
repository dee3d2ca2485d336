"""Pickles that other programs wrote, read without running or importing anything that they name.

A pickle can name any function of any module to be called. Here every name stands for a record of what it would have
been called with, and a name that the caller does not expect is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar


class Named:
    """In the place of what a pickle would have made: the class is in the place of the name, an object of a call."""

    module: ClassVar[str]
    name: ClassVar[str]
    args: tuple[Any, ...]
    """What it would have been called with."""
    state: Any
    """What it would have been given afterwards; None for nothing."""

    def __new__(cls, *args: Any) -> Named:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_inert(content: bytes, expects: Callable[[str, str], bool], *, encoding: str = "ASCII") -> Any:
    """Return what a pickle holds: plain values, and `Named` for everything else.

    Args:
        expects: whether a module and a name in it may occur.
        encoding: of the text that Python 2 wrote.

    Raises:
        pickle.UnpicklingError: it is damaged, or names something that is not expected.
    """
    stream = io.BytesIO(content)
    try:
        return _Unpickler(stream, expects, encoding).load()
    except Exception as error:  # bytes of any kind make the unpickler raise anything
        ends = isinstance(error, EOFError)
        reason = "it ends too early" if ends else " ".join(str(error).split()) or type(error).__name__
        raise pickle.UnpicklingError(f"at byte {stream.tell()} of {len(content)}: {reason}") from error


class _PlainDict(dict[Any, Any]):
    """Its keys are plain: the hash of a tuple that is nested deeply enough ends the process."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes | int | Named):
            raise pickle.UnpicklingError(f"it holds a dictionary with a {type(key).__name__} as a key")
        super().__setitem__(key, value)


def _load_dict(unpickler: Any) -> None:
    items, made = unpickler.pop_mark(), _PlainDict()
    for key, value in zip(items[::2], items[1::2], strict=True):
        made[key] = value
    unpickler.append(made)


class _Unpickler(pickle._Unpickler):
    """Python's own, not that in C, which takes memory by numbers in the pickle."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code])
        not in (pickle.EMPTY_SET, pickle.FROZENSET, pickle.ADDITEMS, pickle.EXT1, pickle.EXT2, pickle.EXT4)
    }
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_PlainDict())
    dispatch[pickle.DICT[0]] = _load_dict

    def __init__(self, stream: io.BytesIO, expects: Callable[[str, str], bool], encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self._expects = expects
        self._named: dict[tuple[str, str], type[Named]] = {}

    def find_class(self, module: str, name: str) -> type[Named]:
        """Return the record that stands for a name, made for this pickle alone."""
        if (module, name) not in self._named:
            if not self._expects(module, name):
                raise pickle.UnpicklingError(f"it names {module}.{name}, which these files do not hold")
            self._named[module, name] = type("Named", (Named,), {"module": module, "name": name})
        return self._named[module, name]
