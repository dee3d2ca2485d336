"""All rules over all documents, all findings in one run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch_templates.lint import gang, pod, rendezvous, security
from launch_templates.lint.document import Document, read_documents
from launch_templates.lint.finding import Finding, Rule, Severity
from launch_templates.lint.keys import find_unknown_keys
from launch_templates.lint.workload import read_workloads

RULES: tuple[Rule, ...] = rendezvous.RULES + gang.RULES + pod.RULES + security.RULES
"""Every rule, in the order in which its findings appear."""


NOT_READ = ("RayJob", "RayCluster", "LeaderWorkerSet", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob")
"""Kinds that start training jobs, and that no rule reads."""

READ = "Job, JobSet, PyTorchJob, TrainJob, MPIJob, AscendJob and Volcano Job"


def lint_documents(documents: Sequence[Document]) -> list[Finding]:
    """Findings over documents that belong together: a Job and its Service may stand in different files."""
    workloads = read_workloads(documents)
    found = find_unknown_keys(documents)
    found += [_not_read(document) for document in documents if document.kind in NOT_READ]
    found += [finding for workload in workloads for rule in RULES for finding in rule.apply(workload, documents)]
    is_told = any(finding.rule_id == "not-read" for finding in found)
    return found if workloads or is_told else [*found, _nothing_to_check(documents)]


def lint_texts(texts: Iterable[tuple[str, str]]) -> list[Finding]:
    """Findings over (file name, YAML text) pairs that belong together.

    Raises:
        BadFile: a text is not YAML, or one of its documents is no mapping.
    """
    return lint_documents([document for source, content in texts for document in read_documents(content, source)])


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether a finding has the severity error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def _not_read(document: Document) -> Finding:
    return Finding(
        "not-read",
        Severity.ERROR,
        document.source,
        document.label,
        "",
        f"a {document.kind} is not checked",
        f"give jobs of the kinds {READ}",
    )


def _nothing_to_check(documents: Sequence[Document]) -> Finding:
    seen = ", ".join(document.label for document in documents) or "no documents"
    return Finding(
        "no-job",
        Severity.WARNING,
        documents[0].source if documents else "-",
        "",
        "",
        f"no job here ({seen}), so nothing was checked; read are {READ}",
        "give the file of the job",
    )
