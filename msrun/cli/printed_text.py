"""Text on stdout: plans, statuses, answers."""

from __future__ import annotations

import io
import sys

import click

from msrun.errors import UsageError
from msrun.launch import output
from msrun.launch.printable import printable


def print_text(text: str) -> None:
    """Print a plan or a status; bytes of the command line that are no text come out as they came in.

    Raises:
        UsageError: it cannot be written, other than for a reader that has gone.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        click.echo(printable(text, keep_colours=sys.stdout.isatty()))
    except OSError as error:
        output.discard_output(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"stdout: cannot write ({error.strerror}); give it another place") from None
