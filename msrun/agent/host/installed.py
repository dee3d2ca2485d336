"""Which version of a package this Python would import, found without importing anything."""

from __future__ import annotations

import contextlib
import os
import sys

_FOLDER = ".dist-info"


def installed_version(package: str) -> str:
    """Return the version, such as 2.13.0+cpu; empty when the package is not installed.

    It stands in the name of the metadata's folder (`torch-2.13.0+cpu.dist-info`, PyPA's "Recording installed
    projects"). importlib.metadata would parse what is inside, and itself costs more than the rest of a look at a host;
    it is asked where there is no such folder.
    """
    for path in sys.path:
        with contextlib.suppress(OSError):  # an archive, or nothing
            for name in os.listdir(path or "."):  # noqa: PTH208 - site-packages is long
                if name.startswith(f"{package}-") and name.endswith(_FOLDER):
                    return name[len(package) + 1 : -len(_FOLDER)]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) or ""
    except PackageNotFoundError:
        return ""
