"""Rules on what a pod may do. Pure.

Source: the Kubernetes Pod Security Standards, profile restricted; and no secret in a manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launch_templates.lint.document import Document, dig, mapping, sequence, text
from launch_templates.lint.finding import Problem, Rule, Severity
from launch_templates.lint.invocation import literal_variables
from launch_templates.lint.workload import Container, PodSet, Workload
from launch_templates.names import is_secret_variable


def _containers(workload: Workload) -> Iterator[tuple[PodSet, Container]]:
    for pod_set in workload.pod_sets:
        for container in pod_set.containers:
            yield pod_set, container


def _setting(pod_set: PodSet, container: Container, name: str) -> object:
    """A security setting of a container, which overrides that of its pod."""
    own = mapping(container.body, "securityContext")
    return own[name] if name in own else dig(pod_set.spec, "securityContext", name)


def check_privileged(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """privileged gives the container the whole host."""
    for _, container in _containers(workload):
        if dig(container.body, "securityContext", "privileged"):
            remedy = "remove it; devices come from the device plugin"
            yield Problem(f"{container.path}.securityContext.privileged", "the container owns its host", remedy)


def check_host_namespaces(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """hostNetwork, hostPID and hostIPC break the wall to the host and to other jobs on it."""
    for pod_set in workload.pod_sets:
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod_set.spec.get(name):
                message = f"{name} shares the host with the pod; ports and processes of other jobs come into reach"
                yield Problem(f"{pod_set.path}.spec.{name}", message, "remove it")


def check_host_path(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """hostPath volumes are refused by the restricted and baseline profiles."""
    for pod_set in workload.pod_sets:
        for position, volume in enumerate(sequence(pod_set.spec, "volumes")):
            if "hostPath" in mapping(volume):
                path = f"{pod_set.path}.spec.volumes[{position}].hostPath"
                yield Problem(
                    path, f"opens {text(volume, 'hostPath', 'path')} of the host", "use a claim or an emptyDir"
                )


def check_root(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The process is not root."""
    for pod_set, container in _containers(workload):
        if _setting(pod_set, container, "runAsNonRoot") is not True or _setting(pod_set, container, "runAsUser") == 0:
            path = f"{container.path}.securityContext.runAsNonRoot"
            yield Problem(path, "the process may run as root", "set runAsNonRoot: true and a runAsUser above 0")


def check_escalation(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """No way to more rights: no escalation, no capabilities, the default seccomp profile."""
    for pod_set, container in _containers(workload):
        path = f"{container.path}.securityContext"
        if dig(container.body, "securityContext", "allowPrivilegeEscalation") is not False:
            yield Problem(path, "the process may gain rights", "set allowPrivilegeEscalation: false")
        if "ALL" not in sequence(container.body, "securityContext", "capabilities", "drop"):
            yield Problem(path, "capabilities are kept", "set capabilities: {drop: [ALL]}; add IPC_LOCK for RDMA only")
        profile = _setting(pod_set, container, "seccompProfile")
        if text(profile, "type") not in ("RuntimeDefault", "Localhost"):
            yield Problem(path, "no seccomp profile", "set seccompProfile: {type: RuntimeDefault}")


def check_token(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Training does not talk to the API server, so it needs no token of it."""
    for pod_set in workload.pod_sets:
        if pod_set.spec.get("automountServiceAccountToken") is not False:
            path = f"{pod_set.path}.spec.automountServiceAccountToken"
            yield Problem(path, "the pod gets a token of the API server", "set automountServiceAccountToken: false")


def check_secret(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """No secret stands in a manifest."""
    for _, container in _containers(workload):
        for name, value in literal_variables(container).items():
            if value and is_secret_variable(name):
                message = f"{name} has its value here, where everyone who reads the manifest reads it"
                yield Problem(f"{container.path}.env", message, "take it from a Secret: valueFrom.secretKeyRef")


RULES = (
    Rule("privileged", Severity.ERROR, check_privileged),
    Rule("host-namespace", Severity.ERROR, check_host_namespaces),
    Rule("host-path", Severity.WARNING, check_host_path),
    Rule("root", Severity.WARNING, check_root),
    Rule("escalation", Severity.WARNING, check_escalation),
    Rule("api-token", Severity.WARNING, check_token),
    Rule("secret", Severity.ERROR, check_secret),
)
