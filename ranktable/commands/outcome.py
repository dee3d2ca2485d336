"""What a command leaves to be printed. Commands themselves print nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ranktable.errors import EXIT_VALID


@dataclass(frozen=True, slots=True)
class Outcome:
    """Text for standard output, lines for standard error, and the exit status."""

    output: str = ""
    notes: tuple[str, ...] = ()
    """Printed on standard error, each as one line after `ranktable: `."""
    exit_code: int = EXIT_VALID
