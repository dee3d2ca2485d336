"""The `msrun` command as it is installed: runs the package beside this file, whatever PYTHONPATH holds of that name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Run the command. The name `msrun` is taken once, here; what is below it is found through it."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        import msrun  # noqa: F401
        import ranktable  # noqa: F401
    finally:
        del sys.path[0]
    from msrun.cli import main as run

    run()


if __name__ == "__main__":
    main()
