"""Hands an edited table over: to a file or to standard output, with what its user must know."""

from __future__ import annotations

from ranktable.commands.outcome import Outcome
from ranktable.edit.result import Edited
from ranktable.report.words import count_noun


def deliver_table(edited: Edited, output: str | None) -> Outcome:
    """Write the table to the file `output`, or leave it to be printed for `-` and None; raises WriteError."""
    from ranktable.codec import encode_table
    from ranktable.write import write_table

    table = edited.table
    if output in (None, "-"):
        return Outcome(encode_table(table), edited.notes)
    write_table(str(output), table)
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    return Outcome(notes=(f"wrote {output}: {size}", *edited.notes))
