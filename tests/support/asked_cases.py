"""Which tests of a table are fast: `make test` looks at a few of its rows, `make test-slow` at all.

Where one job serves many tests it runs those cases alone that the chosen tests look at.
"""

import json

import pytest
from only_cases import ONLY_CASES


def asked(request, *names, always=()):
    """Return the environment of a job for the module that asks: the cases that its chosen tests look at.

    Args:
        names: parameters of tests whose values, joined by "/", are the key of a case.
        always: keys of cases that tests without these parameters look at.
    """
    return {ONLY_CASES: json.dumps(sorted({*always} | asked_keys(request, *names)))}


def asked_keys(request, *names):
    """Return the keys of cases that the chosen tests of a module look at."""
    keys = set()
    for item in request.session.items:
        values = getattr(item, "callspec", None)
        if item.path == request.path and values is not None and values.params.keys() >= {*names}:
            keys.add("/".join(str(values.params[name]) for name in names))
    return keys


def slow_but(fast, rows, key=None):
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


def one_fast(first, *others):
    """Return parameters of which all but the first are slow; tuples hold the values of several names."""
    return [
        first,
        *(pytest.param(*(other if isinstance(other, tuple) else (other,)), marks=pytest.mark.slow) for other in others),
    ]


def every_third_fast(cases, one_in=3):
    """Return parameters of which one in three is fast, or in more; tuples hold the values of several names."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=pytest.mark.slow if index % one_in else ()) for index, row in enumerate(rows)]
