"""Rules that make the pods of a job one gang: all start with what they need, and all stop. Pure.

Sources: the validation of batch/v1 Job and of the Volcano admission webhook, the training-operator's defaults, and the
Kubernetes documentation on extended resources, emptyDir, pod names and termination.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch_templates.lint.documents import (
    Body,
    PodSet,
    Workload,
    dig,
    is_elastic,
    mapping,
    mappings,
    number,
    pytorch_roles,
    sequence,
    text,
)
from launch_templates.lint.finding import Problem, rules_of
from launch_templates.names import LABEL, MAX_LABEL_LENGTH, SERVICE, fits
from launch_templates.values import find_quantity

_MAX_FAILURE_RULES = 20
_DEVICE = r"nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|huawei\.com/(Ascend.*|npu)"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount point inside the pod

ROLES = {
    "PyTorchJob": ("pytorchReplicaSpecs", "Master", "pytorch"),
    "AscendJob": ("replicaSpecs", "Master", "ascend"),
    "MPIJob": ("mpiReplicaSpecs", "Launcher", ""),
}
"""Kinds of replica types: where these stand, the type that there must be one of, and the name of containers."""


def _jobs(workload: Workload) -> list[tuple[str, Body, PodSet]]:
    """Paths and specs of batch/v1 Jobs."""
    return [(one.job_path, one.job_spec, one) for one in workload.pod_sets if one.job_spec is not None]


def check_pods(workload: Workload) -> Iterator[Problem]:
    """There is at least one pod template, each with containers."""
    if not workload.pod_sets and workload.kind == "TrainJob":
        yield "spec.runtimeRef", "its runtime is not among the files given", "give the file of its runtime too"
    elif not workload.pod_sets:
        yield "spec", f"a {workload.kind} without pods", "describe its pods"
    for pod_set in workload.pod_sets:
        if not pod_set.containers("containers"):
            yield f"{pod_set.path}.spec.containers", "no containers", "add a container that runs msrun"


def check_completion_mode(workload: Workload) -> Iterator[Problem]:
    """Only Indexed gives each pod an index and a stable host name; JobSet sets it by itself when it is left out."""
    for path, job, _ in _jobs(workload):
        mode = job.get("completionMode", "NonIndexed" if workload.kind == "Job" else "Indexed")
        if mode != "Indexed" and workload.num_pods != 1:
            message = f"completionMode is {mode}: pods get no index and no stable name"
            yield f"{path}.completionMode", message, "set completionMode: Indexed"


def check_completions(workload: Workload) -> Iterator[Problem]:
    """completions = parallelism: fewer in parallel and the gang never meets."""
    for path, job, _ in _jobs(workload) if workload.kind != "TrainJob" else ():  # the trainer sets both
        parallelism = job.get("parallelism", 1)
        completions = job.get("completions", 1 if parallelism == 1 else None)
        if type(completions) is not int or not 0 < completions == parallelism:
            message = f"completions is {completions} and parallelism {parallelism}; the gang needs all pods at once"
            yield f"{path}.completions", message, "set both to the number of pods"


def check_restart_policy(workload: Workload) -> Iterator[Problem]:
    """Never: a container that restarts in place cannot join a job whose peers have stopped."""
    if workload.kind == "LeaderWorkerSet":  # its pods are those of StatefulSets
        if dig(workload.document.body, "spec", "leaderWorkerTemplate", "restartPolicy") == "None":
            message = "restartPolicy is None: one pod restarts alone while its peers hang or stop"
            remedy = "set restartPolicy: RecreateGroupOnPodRestart"
            yield "spec.leaderWorkerTemplate.restartPolicy", message, remedy
        return
    default = {"JobSet": "OnFailure", "TrainJob": "OnFailure", "PyTorchJob": "OnFailure"}.get(workload.kind, "Always")
    for pod_set in {id(one): one for one in (*workload.pod_sets, *workload.starters)}.values():
        path, holder = f"{pod_set.path}.spec", pod_set.spec
        if workload.kind in ROLES:
            path = pod_set.path.removesuffix(".template")
            holder = mapping(workload.document.body, *path.split("."))
            default = default if workload.kind == "PyTorchJob" else "Never"
        policy = holder.get("restartPolicy", default)
        if policy != "Never" and workload.num_pods != 1:
            message = f"restartPolicy is {policy}: one pod restarts alone while its peers hang or stop"
            yield f"{path}.restartPolicy", message, "set restartPolicy: Never"


def check_backoff_limit(workload: Workload) -> Iterator[Problem]:
    """0: retries belong to the whole gang (JobSet maxRestarts, Volcano maxRetry); or backoffLimitPerIndex, with spares."""
    places = [(path, job) for path, job, _ in _jobs(workload) if "backoffLimitPerIndex" not in job]
    if workload.kind in ROLES:
        places = [("spec.runPolicy", mapping(workload.document.body, "spec", "runPolicy"))]
    for path, node in places:
        if node.get("backoffLimit") != 0 and workload.num_pods != 1:
            message = f"backoffLimit is {node.get('backoffLimit', 'left out (6)')}: single pods start anew, half alive"
            yield f"{path}.backoffLimit", message, "set backoffLimit: 0; restart the whole job with a JobSet"


def check_pod_failure_policy(workload: Workload) -> Iterator[Problem]:
    """What the API server refuses in a podFailurePolicy."""
    for job_path, job, pod_set in _jobs(workload):
        path, rules = f"{job_path}.podFailurePolicy", sequence(job, "podFailurePolicy", "rules")
        if "podFailurePolicy" in job and pod_set.spec.get("restartPolicy") != "Never":
            yield path, "is refused unless restartPolicy is Never", "set restartPolicy: Never"
        if "podFailurePolicy" in job and job.get("podReplacementPolicy", "Failed") != "Failed":
            yield path, "is refused unless podReplacementPolicy is Failed", "set podReplacementPolicy: Failed"
        if len(rules) > _MAX_FAILURE_RULES:
            yield f"{path}.rules", f"{len(rules)} rules, at most {_MAX_FAILURE_RULES} are allowed", "merge some"
        for position, rule in enumerate(rules):
            place = f"{path}.rules[{position}]"
            if bool(dig(rule, "onExitCodes")) == bool(dig(rule, "onPodConditions")):
                yield place, "needs exactly one of onExitCodes and onPodConditions", "split or complete the rule"
            if 0 in sequence(rule, "onExitCodes", "values") and text(rule, "onExitCodes", "operator") == "In":
                yield place, "0 is not allowed with the operator In", "remove 0"


def check_min_available(workload: Workload) -> Iterator[Problem]:
    """minAvailable = all pods but spare ones, or a part of the gang waits for ever. 0 or left out means all."""
    paths = {"VolcanoJob": "spec.minAvailable", "AscendJob": "spec.runPolicy.schedulingPolicy.minAvailable"}
    path, pods = paths.get(workload.kind, ""), workload.num_pods
    available = number(workload.document.body, *path.split("."))
    enough = [call.whole_number("min_hosts") or pods for _, call in workload.calls] or [pods]
    most = (pods or 0) + sum(one.replicas or 0 for one in workload.others)
    if available and pods is not None and not (enough[0] or pods) <= available <= most:
        yield path, f"minAvailable is {available}, but the gang has {pods} pods", f"set minAvailable: {pods}"


def check_volcano_plugins(workload: Workload) -> Iterator[Problem]:
    """Volcano: the svc plugin makes the DNS names, the env plugin VC_TASK_INDEX; the plugin pytorch brings both."""
    if workload.kind != "VolcanoJob" or workload.num_pods == 1 or pytorch_roles(workload.document):
        return
    plugins = mapping(workload.document.body, "spec", "plugins")
    for name, purpose in (("svc", "pods have no DNS names"), ("env", "pods do not know their index")):
        if name not in plugins:
            yield "spec.plugins", f"without the {name} plugin {purpose}", f"add {name}: [] to plugins"
    if "svc" in plugins and "--publish-not-ready-addresses=true" not in sequence(plugins, "svc"):
        message = "pods that are not ready have no DNS name, so they wait for each other"
        yield "spec.plugins.svc", message, "add --publish-not-ready-addresses=true"


def check_replica_types(workload: Workload) -> Iterator[Problem]:
    """Exactly one leader, and containers of the name by which the operator finds them; it refuses others."""
    key, leader, wanted = ROLES.get(workload.kind, ("", "", "node" if workload.kind == "TrainJob" else ""))
    roles = pytorch_roles(workload.document)
    if leader and not is_elastic(workload.document):
        spec = mapping(workload.document.body, "spec", key, leader)
        if not spec or spec.get("replicas", 1) != 1:
            remedy = f"set {leader}.replicas: 1; put the others under Worker"
            yield f"spec.{key}.{leader}.replicas", f"there must be exactly one {leader}", remedy
    if roles:
        stem = f"{workload.document.name}-{roles[0]}"
        if [one.replicas for one in workload.pod_sets if one.stem == stem] != [1]:
            message = f"the plugin pytorch needs one task {roles[0]!r} of one replica"
            yield "spec.tasks", message, f"add it, or name another with --master in plugins.pytorch, not {roles[0]!r}"
    for pod_set in workload.pod_sets if wanted else ():
        if all(text(body, "name") != wanted for _, body in pod_set.containers()):
            message = f"no container is called {wanted}; the operator does not find it"
            yield f"{pod_set.path}.spec.containers", message, f"call the container that runs msrun {wanted}"


def check_names(workload: Workload) -> Iterator[Problem]:
    """Names are DNS-1123 labels, those that become Services start with a letter, and the last pod's name fits."""
    name, longest = workload.document.name, workload.longest_pod_name
    if not fits(SERVICE, name):
        message = f"{name!r} is no DNS label that starts with a letter, which the Service of the job needs"
        yield "metadata.name", message, "use at most 63 of a-z, 0-9 and -"
    elif len(longest) > MAX_LABEL_LENGTH:
        message = f"pod {longest} would have {len(longest)} characters, at most {MAX_LABEL_LENGTH} are allowed"
        yield "metadata.name", message, "choose a shorter name"
    for pod_set in workload.all_pod_sets:
        known = [(f"{path}.name", text(body, "name")) for path, body in pod_set.containers()]
        for path, own in known:
            is_twice = [other for _, other in known].count(own) > 1
            if is_twice or not fits(LABEL, own):
                problem = "is the name of two containers" if is_twice else "is no DNS label"
                yield path, f"{own!r} {problem}", "use other names, of at most 63 of a-z, 0-9 and -"


