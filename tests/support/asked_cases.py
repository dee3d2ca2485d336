"""Which cases of a table a run asks for. One job runs many of them; `make test` looks at a few, `make test-all` at all.

A test module says which keys of its table are fast. Tests of the other keys are marked slow, and its job runs those
keys alone that a chosen test looks at: `-k megatron` and `-m "not slow"` cost what they look at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from only_cases import ONLY_CASES


class CaseTable:
    """The keys of a job's cases. `key` makes one of the parameters of a test; their values joined by "/" by default."""

    def __init__(self, keys: Iterable[str], fast: Collection[str], key: Callable[..., str] | None = None) -> None:
        self.keys = list(keys)
        self.fast = set(fast)
        assert self.fast <= set(self.keys), f"no such cases: {sorted(self.fast - set(self.keys))}"
        self._key = key or (lambda **values: "/".join(getattr(value, "name", str(value)) for value in values.values()))

    def params(self, rows: Iterable[tuple[Any, ...]], names: str) -> list[Any]:
        """Return parameters for pytest: `rows` of values for `names`; those whose case is not fast are marked slow."""
        found = []
        for row in rows:
            key = self._key(**dict(zip(names.replace(" ", "").split(","), row, strict=True)))
            marks = () if key in self.fast else (pytest.mark.slow,)
            found.append(pytest.param(*row, marks=marks, id=key.replace("/", "-")))
        return found

    def parametrize(self, names: str, rows: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
        """Return the decorator of a test that looks at one case with each row."""
        return pytest.mark.parametrize(names.replace(" ", "").split(","), self.params(rows, names))

    def looks_at(self, *keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return the decorator of a test without parameters that looks at the cases of these keys."""
        assert set(keys) <= set(self.keys), f"no such cases: {sorted(set(keys) - set(self.keys))}"

        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            test = pytest.mark.looks_at(*keys)(test)
            return test if set(keys) <= self.fast else pytest.mark.slow(test)

        return decorate

    def asked(self, request: pytest.FixtureRequest) -> dict[str, str]:
        """Return the environment of a job for the module that asks: what its chosen tests look at.

        A test that does not say which cases it looks at is taken to look at the fast ones; if it is slow, at all.
        """
        keys: set[str] = set()
        for item in request.session.items:
            if item.path == request.path:
                keys |= self._of(item)
        return {ONLY_CASES: json.dumps([key for key in self.keys if key in keys])}

    def _of(self, item: pytest.Item) -> set[str]:
        if (mark := item.get_closest_marker("looks_at")) is not None:
            return set(mark.args)
        values = getattr(item, "callspec", None)
        if values is not None:
            try:
                key = self._key(**values.params)
            except TypeError:  # parameters of something else
                key = ""
            if key in self.keys:
                return {key}
        return set(self.keys) if item.get_closest_marker("slow") else self.fast


def slow_but(fast: Collection[str], rows: Iterable[Any], key: Callable[..., str] | None = None) -> list[Any]:
    """Return parameters; slow are those whose key is not in `fast`. Tuples hold the values of several names.

    Args:
        key: makes the key, which is the test's id as well, of the values; by default they are joined by "/".
    """
    found, left = [], set(fast)
    for row in rows:
        values = row if type(row) is tuple else (row,)
        name = key(*values) if key else "/".join(str(getattr(value, "name", value)) for value in values)
        found.append(pytest.param(*values, marks=() if name in fast else pytest.mark.slow, id=name.replace("/", "-")))
        left.discard(name)
    assert not left, f"no such cases: {sorted(left)}"
    return found


def one_fast(first: Any, *others: Any) -> list[Any]:
    """Return parameters of which all but the first are slow; tuples hold the values of several names."""
    return [
        first,
        *(pytest.param(*(other if isinstance(other, tuple) else (other,)), marks=pytest.mark.slow) for other in others),
    ]


def every_third_fast(cases: Iterable[Any]) -> list[Any]:
    """Return parameters of which two in three are slow; tuples hold the values of several names."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=pytest.mark.slow if index % 3 else ()) for index, row in enumerate(rows)]
