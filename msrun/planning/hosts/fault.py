"""What is wrong with a host list, as msrun says it: with the option, the variable or the line that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msrun.errors import UsageError
from ranktable.errors import HostListError


@contextmanager
def blamed_on(source: str) -> Iterator[None]:
    """Turn an error of the grammar, `ranktable.hostlist`, into a UsageError that names the source."""
    try:
        yield
    except HostListError as error:
        raise UsageError(f"{source}: {error.fault}; {error.remedy}") from None
