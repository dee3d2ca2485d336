"""Says what a file is: which kind of table, why it is taken for it, who reads it, and what can be done with it here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ranktable.codec import suggest_keys
from ranktable.codec.codec import codec_of
from ranktable.codec.detect import COMPRESSED, Detection, detect_dialect
from ranktable.errors import EXIT_PROBLEMS, EXIT_VALID
from ranktable.reading.document import parse_document
from ranktable.reading.foreign import name_compression
from ranktable.reading.source import read_source


@dataclass(frozen=True, slots=True)
class FileKind:
    """What one file is."""

    source: str
    dialect: str | None = None
    """Short name of the kind, None when the file is none that is known."""
    title: str = "no rank table of any known kind"
    evidence: str = ""
    """The keys or bytes that gave it away."""
    consumer: str = ""
    """Who reads files of this kind."""
    is_supported: bool = False
    """True when this package reads, validates and converts the kind; else it only knows its name."""
    advice: str = ""
    """What to do with a file that is not supported."""

    @property
    def exit_code(self) -> int:
        """0 for a kind that is known, 1 for any other."""
        return EXIT_PROBLEMS if self.dialect is None else EXIT_VALID


def detect_file(path: str | os.PathLike[str]) -> FileKind:
    """Return what the file at `path` is; `-` is standard input.

    Raises ReadError for a file that cannot be opened, JsonTextError for text that is neither JSON nor compressed.
    """
    name, data = read_source(path)
    compression = name_compression(data)
    if compression is not None:
        return _describe(name, Detection(COMPRESSED, f"the first bytes of {compression}"))
    value = parse_document(data, name).value
    detection = detect_dialect(value)
    if detection is None:
        shown = ", ".join(key[:60] for key in list(value)[:6]) or "none"
        return FileKind(name, evidence=f"top-level keys: {shown}", advice=suggest_keys(value))
    return _describe(name, detection)


def _describe(source: str, detection: Detection) -> FileKind:
    kind = detection.dialect
    is_supported = codec_of(kind.name) is not None
    advice = "" if is_supported else kind.instead or f"give it to its own reader ({kind.consumer})"
    return FileKind(source, kind.name, kind.title, detection.evidence, kind.consumer, is_supported, advice)
