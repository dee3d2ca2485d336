"""What the runtime is built on and `pip install msrun` does not bring: torch, which is the user's, and numpy."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from importlib.util import find_spec
from types import TracebackType

from msrun import contract
from msrun.errors import MissingPackageError

PACKAGES = ("torch", "numpy")
_has_warned = False


def require_packages() -> None:
    """Make sure that torch and numpy are installed, without importing them, and warn of a torch that is not tested.

    Raises:
        MissingPackageError: one is not installed. If nobody catches it, it is printed as one line.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        sys.excepthook = _print_in_one_line
        raise MissingPackageError(
            f"msrun.runtime needs {' and '.join(missing)}, not installed for {sys.executable}; "
            "run: pip install 'msrun[runtime]'"
        )
    warn_if_untested(stacklevel=4)  # whoever imports msrun.runtime


def warn_if_untested(stacklevel: int = 3) -> None:
    """Warn once a job when the runtime's tests have not been run with the torch that is installed.

    The fork server, which imports the runtime for the workers, and the ranks but the first say nothing.

    Args:
        stacklevel: whose line the warning names, as in `warnings.warn`; 3 is the caller of the caller.
    """
    global _has_warned
    is_fork_server = contract.MSRUN_JOB_ID in os.environ and contract.RANK not in os.environ
    if _has_warned or is_fork_server or os.environ.get(contract.RANK, "0") != "0":
        return
    _has_warned = True
    text = describe_untested(_torch_version())
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def describe_untested(version: str) -> str:
    """Return what to know of a version of torch such as 2.13.0+cpu; empty when it is tested, or not a number."""
    oldest, newest = (tuple(map(int, text.split("."))) for text in contract.TORCH_VERSIONS)
    with contextlib.suppress(ValueError):
        if not oldest <= tuple(int(part) for part in version.split(".")[:2]) <= newest:
            tested = " to ".join(contract.TORCH_VERSIONS)
            return f"torch {version} is not tested with msrun.runtime; tested are {tested}"
    return ""


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    torch = sys.modules.get("torch")
    try:
        return str(torch.__version__) if torch is not None else version("torch")
    except PackageNotFoundError:  # on PYTHONPATH: its version is inside
        return ""


def _print_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, MissingPackageError):
        print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - a sys.excepthook
    else:
        sys.__excepthook__(kind, error, trace)
