"""Rules that make the pods of a job one gang: all start, all stop, each index once. Pure.

Sources: the validation of batch/v1 Job and of the Volcano admission webhook, and the training-operator's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launch_templates.lint.document import Document, dig, mapping, number, sequence, text
from launch_templates.lint.finding import Problem, Rule, Severity
from launch_templates.lint.workload import PodSet, Workload

_MAX_FAILURE_RULES = 20

ROLES = {
    "PyTorchJob": ("pytorchReplicaSpecs", "Master", "pytorch"),
    "AscendJob": ("replicaSpecs", "Master", "ascend"),
    "MPIJob": ("mpiReplicaSpecs", "Launcher", ""),
}
"""Kinds of replica types: where these stand, the type that there must be one of, and the name of containers."""


def _jobs(workload: Workload) -> Iterator[tuple[PodSet, dict[str, object]]]:
    for pod_set in workload.pod_sets:
        if pod_set.job_spec is not None:
            yield pod_set, pod_set.job_spec


def check_pods(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """There is at least one pod template, each with containers."""
    if not workload.pod_sets and workload.kind == "TrainJob":
        yield Problem("spec.runtimeRef", "its runtime is not among the files given", "give the file of its runtime too")
    elif not workload.pod_sets:
        yield Problem("spec", f"a {workload.kind} without pods", "describe its pods")
    for pod_set in workload.pod_sets:
        if not any(not container.is_init for container in pod_set.containers):
            yield Problem(f"{pod_set.path}.spec.containers", "no containers", "add a container that runs msrun")


def check_completion_mode(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Only Indexed gives each pod an index and a stable host name; JobSet sets it by itself when it is left out."""
    for pod_set, job in _jobs(workload):
        mode = job.get("completionMode", "NonIndexed" if workload.kind == "Job" else "Indexed")
        if mode != "Indexed":
            message = f"completionMode is {mode}: pods get no index and no stable name"
            yield Problem(f"{pod_set.job_path}.completionMode", message, "set completionMode: Indexed")


