"""All models of the zoo, by name."""

from zoo import language, vision

ENTRIES = {entry.name: entry for entry in (*vision.ENTRIES, *language.ENTRIES)}
