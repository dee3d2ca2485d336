"""Lint of rendered or hand-edited manifests: all rules over all documents, all findings in one run. Pure.

documents reads a manifest; schemas and rules hold the rules. A rule never raises on a malformed manifest.
"""

from collections.abc import Collection, Iterable, Sequence

from launch_templates.errors import UnknownName
from launch_templates.lint import schemas
from launch_templates.lint.documents import RUNTIMES, Document, read_documents, read_workloads
from launch_templates.lint.rules import PLACE_RULES, POD_RULES, Finding, Rule, Severity

NOT_READ = ("RayCluster", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob")
"""Kinds that start training jobs, and that no rule reads."""
READ = "Job, JobSet, PyTorchJob, TrainJob, MPIJob, AscendJob, LeaderWorkerSet, RayJob and Volcano Job"
_NOT_READ = Rule("not-read", Severity.WARNING, "A training job of a kind that no rule reads.")
_NO_JOB = Rule("no-job", Severity.WARNING, "There is no training job in the files given.")
RULES: tuple[Rule, ...] = (*schemas.RULES, _NOT_READ, *PLACE_RULES, *POD_RULES, _NO_JOB)
"""Every rule, in the order in which its findings appear."""

_OF_ANY_JOB = tuple(rule for rule in RULES if rule.rule_id in ("msrun-command", "pods"))
"""Rules for a job that does not run msrun, which may have its reasons for the rest."""


def check_rule_names(names: Iterable[str]) -> None:
    """Raise UnknownName unless there are rules of these names."""
    known = [rule.rule_id for rule in RULES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownName("rule", unknown[0], known)


def lint_documents(documents: Sequence[Document], definitions: Sequence[Document] = ()) -> list[Finding]:
    """Findings over documents that belong together: a Job and its Service may stand in different files.

    Args:
        definitions: CustomResourceDefinitions in place of the package's own.
    """
    workloads = read_workloads(documents)
    found = schemas.find_faults(documents, definitions)
    for one in documents:
        if one.kind in NOT_READ:
            found.append(_NOT_READ.found(one, "", f"a {one.kind} is not checked", f"give jobs of the kinds {READ}"))
    for workload in workloads:
        rules = PLACE_RULES if workload.is_partial else RULES if workload.calls else _OF_ANY_JOB
        found += [finding for rule in rules for finding in rule.apply(workload)]
    if not workloads and not any(one.kind in (*NOT_READ, "RayJob", *RUNTIMES) for one in documents):
        seen = ", ".join(document.label for document in documents) or "no documents"
        message = f"no job here ({seen}), so nothing was checked; read are {READ}"
        source = documents[0].source if documents else "-"
        found.append(Finding(_NO_JOB.rule_id, _NO_JOB.severity, source, "", "", message, "give the file of the job"))
    return found


def lint_texts(
    texts: Iterable[tuple[str, str]], ignore: Collection[str] = (), definitions: Iterable[tuple[str, str]] = ()
) -> list[Finding]:
    """Findings over (file name, YAML text) pairs that belong together, but for those of the rules in `ignore`.

    Args:
        definitions: (file name, YAML text) pairs of CustomResourceDefinitions, in place of the package's own.

    Raises:
        BadFile: a text is not YAML, or one of its documents is no mapping.
        UnknownName: `ignore` names no rule.
    """
    check_rule_names(ignore)
    documents, own = (
        [document for source, content in pairs for document in read_documents(content, source)]
        for pairs in (texts, definitions)
    )
    return [finding for finding in lint_documents(documents, own) if finding.rule_id not in ignore]


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether a finding has the severity error."""
    return any(finding.severity is Severity.ERROR for finding in findings)
