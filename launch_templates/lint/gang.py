"""Rules that make the pods of a job one gang: all start with what they need, and all stop. Pure.

Sources: the validation of batch/v1 Job and of the Volcano admission webhook, the training-operator's defaults, and the
Kubernetes documentation on extended resources, emptyDir, pod names and termination.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launch_templates.lint.documents import (
    Container,
    Document,
    PodSet,
    Workload,
    dig,
    is_elastic,
    mapping,
    number,
    pytorch_roles,
    sequence,
    text,
)
from launch_templates.lint.finding import Problem, Severity, rules_of
from launch_templates.names import MAX_LABEL_LENGTH, is_label, is_service_name
from launch_templates.values import find_quantity

_MAX_FAILURE_RULES = 20
_DEVICE = re.compile(r"(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|huawei\.com/(Ascend.*|npu))")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount point inside the pod

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
        yield "spec.runtimeRef", "its runtime is not among the files given", "give the file of its runtime too"
    elif not workload.pod_sets:
        yield "spec", f"a {workload.kind} without pods", "describe its pods"
    for pod_set in workload.pod_sets:
        if not any(not container.is_init for container in pod_set.containers):
            yield f"{pod_set.path}.spec.containers", "no containers", "add a container that runs msrun"


def check_completion_mode(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Only Indexed gives each pod an index and a stable host name; JobSet sets it by itself when it is left out."""
    for pod_set, job in _jobs(workload):
        mode = job.get("completionMode", "NonIndexed" if workload.kind == "Job" else "Indexed")
        if mode != "Indexed" and workload.num_pods != 1:
            message = f"completionMode is {mode}: pods get no index and no stable name"
            yield f"{pod_set.job_path}.completionMode", message, "set completionMode: Indexed"


