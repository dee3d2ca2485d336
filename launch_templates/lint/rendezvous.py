"""Rules on how the msrun processes of a job find each other. Pure.

Sources: the Job, JobSet, Volcano and training-operator naming rules (see documents.py), and msrun's own options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath

from launch_templates.lint.documents import (
    Container,
    Document,
    Workload,
    dig,
    mapping,
    number,
    pytorch_roles,
    sequence,
    text,
)
from launch_templates.lint.finding import Problem, Severity, rules_of
from launch_templates.msrun_options import NAMES, Invocation
from launch_templates.names import RANK_VARIABLES, find_reference

_NEEDED = {
    "Job": ("worker_num", "local_worker_num"),
    "JobSet": ("worker_num", "local_worker_num"),
    "MPIJob": ("worker_num",),
    "AscendJob": ("worker_num", "local_worker_num", "master_addr", "master_port", "node_rank"),
}
"""Options without which an msrun does not know the job; the pods of other kinds have it in their variables."""
_INDEX_FIELD = "batch.kubernetes.io/job-completion-index"


def check_option_names(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Every option of msrun is one: the command refuses others, and the job with them."""
    for _, container, call in workload.calls:
        for name, word in call.line.words.items():
            if name not in NAMES:
                near = get_close_matches(name, NAMES, n=1)
                remedy = f"did you mean --{near[0]}?" if near else "see msrun --help; the script's own follow its name"
                yield _place(container, call), f"{word} is no option of msrun", remedy


def _place(container: Container, call: Invocation) -> str:
    return f"{container.path}.{call.key}"


