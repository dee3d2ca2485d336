"""The sub-commands of `ranktable`, click commands that print nothing: what one leaves to be printed is an `Outcome`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import click

from ranktable.errors import EXIT_VALID
from ranktable.model import RankTable
from ranktable.profile import DEVICE_TARGETS
from ranktable.values import count_noun

Command = TypeVar("Command", bound=Callable[..., Any])
FORMAT = click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)


class Outcome(NamedTuple):
    """Text for standard output, lines for standard error, and the exit status."""

    output: str = ""
    notes: tuple[str, ...] = ()
    """Printed on standard error, each as one line after `ranktable: `."""
    exit_code: int = EXIT_VALID


def deliver_table(table: RankTable, notes: Iterable[str], output: str | None) -> Outcome:
    """Write the table to the file `output`, or leave it to be printed for `-` and None; raises WriteError."""
    from ranktable.tables import encode_table, write_table

    if output in (None, "-"):
        return Outcome(encode_table(table), tuple(notes))
    write_table(str(output), table)
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    return Outcome(notes=(f"wrote {output}: {size}", *notes))


def target_option(text: str, *, default: str | None = "ascend") -> Callable[[Command], Command]:
    """Return the option --device_target with that help."""
    kind = click.Choice(DEVICE_TARGETS, case_sensitive=False)
    return click.option("--device_target", type=kind, default=default, show_default=default is not None, help=text)


def choice_option(name: str, choices: Sequence[str], text: str) -> Callable[[Command], Command]:
    """Return the option of that name, choices and help."""
    metavar = f"[{'|'.join(choices)}]"
    return click.option(name, type=click.Choice(choices, case_sensitive=False), metavar=metavar, help=text)
