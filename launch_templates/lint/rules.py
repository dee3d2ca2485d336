"""What rules find: how the msrun processes of a job meet, and whether its pods are one gang. Pure.

Sources: the validation of batch/v1 Job and of the Volcano admission webhook, the naming rules of the kinds (see
documents.py), the training-operator's defaults, msrun's own options, and the Kubernetes documentation on extended
resources, emptyDir, pod names and termination.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from launch_templates.lint.documents import Body, Document, PodSet, Workload, dig, mapping, mappings, sequence, text
from launch_templates.msrun_options import NAMES, hint_of_option
from launch_templates.names import LABEL, MAX_LABEL_LENGTH, RANK_VARIABLES, SERVICE, find_reference, fits
from launch_templates.values import find_quantity


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


_NEEDED = {
    "Job": ("worker_num", "local_worker_num"),
    "JobSet": ("worker_num", "local_worker_num"),
    "MPIJob": ("worker_num",),
    "AscendJob": ("worker_num", "local_worker_num", "master_addr", "master_port", "node_rank"),
}
"""Options without which an msrun does not know the job; the pods of other kinds have it in their variables."""
_INDEX_FIELD = "batch.kubernetes.io/job-completion-index"
_DEVICE = r"nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|huawei\.com/(Ascend.*|npu)"
_SHM = "/dev/shm"  # noqa: S108 - a mount point inside the pod

ROLES = {
    "PyTorchJob": ("pytorchReplicaSpecs", "Master", "pytorch"),
    "AscendJob": ("replicaSpecs", "Master", "ascend"),
    "MPIJob": ("mpiReplicaSpecs", "Launcher", ""),
}
"""Kinds of replica types: where these stand, the type that there must be one of, and the name of containers."""


def check_msrun_option(workload: Workload) -> Iterator[Problem]:
    """Every option of msrun is one: the command refuses others, and the job with them."""
    for _, call in workload.calls:
        for name, word in call.line.words.items():
            if name not in NAMES:
                remedy = hint_of_option(name, "the script's own follow its name")
                yield call.place, f"{word} is no option of msrun", remedy


def check_msrun_command(workload: Workload) -> Iterator[Problem]:
    """All pods run msrun, with the options that the pods of their kind cannot know by their variables."""
    for pod_set in workload.starters:
        if pod_set.call is None:
            message = "no container runs msrun, so ranks, port and address cannot be checked"
            yield f"{pod_set.path}.spec.containers", message, "run msrun, directly or as: exec msrun ..."
    needed = _NEEDED.get(workload.kind, ()) if workload.num_pods != 1 else ()
    for _, call in workload.calls:
        missing = ", ".join(f"--{name}" for name in needed if name not in call.options)
        if missing and "rank_table_file" not in call.options:
            yield call.place, f"msrun lacks {missing}", "give all of them on every pod"


def check_world_size(workload: Workload) -> Iterator[Problem]:
    """worker_num = sum over all pods of local_worker_num; with --min_hosts, pods beyond it are spare."""
    local = {pod_set.path: call.whole_number("local_worker_num") for pod_set, call in workload.calls}
    if workload.starter is not None and local:
        local = dict.fromkeys((one.path for one in workload.pod_sets), next(iter(local.values())))
    total = 0
    for pod_set in workload.pod_sets:
        pods, workers = pod_set.replicas, local.get(pod_set.path)
        if pods is None or workers is None:
            return
        total += pods * workers
    for _, call in workload.calls:
        asked = call.whole_number("worker_num")
        if asked is not None and asked != total and not ("min_hosts" in call.options and asked < total):
            message = f"--worker_num={asked}, but {workload.num_pods} pods start {total} workers in all"
            yield call.place, message, f"set --worker_num={total} or change the number of pods"


def check_master_address(workload: Workload) -> Iterator[Problem]:
    """master_addr is the DNS name of pod 0: short, with namespace, or in full."""
    own = workload.master_name
    for _, call in workload.calls if own else ():
        address = call.value("master_addr") or own
        namespace, _, domain = address.removeprefix(f"{own}.").partition(".")
        is_longer = address.startswith(f"{own}.") and namespace == (workload.document.namespace or namespace)
        if address != own and not (is_longer and domain.split(".")[0] in ("", "svc")):
            message = f"--master_addr={address} is not the name of the pod with node rank 0"
            yield call.place, message, f"set --master_addr={own}"


def check_node_rank(workload: Workload) -> Iterator[Problem]:
    """node_rank comes from the variable in which this kind of controller tells the index, or is -1: by address."""
    own = {workload.rank_variable, {"PyTorchJob": "RANK", "TrainJob": "JOB_COMPLETION_INDEX"}.get(workload.kind)}
    for pod_set, call in workload.calls if workload.starter is None else ():
        given = call.options.get("node_rank", "-1")
        variable = find_reference(given)
        sources = [one for one in mappings(call.container, "env") if variable and one.get("name") == variable]
        is_told = any(_INDEX_FIELD in text(one, "valueFrom", "fieldRef", "fieldPath") for one in sources)
        is_master = pod_set.replicas == 1 and pod_set is workload.pod_sets[0] and len(workload.pod_sets) > 1
        is_first = given == "0" and (workload.num_pods == 1 or is_master)
        if given != "-1" and not is_first and not is_told and (variable is None or variable not in own):
            message = f"--node_rank={given} does not tell the pods of a {workload.kind} apart"
            yield call.place, message, f"set --node_rank=$({workload.rank_variable})"


def check_rank_variable(workload: Workload) -> Iterator[Problem]:
    """No container sets an index variable itself: the controllers leave a variable alone that is already there."""
    for path, container in (one for pod_set in workload.pod_sets for one in pod_set.all_containers):
        for position, item in enumerate(mappings(container, "env")):
            if text(item, "name") in RANK_VARIABLES and "value" in item:
                message = f"{text(item, 'name')} is set here, which hides the index of the controller"
                yield f"{path}.env[{position}]", message, "remove it"


def check_port(workload: Workload) -> Iterator[Problem]:
    """The rendezvous port is the same in every msrun, container port, Service, variable and plugin."""
    places = [(call.place, "--master_port", call.whole_number("master_port")) for _, call in workload.calls]
    expected = next((port for *_, port in places if port is not None), None)
    if expected is None:
        return
    for _, call in workload.calls:
        for position, port in enumerate(mappings(call.container, "ports")):
            if (name := text(port, "name")) in ("rendezvous", "pytorchjob-port", "ascendjob-port"):
                path = f"{call.path}.ports[{position}].containerPort"
                places.append((path, f"port {name}", _port(port.get("containerPort"))))
        for position, item in enumerate(mappings(call.container, "env")):
            if text(item, "name") == "MASTER_PORT":
                places.append((f"{call.path}.env[{position}].value", "MASTER_PORT", _port(item.get("value"))))
    for service in workload.services:
        for position, one in enumerate(mappings(service.body, "spec", "ports")):
            if text(one, "name") in ("", "rendezvous"):
                what = f"{service.label} spec.ports[{position}].port"
                places.append(("spec.template.spec.subdomain", what, _port(one.get("port"))))
    if workload.plugin:
        what = "the plugin's port, which the workers' pods wait for,"
        places.append(("spec.plugins.pytorch", what, _port(workload.plugin["port"])))
    for path, what, found in places:
        if found is not None and found != expected:
            message = f"{what} is {found}, but the first msrun has --master_port={expected}"
            yield path, message, "use one port everywhere"


def _port(given: object) -> int | None:
    return int(str(given)[:9]) if fits("[0-9]+", str(given)) else None


def check_headless_service(workload: Workload) -> Iterator[Problem]:
    """An Indexed Job has a subdomain and a headless Service of that name that selects its pods, also unready ones."""
    if workload.kind == "AscendJob" and not workload.master_name:
        message = "no headless Service selects the master; that of the operator has an address which is not the pod's"
        yield "spec.replicaSpecs", message, "add one, or give its file to lint too"
    if workload.kind != "Job" or workload.num_pods == 1:
        return
    subdomain = text(workload.pod_sets[0].spec, "subdomain")
    path = f"{workload.pod_sets[0].path}.spec.subdomain"
    if not subdomain:
        yield path, "pods have no DNS name without it", f"set subdomain: {workload.name}"
    elif not workload.services:
        message = f"no Service {subdomain!r} in the same namespace among the files given"
        yield path, message, "add a headless Service of that name, or give its file to lint too"
    for service in workload.services:
        spec, label = mapping(service.body, "spec"), service.label
        if spec.get("clusterIP") != "None":
            yield path, f"{label} is not headless, so pod 0 has no name of its own", "set spec.clusterIP: None"
        if spec.get("publishNotReadyAddresses") is not True:
            message = f"{label} hides pods that are not ready, so they wait for each other"
            yield path, message, "set spec.publishNotReadyAddresses: true"
        labels = mapping(workload.pod_sets[0].template, "metadata", "labels")
        labels = labels | {"job-name": workload.name, "batch.kubernetes.io/job-name": workload.name}
        selector = mapping(spec, "selector")
        if not selector or not selector.items() <= labels.items():
            remedy = f"set spec.selector: {{job-name: {workload.name}}}"
            yield path, f"{label} does not select the pods of Job {workload.name}", remedy


def check_dns_names(workload: Workload) -> Iterator[Problem]:
    """The name of pod 0 resolves: JobSet makes names, and a pod in its host's network asks the cluster's DNS."""
    if workload.kind == "JobSet" and dig(workload.spec, "network", "enableDNSHostnames") is False:
        yield "spec.network.enableDNSHostnames", "pods have no DNS name", "set it to true or remove it"
    for pod_set in workload.pod_sets:
        if pod_set.spec.get("hostNetwork") is True and pod_set.spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
            message = "with hostNetwork the pod asks the DNS of its host, which does not know the pods' names"
            yield f"{pod_set.path}.spec.dnsPolicy", message, "set dnsPolicy: ClusterFirstWithHostNet"


def check_host_network(workload: Workload) -> Iterator[Problem]:
    """In the network of its host, as RDMA without a plugin needs it, a job shares ports with others on that host."""
    for pod_set in workload.all_pod_sets:
        if pod_set.spec.get("hostNetwork") is True:
            message = "hostNetwork: the rendezvous port must be free on the host, and other jobs there can reach it"
            yield f"{pod_set.path}.spec.hostNetwork", message, "give each job another --master_port, and a --token_file"


def check_index_once(workload: Workload) -> Iterator[Problem]:
    """Each index is given once: it restarts at 0 in every Volcano task and in every job of a JobSet."""
    if workload.kind == "VolcanoJob" and len(workload.pod_sets) > 1 and not workload.plugin:
        message = f"{len(workload.pod_sets)} tasks: VC_TASK_INDEX starts at 0 in each, so node ranks repeat"
        yield "spec.tasks", message, "use one task with all replicas, or the plugin pytorch"
    if workload.kind == "JobSet" and [one.copies for one in workload.pod_sets] not in ([], [1]):
        message = "several jobs: JOB_COMPLETION_INDEX starts at 0 in each, so node ranks repeat"
        yield "spec.replicatedJobs", message, "use one replicated job with replicas: 1 and more completions"


def check_extra_task(workload: Workload) -> Iterator[Problem]:
    """Volcano's plugin pytorch, up to 1.11, counts the pods of all tasks in WORLD_SIZE, also those without a worker."""
    for other in workload.others if workload.plugin else ():
        name = other.stem.removeprefix(f"{workload.name}-")
        message = f"task {name!r} is neither master nor worker of the plugin pytorch, yet may count in WORLD_SIZE"
        yield "spec.tasks", message, "give msrun --worker_num and --local_worker_num, or the task a job of its own"