def check_command(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """All pods run msrun, with the options that the pods of their kind cannot know by their variables."""
    starters = workload.pod_sets if workload.starter is None else (workload.starter,)
    for pod_set in starters:
        if pod_set.call is None:
            message = "no container runs msrun, so ranks, port and address cannot be checked"
            yield f"{pod_set.path}.spec.containers", message, "run msrun, directly or as: exec msrun ..."
    for _, container, call in workload.calls:
        needed = () if "rank_table_file" in call.options else _NEEDED.get(workload.kind, ())
        missing = ", ".join(f"--{name}" for name in needed if name not in call.options)
        if missing and workload.num_pods != 1:
            yield _place(container, call), f"msrun lacks {missing}", "give all of them on every pod"


def check_world_size(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """worker_num = sum over all pods of local_worker_num."""
    calls = workload.calls
    local = {pod_set.path: call.whole_number("local_worker_num") for pod_set, _, call in calls}
    if workload.starter is not None and calls:
        local = dict.fromkeys((one.path for one in workload.pod_sets), next(iter(local.values())))
    counts = [(pod_set.replicas, local.get(pod_set.path)) for pod_set in workload.pod_sets]
    total = 0
    for pods, workers in counts:
        if pods is None or workers is None:
            return
        total += pods * workers
    for _, container, call in calls:
        asked = call.whole_number("worker_num")
        if asked is not None and asked != total:
            message = f"--worker_num={asked}, but {workload.num_pods} pods start {total} workers in all"
            yield _place(container, call), message, f"set --worker_num={total} or change the number of pods"


def check_master_address(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """master_addr is the DNS name of pod 0: short, with namespace, or in full."""
    if not workload.master_name:
        return
    for _, container, call in workload.calls:
        address = call.value("master_addr")
        if address is not None and not _is_master(address, workload):
            message = f"--master_addr={address} is not the name of the pod with node rank 0"
            yield _place(container, call), message, f"set --master_addr={workload.master_name}"


def _is_master(address: str, workload: Workload) -> bool:
    if address == workload.master_name:
        return True
    rest = address.removeprefix(f"{workload.master_name}.")
    namespace, _, domain = rest.partition(".")
    is_own_namespace = namespace == (workload.document.namespace or namespace)
    return rest != address and is_own_namespace and (not domain or domain.split(".")[0] == "svc")


def check_node_rank(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """node_rank comes from the variable in which this kind of controller tells the index."""
    if workload.starter is not None:
        return
    for pod_set, container, call in workload.calls:
        given = call.options.get("node_rank")
        if given is None or _is_rank(given, call, workload):
            continue
        is_master = pod_set.replicas == 1 and pod_set is workload.pod_sets[0] and len(workload.pod_sets) > 1
        if given == "0" and (workload.num_pods == 1 or is_master):
            continue
        message = f"--node_rank={given} does not tell the pods of a {workload.kind} apart"
        yield _place(container, call), message, f"set --node_rank=$({workload.rank_variable})"


def _is_rank(given: str, call: Invocation, workload: Workload) -> bool:
    variable = find_reference(given)
    if variable is None:
        return False
    others = {"PyTorchJob": "RANK", "TrainJob": "JOB_COMPLETION_INDEX"}
    if variable in (workload.rank_variable, others.get(workload.kind)):
        return True
    sources = [item for item in sequence(call.container, "env") if text(item, "name") == variable]
    return any(_INDEX_FIELD in text(item, "valueFrom", "fieldRef", "fieldPath") for item in sources)


def check_rank_variable(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """No container sets an index variable itself: the controllers leave a variable alone that is already there."""
    for pod_set in workload.pod_sets:
        for container in pod_set.containers:
            for position, item in enumerate(sequence(container.body, "env")):
                if text(item, "name") in RANK_VARIABLES and "value" in mapping(item):
                    message = f"{text(item, 'name')} is set here, which hides the index of the controller"
                    yield f"{container.path}.env[{position}]", message, "remove it"


def check_port(workload: Workload, documents: Sequence[Document]) -> Iterator[Problem]:
    """The rendezvous port is the same in every msrun, container port, Service, variable and plugin."""
    ports = [(_place(one, call), "--master_port", call.whole_number("master_port")) for _, one, call in workload.calls]
    expected = next((port for *_, port in ports if port is not None), None)
    if expected is None:
        return
    places = [*ports, *(place for _, container, _ in workload.calls for place in _container_ports(container))]
    places += [place for service in _services(workload, documents) for place in _service_ports(service)]
    roles = pytorch_roles(workload.document)
    if roles and roles[2].isascii() and roles[2].isdigit():
        places.append(
            ("spec.plugins.pytorch", "the plugin's port, which the workers' pods wait for,", int(roles[2][:9]))
        )
    for path, what, port in places:
        if port is not None and port != expected:
            message = f"{what} is {port}, but the first msrun has --master_port={expected}"
            yield path, message, "use one port everywhere"


def _container_ports(container: Container) -> Iterator[tuple[str, str, int | None]]:
    for position, port in enumerate(sequence(container.body, "ports")):
        if text(port, "name") in ("rendezvous", "pytorchjob-port", "ascendjob-port"):
            path = f"{container.path}.ports[{position}].containerPort"
            yield path, f"port {text(port, 'name')}", number(port, "containerPort")
    for position, item in enumerate(sequence(container.body, "env")):
        value = text(item, "value")
        if text(item, "name") == "MASTER_PORT" and value.isascii() and value.isdigit():
            yield f"{container.path}.env[{position}].value", "MASTER_PORT", int(value[:9])


def _service_ports(service: Document) -> Iterator[tuple[str, str, int | None]]:
    for position, port in enumerate(sequence(service.body, "spec", "ports")):
        if text(port, "name") in ("", "rendezvous"):
            yield "spec.template.spec.subdomain", f"{service.label} spec.ports[{position}].port", number(port, "port")


def _services(workload: Workload, documents: Sequence[Document]) -> list[Document]:
    """The Services given that have the subdomain of a Job as name."""
    subdomains = {text(pod_set.spec, "subdomain") for pod_set in workload.pod_sets} if workload.kind == "Job" else set()
    return [
        document
        for document in documents
        if (document.group, document.kind) == ("", "Service")
        and document.name in subdomains
        and document.namespace == workload.document.namespace
    ]


def check_headless_service(workload: Workload, documents: Sequence[Document]) -> Iterator[Problem]:
    """An Indexed Job has a subdomain and a headless Service of that name that selects its pods, also unready ones."""
    if workload.kind == "AscendJob" and not workload.master_name:
        message = "no headless Service selects the master; that of the operator has an address which is not the pod's"
        yield "spec.replicaSpecs", message, "add one, or give its file to lint too"
    if workload.kind != "Job" or workload.num_pods == 1:
        return
    subdomain = text(workload.pod_sets[0].spec, "subdomain")
    path = f"{workload.pod_sets[0].path}.spec.subdomain"
    if not subdomain:
        yield path, "pods have no DNS name without it", f"set subdomain: {workload.document.name}"
        return
    services = _services(workload, documents)
    if not services:
        message = f"no Service {subdomain!r} in the same namespace among the files given"
        yield path, message, "add a headless Service of that name, or give its file to lint too"
    for service in services:
        for message, remedy in _service_faults(service, workload):
            yield path, f"{service.label} {message}", remedy


def _service_faults(service: Document, workload: Workload) -> Iterator[tuple[str, str]]:
    spec = mapping(service.body, "spec")
    if spec.get("clusterIP") != "None":
        yield "is not headless, so pod 0 has no name of its own", "set spec.clusterIP: None"
    if spec.get("publishNotReadyAddresses") is not True:
        yield "hides pods that are not ready, so they wait for each other", "set spec.publishNotReadyAddresses: true"
    name = workload.document.name
    own = {"job-name": name, "batch.kubernetes.io/job-name": name}
    labels = {**mapping(workload.pod_sets[0].template, "metadata", "labels"), **own}
    selector = mapping(spec, "selector")
    if not selector or any(labels.get(key) != value for key, value in selector.items()):
        yield f"does not select the pods of Job {name}", f"set spec.selector: {{job-name: {name}}}"


def check_dns_names(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The name of pod 0 resolves: JobSet makes names, and a pod in its host's network asks the cluster's DNS."""
    if workload.kind == "JobSet" and dig(workload.document.body, "spec", "network", "enableDNSHostnames") is False:
        yield "spec.network.enableDNSHostnames", "pods have no DNS name", "set it to true or remove it"
    for pod_set in workload.pod_sets:
        if pod_set.spec.get("hostNetwork") is True and pod_set.spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
            message = "with hostNetwork the pod asks the DNS of its host, which does not know the pods' names"
            yield f"{pod_set.path}.spec.dnsPolicy", message, "set dnsPolicy: ClusterFirstWithHostNet"


def check_host_network(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """In the network of its host, as RDMA without a plugin needs it, a job shares ports with others on that host."""
    for pod_set in workload.all_pod_sets:
        if pod_set.spec.get("hostNetwork") is True:
            message = "hostNetwork: the rendezvous port must be free on the host, and other jobs there can reach it"
            yield f"{pod_set.path}.spec.hostNetwork", message, "give each job another --master_port, and a --token_file"


def check_index_once(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Each index is given once: it restarts at 0 in every Volcano task and in every job of a JobSet."""
    if workload.kind == "VolcanoJob" and len(workload.pod_sets) > 1 and not pytorch_roles(workload.document):
        message = f"{len(workload.pod_sets)} tasks: VC_TASK_INDEX starts at 0 in each, so node ranks repeat"
        yield "spec.tasks", message, "use one task with all replicas, or the plugin pytorch"
    if workload.kind == "JobSet":
        paths = [one.job_path for one in workload.pod_sets]
        jobs = sequence(workload.document.body, "spec", "replicatedJobs")
        copies = [
            dig(job, "replicas") if "replicas" in mapping(job) else 1
            for position, job in enumerate(jobs)
            if f"spec.replicatedJobs[{position}].template.spec" in paths
        ]
        if copies and copies != [1]:
            message = "several jobs: JOB_COMPLETION_INDEX starts at 0 in each, so node ranks repeat"
            yield "spec.replicatedJobs", message, "use one replicated job with replicas: 1 and more completions"


def check_extra_task(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Volcano's plugin pytorch, up to 1.11, counts the pods of all tasks in WORLD_SIZE, also those without a worker."""
    if pytorch_roles(workload.document):
        for other in workload.others:
            name = other.stem.removeprefix(f"{workload.document.name}-")
            message = f"task {name!r} is neither master nor worker of the plugin pytorch, yet may count in WORLD_SIZE"
            yield "spec.tasks", message, "give msrun --worker_num and --local_worker_num, or the task a job of its own"


def check_rank_table_mount(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The folder of --rank_table_file is a whole volume: a file mounted with subPath never changes its status."""
    for _, container, call in workload.calls:
        place = call.value("rank_table_file")
        mounts = [one for one in sequence(container.body, "volumeMounts") if isinstance(one, dict)] if place else []
        fitting = [one for one in mounts if PurePosixPath(place or "").is_relative_to(text(one, "mountPath") or "?")]
        if place and not fitting:
            message = f"no volume is mounted at the folder of {place}"
            yield f"{container.path}.volumeMounts", message, "mount the ConfigMap of the rank table there"
        for one in fitting:
            if "subPath" in one or "subPathExpr" in one:
                message = (
                    f"{text(one, 'mountPath')} has a subPath: it keeps the state of its start, so msrun waits for ever"
                )
                yield f"{container.path}.volumeMounts", message, "mount the whole ConfigMap at the folder"


RULES = rules_of((
    ("msrun-option", Severity.ERROR, check_option_names),
    ("msrun-command", Severity.WARNING, check_command),
    ("world-size", Severity.ERROR, check_world_size),
    ("master-address", Severity.ERROR, check_master_address),
    ("node-rank", Severity.ERROR, check_node_rank),
    ("rank-variable", Severity.ERROR, check_rank_variable),
    ("port", Severity.ERROR, check_port),
    ("headless-service", Severity.ERROR, check_headless_service),
    ("dns-names", Severity.ERROR, check_dns_names),
    ("host-network", Severity.WARNING, check_host_network),
    ("index-once", Severity.ERROR, check_index_once),
    ("extra-task", Severity.WARNING, check_extra_task),
    ("rank-table-mount", Severity.ERROR, check_rank_table_mount),
))  # fmt: skip