def check_resources(workload: Workload) -> Iterator[Problem]:
    """Devices are limits in whole numbers, and requests equal to them; amounts are quantities."""
    for path, container in (one for pod_set in workload.all_pod_sets for one in pod_set.containers()):
        limits, requests = mapping(container, "resources", "limits"), mapping(container, "resources", "requests")
        for name in dict.fromkeys([*limits, *requests]):
            given = [amounts[name] for amounts in (limits, requests) if name in amounts]
            amounts = [find_quantity(amount) for amount in given]
            is_whole = name in limits and len({*amounts}) == 1 and amounts[0] == int(amounts[0] or 0)
            if None in amounts:
                message = f"{name}: {', '.join(map(repr, given))} is no quantity"
                yield f"{path}.resources", message, "write 8, 500m or 32Gi"
            elif "/" in str(name) and not is_whole:
                message = f"{name}: limit {limits.get(name)}, request {requests.get(name)}; must be one whole number"
                yield f"{path}.resources", message, "set the same whole number in both, or the limit only"


def check_device_count(workload: Workload) -> Iterator[Problem]:
    """As many devices as workers in the pod."""
    for _, call in workload.calls if workload.starter is None else ():
        workers = call.whole_number("local_worker_num")
        for name, amount in mapping(call.container, "resources", "limits").items():
            devices = find_quantity(amount) if fits(_DEVICE, str(name)) else None
            if None not in (workers, devices) and devices != workers:
                message = f"{devices} of {name} for --local_worker_num={workers}"
                yield f"{call.path}.resources.limits", message, "give each worker one device"