def check_completions(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """completions = parallelism: fewer in parallel and the gang never meets."""
    if workload.kind == "TrainJob":
        return  # the trainer sets both
    for pod_set, job in _jobs(workload):
        parallelism = job.get("parallelism", 1)
        completions = job.get("completions", 1 if parallelism == 1 else None)
        is_count = type(completions) is int and completions > 0
        if not is_count or completions != parallelism:
            message = f"completions is {completions} and parallelism {parallelism}; the gang needs all pods at once"
            yield f"{pod_set.job_path}.completions", message, "set both to the number of pods"


def check_restart_policy(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Never: a container that restarts in place cannot join a job whose peers have stopped."""
    if workload.kind == "LeaderWorkerSet":  # its pods are those of StatefulSets
        policy = dig(workload.document.body, "spec", "leaderWorkerTemplate", "restartPolicy")
        if policy == "None":
            message = "restartPolicy is None: one pod restarts alone while its peers hang or stop"
            remedy = "set restartPolicy: RecreateGroupOnPodRestart"
            yield "spec.leaderWorkerTemplate.restartPolicy", message, remedy
        return
    default = {"JobSet": "OnFailure", "TrainJob": "OnFailure"}.get(workload.kind, "Always")
    for pod_set in (*workload.pod_sets, *([workload.starter] if workload.starter else [])):
        path, policy = f"{pod_set.path}.spec.restartPolicy", pod_set.spec.get("restartPolicy", default)
        if workload.kind in ROLES:
            _, key, role, _ = pod_set.path.split(".")
            path = f"spec.{key}.{role}.restartPolicy"
            default = "OnFailure" if workload.kind == "PyTorchJob" else "Never"
            policy = mapping(workload.document.body, "spec", key, role).get("restartPolicy", default)
        if policy != "Never" and workload.num_pods != 1:
            message = f"restartPolicy is {policy}: one pod restarts alone while its peers hang or stop"
            yield path, message, "set restartPolicy: Never"


def check_backoff_limit(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """0: retries belong to the whole gang (JobSet maxRestarts, Volcano maxRetry)."""
    places = [(pod_set.job_path, job) for pod_set, job in _jobs(workload)]
    if workload.kind in ROLES:
        places = [("spec.runPolicy", mapping(workload.document.body, "spec", "runPolicy"))]
    for path, node in places:
        if node.get("backoffLimit") != 0 and workload.num_pods != 1:
            message = f"backoffLimit is {node.get('backoffLimit', 'left out (6)')}: single pods start anew, half alive"
            yield f"{path}.backoffLimit", message, "set backoffLimit: 0; restart the whole job with a JobSet"


def check_failure_policy(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """What the API server refuses in a podFailurePolicy."""
    for pod_set, job in _jobs(workload):
        if "podFailurePolicy" not in job:
            continue
        path = f"{pod_set.job_path}.podFailurePolicy"
        rules = sequence(job, "podFailurePolicy", "rules")
        if pod_set.spec.get("restartPolicy") != "Never":
            yield path, "is refused unless restartPolicy is Never", "set restartPolicy: Never"
        if job.get("podReplacementPolicy", "Failed") != "Failed":
            yield path, "is refused unless podReplacementPolicy is Failed", "set podReplacementPolicy: Failed"
        if len(rules) > _MAX_FAILURE_RULES:
            yield f"{path}.rules", f"{len(rules)} rules, at most {_MAX_FAILURE_RULES} are allowed", "merge some"
        for position, rule in enumerate(rules):
            if bool(mapping(rule).get("onExitCodes")) == bool(mapping(rule).get("onPodConditions")):
                message = "needs exactly one of onExitCodes and onPodConditions"
                yield f"{path}.rules[{position}]", message, "split or complete the rule"
            statuses = sequence(rule, "onExitCodes", "values")
            if 0 in statuses and text(rule, "onExitCodes", "operator") == "In":
                yield f"{path}.rules[{position}]", "0 is not allowed with the operator In", "remove 0"


def check_min_available(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """minAvailable = all pods, or a part of the gang starts and waits for ever. 0 or left out means all."""
    path = {"VolcanoJob": "minAvailable", "AscendJob": "runPolicy.schedulingPolicy.minAvailable"}.get(workload.kind)
    if path is None:
        return
    available = number(workload.document.body, "spec", *path.split("."))
    others = [one.replicas or 0 for one in workload.others]
    if not available or workload.num_pods is None:
        return
    if not workload.num_pods <= available <= workload.num_pods + sum(others):
        message = f"minAvailable is {available}, but the gang has {workload.num_pods} pods"
        yield f"spec.{path}", message, f"set minAvailable: {workload.num_pods}"


def check_volcano_plugins(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Volcano: the svc plugin makes the DNS names, the env plugin VC_TASK_INDEX; the plugin pytorch brings both."""
    if workload.kind != "VolcanoJob" or workload.num_pods == 1:
        return
    plugins = mapping(workload.document.body, "spec", "plugins")
    needed = () if pytorch_roles(workload.document) else (
        ("svc", "pods have no DNS names"), ("env", "pods do not know their index")
    )  # fmt: skip
    for name, purpose in needed:
        if name not in plugins:
            yield "spec.plugins", f"without the {name} plugin {purpose}", f"add {name}: [] to plugins"
    arguments = [str(argument) for argument in sequence(plugins, "svc")]
    if "svc" in plugins and needed and "--publish-not-ready-addresses=true" not in arguments:
        message = "pods that are not ready have no DNS name, so they wait for each other"
        yield "spec.plugins.svc", message, "add --publish-not-ready-addresses=true"


def check_roles(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Exactly one leader, and containers of the name by which the operator finds them; it refuses others."""
    if workload.kind in ROLES and not is_elastic(workload.document):
        key, leader, _ = ROLES[workload.kind]
        spec = mapping(workload.document.body, "spec", key, leader)
        if not spec or spec.get("replicas", 1) != 1:
            message = f"there must be exactly one {leader}"
            remedy = f"set {leader}.replicas: 1; put the others under Worker"
            yield f"spec.{key}.{leader}.replicas", message, remedy
    roles = pytorch_roles(workload.document)
    if roles:
        stem = f"{workload.document.name}-{roles[0]}"
        if [one.replicas for one in workload.pod_sets if one.stem == stem] != [1]:
            message = f"the plugin pytorch needs one task {roles[0]!r} of one replica"
            yield "spec.tasks", message, f"add it, or name another with --master in plugins.pytorch, not {roles[0]!r}"
    wanted = "node" if workload.kind == "TrainJob" else ROLES.get(workload.kind, ("", "", ""))[2]
    for pod_set in workload.pod_sets if wanted else ():
        if all(text(container.body, "name") != wanted for container in pod_set.containers):
            message = f"no container is called {wanted}; the operator does not find it"
            yield f"{pod_set.path}.spec.containers", message, f"call the container that runs msrun {wanted}"


def check_names(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Names are DNS-1123 labels, those that become Services start with a letter, and the last pod's name fits."""
    name = workload.document.name
    if not is_service_name(name):
        message = f"{name!r} is no DNS label that starts with a letter, which the Service of the job needs"
        yield "metadata.name", message, "use at most 63 of a-z, 0-9 and -"
    elif len(workload.longest_pod_name) > MAX_LABEL_LENGTH:
        longest = workload.longest_pod_name
        message = f"pod {longest} would have {len(longest)} characters, at most {MAX_LABEL_LENGTH} are allowed"
        yield "metadata.name", message, "choose a shorter name"
    for pod_set in workload.all_pod_sets:
        known = [text(container.body, "name") for container in pod_set.containers]
        for container in pod_set.containers:
            own = text(container.body, "name")
            if not is_label(own) or known.count(own) > 1:
                problem = "is no DNS label" if not is_label(own) else "is the name of two containers"
                yield f"{container.path}.name", f"{own!r} {problem}", "use other names, of at most 63 of a-z, 0-9 and -"


def check_extended_resources(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Devices are limits in whole numbers, and requests equal to them; amounts are quantities."""
    for container in (one for pod_set in workload.all_pod_sets for one in pod_set.containers):
        limits = mapping(container.body, "resources", "limits")
        requests = mapping(container.body, "resources", "requests")
        for name in dict.fromkeys([*limits, *requests]):
            limit, request = find_quantity(limits.get(name)), find_quantity(requests.get(name, limits.get(name)))
            given = [amounts[name] for amounts in (limits, requests) if name in amounts]
            if any(find_quantity(amount) is None for amount in given):
                message = f"{name}: {', '.join(map(repr, given))} is no quantity"
                yield f"{container.path}.resources", message, "write 8, 500m or 32Gi"
            elif "/" in str(name) and (limit is None or limit != request or limit != int(limit)):
                message = f"{name}: limit {limits.get(name)}, request {requests.get(name)}; must be one whole number"
                yield f"{container.path}.resources", message, "set the same whole number in both, or the limit only"


def check_device_count(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """As many devices as workers in the pod."""
    for _, container, call in workload.calls if workload.starter is None else ():
        workers = call.whole_number("local_worker_num")
        for name, amount in mapping(container.body, "resources", "limits").items():
            devices = find_quantity(amount)
            if _DEVICE.fullmatch(str(name)) and workers is not None and devices is not None and devices != workers:
                message = f"{devices} of {name} for --local_worker_num={workers}"
                yield f"{container.path}.resources.limits", message, "give each worker one device"


def check_shared_memory(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The directory /dev/shm is a memory volume with a size limit below the memory limit; by itself it has 64 MiB."""
    for pod_set in workload.pod_sets:
        own = [pod_set.call[0]] if pod_set.call else [one for one in pod_set.containers if not one.is_init]
        for container in own:
            yield from _shared_memory_problems(pod_set, container)


def _shared_memory_problems(pod_set: PodSet, container: Container) -> Iterator[Problem]:
    mounts = [item for item in sequence(container.body, "volumeMounts") if text(item, "mountPath") == _SHARED_MEMORY]
    path = f"{container.path}.volumeMounts"
    if not mounts:
        message = "nothing is mounted at /dev/shm: its 64 MiB end data loaders and collectives with a bus error"
        yield path, message, "mount an emptyDir with medium: Memory and a sizeLimit there"
        return
    name = text(mounts[0], "name")
    volume = next((item for item in sequence(pod_set.spec, "volumes") if text(item, "name") == name), None)
    limit = find_quantity(dig(volume, "emptyDir", "sizeLimit"))
    memory = find_quantity(dig(container.body, "resources", "limits", "memory"))
    if text(volume, "emptyDir", "medium") != "Memory" or limit is None:
        message = f"volume {name!r} at /dev/shm is no emptyDir in memory with a sizeLimit"
        yield path, message, "set emptyDir: {medium: Memory, sizeLimit: 8Gi}"
    elif memory is not None and limit >= memory:
        message = "the sizeLimit of /dev/shm is not below the memory limit, which it counts against"
        yield path, message, "lower the sizeLimit or raise the memory limit"


def check_shell(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """A shell as process 1 keeps SIGTERM to itself: no checkpoint is saved before the pod is killed."""
    for _, container, call in workload.calls:
        if call.is_under_shell:
            message = "a shell stands before msrun and does not pass SIGTERM on"
            yield f"{container.path}.{call.key}", message, "write exec msrun ..., or run msrun without a shell"


def check_grace(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The pod's time between SIGTERM and SIGKILL (30 s) is longer than --grace, in which workers save (10 s)."""
    for pod_set, container, call in workload.calls:
        pod_s = pod_set.spec.get("terminationGracePeriodSeconds", 30)
        own_s = call.whole_number("grace") if "grace" in call.options else 10
        if type(pod_s) is int and own_s is not None and pod_s <= own_s:
            message = f"terminationGracePeriodSeconds is {pod_s}, which ends the pod within --grace={own_s}"
            yield f"{container.path}.{call.key}", message, f"set terminationGracePeriodSeconds: {own_s + 10}"


RULES = rules_of((
    ("pods", Severity.ERROR, check_pods),
    ("completion-mode", Severity.ERROR, check_completion_mode),
    ("completions", Severity.ERROR, check_completions),
    ("restart-policy", Severity.ERROR, check_restart_policy),
    ("backoff-limit", Severity.WARNING, check_backoff_limit),
    ("pod-failure-policy", Severity.ERROR, check_failure_policy),
    ("min-available", Severity.ERROR, check_min_available),
    ("volcano-plugins", Severity.ERROR, check_volcano_plugins),
    ("replica-types", Severity.ERROR, check_roles),
    ("names", Severity.ERROR, check_names),
    ("resources", Severity.ERROR, check_extended_resources),
    ("device-count", Severity.WARNING, check_device_count),
    ("shared-memory", Severity.WARNING, check_shared_memory),
    ("shell", Severity.WARNING, check_shell),
    ("grace", Severity.WARNING, check_grace),
))  # fmt: skip
