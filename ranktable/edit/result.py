"""What an edit leaves: the new table, and in words what was changed, reordered or left out."""

from __future__ import annotations

from dataclasses import dataclass

from ranktable.model import RankTable


@dataclass(frozen=True, slots=True)
class Edited:
    """A new table and the lines that its user must know, in the order of their weight."""

    table: RankTable
    notes: tuple[str, ...] = ()
