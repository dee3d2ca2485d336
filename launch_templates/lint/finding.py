"""What a rule is and what it finds. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launch_templates.lint.document import Document
from launch_templates.lint.workload import Workload


class Severity(StrEnum):
    """ERROR: the job is refused, hangs, computes with wrong ranks or is open to attack. WARNING: it may work."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """What one check saw at one place."""

    path: str
    """Path in the document, as in kubectl explain, with [i] for list items."""
    message: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A problem with its rule and its document."""

    rule_id: str
    severity: Severity
    source: str
    """File of the document."""
    document: str
    """Kind/name of the document; empty when the finding is about the whole file."""
    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        place = " ".join(part for part in (self.document, self.path) if part)
        return f"{self.source}: {place}: {self.severity} {self.rule_id}: {self.message}; {self.remedy}"


Check = Callable[[Workload, Sequence[Document]], Iterator[Problem]]
"""Problems of one workload; the second argument holds all documents given together."""


@dataclass(frozen=True)
class Rule:
    """A named check."""

    rule_id: str
    severity: Severity
    check: Check

    def apply(self, workload: Workload, documents: Sequence[Document]) -> Iterator[Finding]:
        document = workload.document
        for problem in self.check(workload, documents):
            yield Finding(
                self.rule_id,
                self.severity,
                document.source,
                document.label,
                problem.path,
                problem.message,
                problem.remedy,
            )
