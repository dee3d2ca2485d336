"""What a rule is and what it finds. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from launch_templates.lint.documents import Document, Workload


class Severity(StrEnum):
    """ERROR: the job is refused, hangs or computes with wrong ranks. WARNING: it may work."""

    ERROR = "error"
    WARNING = "warning"


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
    """Path in the document, as in kubectl explain, with [i] for list items."""
    message: str
    remedy: str

    def __str__(self) -> str:
        place = " ".join(part for part in (self.document, self.path) if part)
        return f"{self.source}: {place}: {self.severity} {self.rule_id}: {self.message}; {self.remedy}"


Problem = tuple[str, str, str]
"""What one check saw at one place: path, message, remedy."""
Check = Callable[[Workload], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """A named check."""

    rule_id: str
    severity: Severity
    meaning: str
    """What it holds against a manifest, in a line of the page."""
    check: Check = lambda _: iter(())
    """Finds nothing where the finding comes from elsewhere."""

    def found(self, document: Document, path: str, message: str, remedy: str) -> Finding:
        return Finding(self.rule_id, self.severity, document.source, document.label, path, message, remedy)

    def apply(self, workload: Workload) -> Iterator[Finding]:
        return (self.found(workload.document, *problem) for problem in self.check(workload))


def rules_of(checks: Iterable[Check], warnings: Collection[Check]) -> tuple[Rule, ...]:
    """Rules with the names of their checks, check_grace for grace, and the docstrings of these as meanings."""
    return tuple(
        Rule(
            check.__name__.removeprefix("check_").replace("_", "-"),
            Severity.WARNING if check in warnings else Severity.ERROR,
            " ".join((check.__doc__ or "").split()),
            check,
        )
        for check in checks
    )
