"""Records: dataclasses that cost little to define."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, dataclass_transform

_OF_MUTABLE = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__, "__hash__": None}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Base of dataclasses, frozen unless they say `frozen=False`. Their methods stand here once: `dataclass` compiles
    up to six for each class, a third of the time in which msrun starts."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _positional: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _factories: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __init_subclass__(cls, *, kw_only: bool = False, frozen: bool = True) -> None:
        super().__init_subclass__()
        for name, method in () if frozen else _OF_MUTABLE.items():
            setattr(cls, name, method)
        dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        declared = fields(cls)
        cls._positional = tuple(one.name for one in declared if not one.kw_only)
        cls._defaults = {one.name: one.default for one in declared if one.default is not MISSING}
        cls._factories = {one.name: one.default_factory for one in declared if one.default_factory is not MISSING}

    def __init__(self, *args: Any, **given: Any) -> None:
        named = dict(zip(self._positional, args, strict=False)) | given
        values = {**self._defaults, **{name: make() for name, make in self._factories.items()}, **named}
        wrong = values.keys() ^ self.__dataclass_fields__.keys()
        if wrong or len(named) < len(args) + len(given):
            what = f"missing or unknown: {', '.join(sorted(wrong))}" if wrong else "one is given twice, or too many are"
            raise TypeError(f"{type(self).__name__}: fields {what}")
        vars(self).update(values)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check what was given; for those that have something to check."""

    def __setattr__(self, name: str, *_value: object) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} never changes")

    __delattr__ = __setattr__

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(vars(self).items()))

    def __repr__(self) -> str:
        shown = [f"{one.name}={vars(self)[one.name]!r}" for one in fields(self) if one.repr]
        return f"{type(self).__qualname__}({', '.join(shown)})"
