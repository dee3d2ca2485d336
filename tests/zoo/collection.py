"""All models of the zoo, by name."""

from __future__ import annotations

from zoo import language, plain, vision
from zoo.entry import Entry

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in (*vision.ENTRIES, *plain.ENTRIES, *language.ENTRIES)}