def check_shared_memory(workload: Workload) -> Iterator[Problem]:
    """The directory /dev/shm is a memory volume with a size limit below the memory limit; by itself it has 64 MiB."""
    for pod_set in workload.pod_sets:
        own = [(pod_set.call.path, pod_set.call.container)] if pod_set.call else pod_set.containers("containers")
        for path, container in own:
            for message, remedy in _shared_memory_faults(pod_set, container):
                yield f"{path}.volumeMounts", message, remedy


def _shared_memory_faults(pod_set: PodSet, container: Body) -> Iterator[tuple[str, str]]:
    mounts = [
        text(one, "name") for one in mappings(container, "volumeMounts") if one.get("mountPath") == _SHARED_MEMORY
    ]
    volume = next((one for one in mappings(pod_set.spec, "volumes") if text(one, "name") in mounts[:1]), None)
    limit = find_quantity(dig(volume, "emptyDir", "sizeLimit"))
    memory = find_quantity(dig(container, "resources", "limits", "memory"))
    if not mounts:
        message = "nothing is mounted at /dev/shm: its 64 MiB end data loaders and collectives with a bus error"
        yield message, "mount an emptyDir with medium: Memory and a sizeLimit there"
    elif text(volume, "emptyDir", "medium") != "Memory" or limit is None:
        message = f"volume {mounts[0]!r} at /dev/shm is no emptyDir in memory with a sizeLimit"
        yield message, "set emptyDir: {medium: Memory, sizeLimit: 8Gi}"
    elif memory is not None and limit >= memory:
        message = "the sizeLimit of /dev/shm is not below the memory limit, which it counts against"
        yield message, "lower the sizeLimit or raise the memory limit"


