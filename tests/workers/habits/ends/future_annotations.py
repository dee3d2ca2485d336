from __future__ import annotations


def function(x: Undefined) -> None: ...  # noqa: F821


print(function.__annotations__)
