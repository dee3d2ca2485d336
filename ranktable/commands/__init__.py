"""The sub-commands of `ranktable`, click commands that print nothing: what one leaves to be printed is an `Outcome`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ranktable.edit import Edited
from ranktable.errors import EXIT_VALID
from ranktable.profile import CHIPS, DEVICE_TARGETS
from ranktable.text import count_noun


@dataclass(frozen=True, slots=True)
class Outcome:
    """Text for standard output, lines for standard error, and the exit status."""

    output: str = ""
    notes: tuple[str, ...] = ()
    """Printed on standard error, each as one line after `ranktable: `."""
    exit_code: int = EXIT_VALID


def deliver_table(edited: Edited, output: str | None) -> Outcome:
    """Write the table to the file `output`, or leave it to be printed for `-` and None; raises WriteError."""
    from ranktable.codec import encode_table, write_table

    table = edited.table
    if output in (None, "-"):
        return Outcome(encode_table(table), edited.notes)
    write_table(str(output), table)
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    return Outcome(notes=(f"wrote {output}: {size}", *edited.notes))


Command = TypeVar("Command", bound=Callable[..., Any])


def profile_options(command: Command) -> Command:
    """Give a command `--device_target` and `--chip`."""
    target = click.option(
        "--device_target",
        type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
        default="ascend",
        show_default=True,
        help="For which devices to check the result.",
    )
    chip = click.option(
        "--chip",
        type=click.Choice(CHIPS, case_sensitive=False),
        metavar=f"[{'|'.join(CHIPS)}]",
        help="Hold the result to the rules of this chip.",
    )
    return target(chip(command))