def check_rank_table_mount(workload: Workload) -> Iterator[Problem]:
    """The folder of --rank_table_file is a whole volume: a file mounted with subPath never changes its status."""
    for _, call in workload.calls:
        place, path = call.value("rank_table_file"), f"{call.path}.volumeMounts"
        mounts = mappings(call.container, "volumeMounts") if place else []
        fitting = [one for one in mounts if PurePosixPath(place or "").is_relative_to(text(one, "mountPath") or "?")]
        if place and not fitting:
            yield path, f"no volume is mounted at the folder of {place}", "mount the ConfigMap of the rank table there"
        for one in fitting:
            if "subPath" in one or "subPathExpr" in one:
                problem = "has a subPath: it keeps the state of its start, so msrun waits for ever"
                yield path, f"{text(one, 'mountPath')} {problem}", "mount the whole ConfigMap at the folder"


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
        if not pod_set.containers:
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
        if dig(workload.spec, "leaderWorkerTemplate", "restartPolicy") == "None":
            message = "restartPolicy is None: one pod restarts alone while its peers hang or stop"
            yield "spec.leaderWorkerTemplate.restartPolicy", message, "set restartPolicy: RecreateGroupOnPodRestart"
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
    """0: retries belong to the whole gang (JobSet maxRestarts, Volcano maxRetry); with spares backoffLimitPerIndex."""
    places = [(path, job) for path, job, _ in _jobs(workload) if "backoffLimitPerIndex" not in job]
    if workload.kind in ROLES:
        places = [("spec.runPolicy", mapping(workload.spec, "runPolicy"))]
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
        if len(rules) > 20:
            yield f"{path}.rules", f"{len(rules)} rules, at most 20 are allowed", "merge some"
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
    available = dig(workload.document.body, *path.split("."))
    if not available or type(available) is not int or pods is None:
        return
    least = min([call.whole_number("min_hosts") or pods for _, call in workload.calls], default=pods)
    if not least <= available <= pods + sum(one.replicas or 0 for one in workload.others):
        yield path, f"minAvailable is {available}, but the gang has {pods} pods", f"set minAvailable: {pods}"


