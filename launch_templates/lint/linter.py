"""All rules over all documents, all findings in one run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch_templates.lint import gang, pod, rendezvous, security
from launch_templates.lint.document import Document, read_documents
from launch_templates.lint.finding import Finding, Rule, Severity
from launch_templates.lint.workload import read_workloads

RULES: tuple[Rule, ...] = rendezvous.RULES + gang.RULES + pod.RULES + security.RULES
"""Every rule, in the order in which its findings appear."""


def lint_documents(documents: Sequence[Document]) -> list[Finding]:
    """Findings over documents that belong together: a Job and its Service may stand in different files."""
    workloads = read_workloads(documents)
    found = [finding for workload in workloads for rule in RULES for finding in rule.apply(workload, documents)]
    return found if workloads else [_nothing_to_check(documents)]


def lint_texts(texts: Iterable[tuple[str, str]]) -> list[Finding]:
    """Findings over (file name, YAML text) pairs that belong together.

    Raises:
        BadFile: a text is not YAML, or one of its documents is no mapping.
    """
    return lint_documents([document for source, content in texts for document in read_documents(content, source)])


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether a finding has the severity error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def _nothing_to_check(documents: Sequence[Document]) -> Finding:
    seen = ", ".join(document.label for document in documents) or "no documents"
    return Finding(
        "no-job",
        Severity.WARNING,
        documents[0].source if documents else "-",
        "",
        "",
        f"no Job, JobSet, Volcano Job or PyTorchJob here ({seen}), so nothing was checked",
        "give the file of the job",
    )
