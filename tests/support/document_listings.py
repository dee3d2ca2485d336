"""The listings of MindSpore's documents, as examples/mindspore has them, and their tables in docs/reference.

A listing begins at a comment `# Listing N: what it is` and ends at the next one, or at `# Left open by the document`;
files that cannot have comments are listings as a whole.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from job_runner import REPOSITORY

DOCUMENTS = REPOSITORY / "examples" / "mindspore"
PAGE = REPOSITORY / "docs" / "reference" / "mindspore_documents.md"

_MARK = re.compile(r"^# (?:Listing (?P<number>\d+): (?P<title>.+)|Left open by the document(?::.*)?)$")
_WHOLE = {
    "rank_table_8pcs.json": (1, "the rank table of eight devices"),
    "rank_table_16pcs.json": (9, "the rank table of two hosts"),
}
"""Name of a file -> number and title of the listing that it is."""
_WORKERS = {"run.sh": (2, 8), "run_cluster.sh": (8,), "rank_table_8pcs.json": (8,), "rank_table_16pcs.json": ()}
"""Name of a file -> with how many workers the tests run it, where the document fixes that."""
_TABLE = re.compile(r"(?<=^\| --- \| --- \| --- \| --- \|\n)(?:\| \d+: .+\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Listing:
    """One listing of a document."""

    document: str
    file: Path
    number: int
    title: str
    begin: int
    lines: tuple[str, ...]

    @property
    def digest(self):
        """Of its characters without white space: some printings of the documents have lost theirs."""
        return hashlib.sha256("".join("".join(self.lines).split()).encode()).hexdigest()

    def row(self, workers, differs):
        """Return its row of the table."""
        place = f"[{self.file.name}:{self.begin}](../../{self.file.relative_to(REPOSITORY)})"
        numbers = "/".join(map(str, _WORKERS.get(self.file.name, workers))) or "none: it is read"
        return f"| {self.number}: {self.title} | {place} | {numbers} | {differs} |\n"


def listings(document):
    """Return a document's listings in its order."""
    found = []
    for file in sorted(path for path in (DOCUMENTS / document).iterdir() if path.suffix in (".py", ".sh", ".json")):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        if file.name in _WHOLE:
            found.append(Listing(document, file, *_WHOLE[file.name], 1, tuple(lines)))
        marks = [(index, match) for index, line in enumerate(lines) if (match := _MARK.match(line.rstrip("\n")))]
        ends = [*(index for index, _ in marks[1:]), len(lines)]
        for (index, match), end in zip(marks, ends, strict=False):
            if match["number"]:
                of_it = tuple(lines[index + 1 : end])
                found.append(Listing(document, file, int(match["number"]), match["title"], index + 2, of_it))
    return sorted(found, key=lambda listing: listing.number)


def table(document, workers):
    """Return the page with the table of a document made anew: what differs is kept, the rest is found."""
    page = PAGE.read_text(encoding="utf-8")
    match = next(found for found in _TABLE.finditer(page) if f"/mindspore/{document}/" in found[0])
    differs = {int(row[2 : row.index(":")]): row.rstrip(" |\n").rpartition(" | ")[2] for row in match[0].splitlines()}
    rows = [listing.row(workers, differs.get(listing.number, "?")) for listing in listings(document)]
    return page[: match.start()] + "".join(rows) + page[match.end() :]