def check_volcano_plugins(workload: Workload) -> Iterator[Problem]:
    """Volcano: the svc plugin makes the DNS names, the env plugin VC_TASK_INDEX; the plugin pytorch brings both."""
    if workload.kind != "VolcanoJob" or workload.num_pods == 1 or workload.plugin:
        return
    plugins = mapping(workload.spec, "plugins")
    for name, purpose in (("svc", "pods have no DNS names"), ("env", "pods do not know their index")):
        if name not in plugins:
            yield "spec.plugins", f"without the {name} plugin {purpose}", f"add {name}: [] to plugins"
    if "svc" in plugins and "--publish-not-ready-addresses=true" not in sequence(plugins, "svc"):
        message = "pods that are not ready have no DNS name, so they wait for each other"
        yield "spec.plugins.svc", message, "add --publish-not-ready-addresses=true"


def check_replica_types(workload: Workload) -> Iterator[Problem]:
    """Exactly one leader, and containers of the name by which the operator finds them; it refuses others."""
    key, leader, wanted = ROLES.get(workload.kind, ("", "", "node" if workload.kind == "TrainJob" else ""))
    if leader and not workload.is_elastic:
        spec = mapping(workload.spec, key, leader)
        if not spec or spec.get("replicas", 1) != 1:
            remedy = f"set {leader}.replicas: 1; put the others under Worker"
            yield f"spec.{key}.{leader}.replicas", f"there must be exactly one {leader}", remedy
    if workload.plugin:
        master = workload.plugin["master"]
        if [one.replicas for one in workload.pod_sets if one.stem == f"{workload.name}-{master}"] != [1]:
            message = f"the plugin pytorch needs one task {master!r} of one replica"
            yield "spec.tasks", message, f"add it, or name another with --master in plugins.pytorch, not {master!r}"
    for pod_set in workload.pod_sets if wanted else ():
        if all(text(body, "name") != wanted for _, body in pod_set.all_containers):
            message = f"no container is called {wanted}; the operator does not find it"
            yield f"{pod_set.path}.spec.containers", message, f"call the container that runs msrun {wanted}"


