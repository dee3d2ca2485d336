"""`python -m msrun` is the `msrun` command; with MSRUN_AS_TORCHRUN=1 it has torchrun's defaults."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from msrun.agent.signals import hold_signals


def main() -> NoReturn:
    """Run the command; where a script is to be started, `python -m msrun.torchrun` in its place."""
    hold_signals()
    from msrun.planning.program import COMMANDS

    if os.environ.get("MSRUN_AS_TORCHRUN", "0") in ("", "0") or sys.argv[1:2] in [[word] for word in COMMANDS]:
        from msrun.cli import main as run
    else:
        from msrun.torchrun import main as run
    run()


if __name__ == "__main__":
    main()
