"""All models of the zoo, by name."""

from zoo import language, plain, vision

ENTRIES = {entry.name: entry for entry in (*vision.ENTRIES, *plain.ENTRIES, *language.ENTRIES)}