def check_names(workload: Workload) -> Iterator[Problem]:
    """Names are DNS-1123 labels, those that become Services start with a letter, and the last pod's name fits."""
    name, longest = workload.name, workload.longest_pod_name
    if not fits(SERVICE, name):
        message = f"{name!r} is no DNS label that starts with a letter, which the Service of the job needs"
        yield "metadata.name", message, "use at most 63 of a-z, 0-9 and -"
    elif len(longest) > MAX_LABEL_LENGTH:
        message = f"pod {longest} would have {len(longest)} characters, at most {MAX_LABEL_LENGTH} are allowed"
        yield "metadata.name", message, "choose a shorter name"
    for pod_set in workload.all_pod_sets:
        known = [(f"{path}.name", text(body, "name")) for path, body in pod_set.all_containers]
        for path, own in known:
            is_twice = [other for _, other in known].count(own) > 1
            if is_twice or not fits(LABEL, own):
                problem = "is the name of two containers" if is_twice else "is no DNS label"
                yield path, f"{own!r} {problem}", "use other names, of at most 63 of a-z, 0-9 and -"


def check_resources(workload: Workload) -> Iterator[Problem]:
    """Devices are limits in whole numbers, and requests equal to them; amounts are quantities."""
    for path, container in (one for pod_set in workload.all_pod_sets for one in pod_set.all_containers):
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
        own = [(pod_set.call.path, pod_set.call.container)] if pod_set.call else pod_set.containers
        for path, container in own:
            names = [one.get("name") for one in mappings(container, "volumeMounts") if one.get("mountPath") == _SHM]
            volume = next((one for one in mappings(pod_set.spec, "volumes") if one.get("name") in names[:1]), None)
            limit = find_quantity(dig(volume, "emptyDir", "sizeLimit"))
            memory = find_quantity(dig(container, "resources", "limits", "memory"))
            message = remedy = ""
            if not names:
                message = "nothing is mounted at /dev/shm: its 64 MiB end data loaders and collectives with a bus error"
                remedy = "mount an emptyDir with medium: Memory and a sizeLimit there"
            elif text(volume, "emptyDir", "medium") != "Memory" or limit is None:
                message = f"volume {names[0]!r} at /dev/shm is no emptyDir in memory with a sizeLimit"
                remedy = "set emptyDir: {medium: Memory, sizeLimit: 8Gi}"
            elif memory is not None and limit >= memory:
                message = "the sizeLimit of /dev/shm is not below the memory limit, which it counts against"
                remedy = "lower the sizeLimit or raise the memory limit"
            if message:
                yield f"{path}.volumeMounts", message, remedy


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


OF_PLACE = (
    *(check_msrun_option, check_msrun_command, check_world_size, check_master_address, check_node_rank),
    *(check_rank_variable, check_port, check_headless_service, check_dns_names, check_host_network, check_index_once),
    *(check_extra_task, check_rank_table_mount),
)
OF_PODS = (
    *(check_pods, check_completion_mode, check_completions, check_restart_policy, check_backoff_limit),
    *(check_pod_failure_policy, check_min_available, check_volcano_plugins, check_replica_types, check_names),
    *(check_resources, check_device_count, check_shared_memory, check_shell, check_grace),
)
_WARNINGS = (
    *(check_msrun_command, check_host_network, check_extra_task, check_backoff_limit, check_device_count),
    *(check_shared_memory, check_shell, check_grace),
)
PLACE_RULES, POD_RULES = rules_of(OF_PLACE, _WARNINGS), rules_of(OF_PODS, _WARNINGS)
