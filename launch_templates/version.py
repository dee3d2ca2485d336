"""The version of the distribution, of which launch_templates is a part."""

from __future__ import annotations


def own_version() -> str:
    """That of the installed distribution msrun, or `unknown` when it is only on Python's path."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("msrun")
    except PackageNotFoundError:
        return "unknown"