def check_shell(workload: Workload) -> Iterator[Problem]:
    """A shell as process 1 keeps SIGTERM to itself: no checkpoint is saved before the pod is killed."""
    for _, call in workload.calls:
        if call.is_under_shell:
            message = "a shell stands before msrun and does not pass SIGTERM on"
            yield call.place, message, "write exec msrun ..., or run msrun without a shell"


def check_grace(workload: Workload) -> Iterator[Problem]:
    """The pod's time between SIGTERM and SIGKILL (30 s) is longer than --grace, in which workers save (10 s)."""
    for pod_set, call in workload.calls:
        pod_s = pod_set.spec.get("terminationGracePeriodSeconds", 30)
        own_s = call.whole_number("grace") if "grace" in call.options else 10
        if type(pod_s) is int and own_s is not None and pod_s <= own_s:
            message = f"terminationGracePeriodSeconds is {pod_s}, which ends the pod within --grace={own_s}"
            yield call.place, message, f"set terminationGracePeriodSeconds: {own_s + 10}"


_WARNINGS = (check_backoff_limit, check_device_count, check_shared_memory, check_shell, check_grace)
_CHECKS = (
    *(check_pods, check_completion_mode, check_completions, check_restart_policy, check_backoff_limit),
    *(check_pod_failure_policy, check_min_available, check_volcano_plugins, check_replica_types, check_names),
    *(check_resources, check_device_count, check_shared_memory, check_shell, check_grace),
)
RULES = rules_of(_CHECKS, _WARNINGS)
