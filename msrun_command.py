"""The commands `msrun` and `msrun-checkpoint` as they are installed.

They run the package beside this file, whatever PYTHONPATH holds of that name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn


def _take_names() -> None:
    """Import what stands beside this file. The name `msrun` is taken once, here; all below it is found through it."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        import msrun  # noqa: F401
        import ranktable  # noqa: F401
    finally:
        del sys.path[0]


def main() -> NoReturn:
    """Run `msrun`."""
    _take_names()
    from msrun.__main__ import main as run

    run()


def checkpoint() -> NoReturn:
    """Run `msrun-checkpoint`, which needs torch."""
    _take_names()
    try:
        from msrun.runtime.checkpoint.cli import main as run
    except ImportError as error:
        sys.exit(f"msrun-checkpoint: error: {error}")
    sys.exit(run())


if __name__ == "__main__":
    main()