def check_completions(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """completions = parallelism: fewer in parallel and the gang never meets."""
    if workload.kind == "TrainJob":
        return  # the trainer sets both
    for pod_set, job in _jobs(workload):
        completions, parallelism = job.get("completions"), job.get("parallelism", 1)
        is_count = type(completions) is int and completions > 0
        if not is_count or completions != parallelism:
            message = f"completions is {completions} and parallelism {parallelism}; the gang needs all pods at once"
            yield Problem(f"{pod_set.job_path}.completions", message, "set both to the number of pods")


def check_restart_policy(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Never: a container that restarts in place cannot join a job whose peers have stopped."""
    default = {"JobSet": "OnFailure", "TrainJob": "OnFailure"}.get(workload.kind, "Always")
    for pod_set in workload.pod_sets:
        path, policy = f"{pod_set.path}.spec.restartPolicy", pod_set.spec.get("restartPolicy", default)
        if workload.kind in ROLES:
            _, key, role, _ = pod_set.path.split(".")
            path = f"spec.{key}.{role}.restartPolicy"
            policy = mapping(workload.document.body, "spec", key, role).get("restartPolicy", "Never")
        if policy != "Never":
            message = f"restartPolicy is {policy}: one pod restarts alone while its peers hang or stop"
            yield Problem(path, message, "set restartPolicy: Never")


def check_backoff_limit(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """0: retries belong to the whole gang (JobSet maxRestarts, Volcano maxRetry)."""
    places = [(pod_set.job_path, job) for pod_set, job in _jobs(workload)]
    if workload.kind in ROLES:
        places = [("spec.runPolicy", mapping(workload.document.body, "spec", "runPolicy"))]
    for path, node in places:
        if node.get("backoffLimit") != 0:
            message = f"backoffLimit is {node.get('backoffLimit', 'left out (6)')}: single pods start anew, half alive"
            yield Problem(f"{path}.backoffLimit", message, "set backoffLimit: 0; restart the whole job with a JobSet")


def check_failure_policy(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """What the API server refuses in a podFailurePolicy."""
    for pod_set, job in _jobs(workload):
        if "podFailurePolicy" not in job:
            continue
        path = f"{pod_set.job_path}.podFailurePolicy"
        rules = sequence(job, "podFailurePolicy", "rules")
        if pod_set.spec.get("restartPolicy") != "Never":
            yield Problem(path, "is refused unless restartPolicy is Never", "set restartPolicy: Never")
        if job.get("podReplacementPolicy", "Failed") != "Failed":
            yield Problem(path, "is refused unless podReplacementPolicy is Failed", "set podReplacementPolicy: Failed")
        if len(rules) > _MAX_FAILURE_RULES:
            yield Problem(
                f"{path}.rules", f"{len(rules)} rules, at most {_MAX_FAILURE_RULES} are allowed", "merge some"
            )
        for position, rule in enumerate(rules):
            if ("onExitCodes" in mapping(rule)) == ("onPodConditions" in mapping(rule)):
                message = "needs exactly one of onExitCodes and onPodConditions"
                yield Problem(f"{path}.rules[{position}]", message, "split or complete the rule")


def check_index_once(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Each index is given once: it restarts at 0 in every Volcano task and in every job of a JobSet."""
    if workload.kind == "VolcanoJob" and len(workload.pod_sets) > 1:
        message = f"{len(workload.pod_sets)} tasks: VC_TASK_INDEX starts at 0 in each, so node ranks repeat"
        yield Problem("spec.tasks", message, "use one task with all replicas")
    if workload.kind == "JobSet":
        jobs = sequence(workload.document.body, "spec", "replicatedJobs")
        copies = [dig(job, "replicas") if "replicas" in mapping(job) else 1 for job in jobs]
        if copies and copies != [1]:
            message = "several jobs: JOB_COMPLETION_INDEX starts at 0 in each, so node ranks repeat"
            yield Problem(
                "spec.replicatedJobs", message, "use one replicated job with replicas: 1 and more completions"
            )


def check_min_available(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """minAvailable = all pods, or a part of the gang starts and waits for ever. 0 or left out means all."""
    path = {"VolcanoJob": "minAvailable", "AscendJob": "runPolicy.schedulingPolicy.minAvailable"}.get(workload.kind)
    if path is None:
        return
    available = number(workload.document.body, "spec", *path.split("."))
    if available and workload.num_pods is not None and available != workload.num_pods:
        message = f"minAvailable is {available}, but the gang has {workload.num_pods} pods"
        yield Problem(f"spec.{path}", message, f"set minAvailable: {workload.num_pods}")


def check_volcano_plugins(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Volcano: the svc plugin makes the DNS names, the env plugin VC_TASK_INDEX."""
    if workload.kind != "VolcanoJob":
        return
    plugins = mapping(workload.document.body, "spec", "plugins")
    for name, purpose in (("svc", "pods have no DNS names"), ("env", "pods do not know their index")):
        if name not in plugins:
            yield Problem("spec.plugins", f"without the {name} plugin {purpose}", f"add {name}: [] to plugins")
    arguments = [str(argument) for argument in sequence(plugins, "svc")]
    if "svc" in plugins and "--publish-not-ready-addresses=true" not in arguments:
        message = "pods that are not ready have no DNS name, so they wait for each other"
        yield Problem("spec.plugins.svc", message, "add --publish-not-ready-addresses=true")


def check_roles(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Exactly one leader, and containers of the name by which the operator finds them; it refuses others."""
    if workload.kind in ROLES:
        key, leader, _ = ROLES[workload.kind]
        spec = mapping(workload.document.body, "spec", key, leader)
        if not spec or spec.get("replicas", 1) != 1:
            path = f"spec.{key}.{leader}.replicas"
            message = f"there must be exactly one {leader}"
            yield Problem(path, message, f"set {leader}.replicas: 1; put the others under Worker")
    wanted = "node" if workload.kind == "TrainJob" else ROLES.get(workload.kind, ("", "", ""))[2]
    for pod_set in workload.pod_sets if wanted else ():
        if all(text(container.body, "name") != wanted for container in pod_set.containers):
            message = f"no container is called {wanted}; the operator does not find it"
            yield Problem(f"{pod_set.path}.spec.containers", message, f"call the container that runs msrun {wanted}")


RULES = (
    Rule("pods", Severity.ERROR, check_pods),
    Rule("completion-mode", Severity.ERROR, check_completion_mode),
    Rule("completions", Severity.ERROR, check_completions),
    Rule("restart-policy", Severity.ERROR, check_restart_policy),
    Rule("backoff-limit", Severity.WARNING, check_backoff_limit),
    Rule("pod-failure-policy", Severity.ERROR, check_failure_policy),
    Rule("index-once", Severity.ERROR, check_index_once),
    Rule("min-available", Severity.ERROR, check_min_available),
    Rule("volcano-plugins", Severity.ERROR, check_volcano_plugins),
    Rule("replica-types", Severity.ERROR, check_roles),
)
