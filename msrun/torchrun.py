"""`python -m msrun.torchrun`: the command msrun with the options and defaults of torchrun.

One worker on each host unless a number is given, and the output of all ranks on the console.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from msrun.agent.signals import hold_signals

DEFAULTS = ("--nproc_per_node=1", "--redirects=0")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line of torchrun and exit with the job's status."""
    from msrun.cli import main as run

    run([*DEFAULTS, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    hold_signals()
    main()
