"""Rules on how the msrun processes of a job find each other. Pure.

Sources: the Job, JobSet, Volcano and training-operator naming rules (see documents.py), and msrun's own options.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from launch_templates.lint.documents import Document, Workload, dig, mapping, mappings, number, pytorch_roles, text
from launch_templates.lint.finding import Problem, rules_of
from launch_templates.msrun_options import NAMES, Invocation, hint_of_option
from launch_templates.names import RANK_VARIABLES, find_reference

_NEEDED = {
    "Job": ("worker_num", "local_worker_num"),
    "JobSet": ("worker_num", "local_worker_num"),
    "MPIJob": ("worker_num",),
    "AscendJob": ("worker_num", "local_worker_num", "master_addr", "master_port", "node_rank"),
}
"""Options without which an msrun does not know the job; the pods of other kinds have it in their variables."""
_INDEX_FIELD = "batch.kubernetes.io/job-completion-index"


def check_msrun_option(workload: Workload) -> Iterator[Problem]:
    """Every option of msrun is one: the command refuses others, and the job with them."""
    for _, call in workload.calls:
        for name, word in call.line.words.items():
            if name not in NAMES:
                yield (
                    call.place,
                    f"{word} is no option of msrun",
                    hint_of_option(name, "the script's own follow its name"),
                )


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
    for pod_set, call in workload.calls if workload.starter is None else ():
        given = call.options.get("node_rank")
        is_master = pod_set.replicas == 1 and pod_set is workload.pod_sets[0] and len(workload.pod_sets) > 1
        is_first = given == "0" and (workload.num_pods == 1 or is_master)
        if given and given != "-1" and not is_first and not _is_rank(given, call, workload):
            message = f"--node_rank={given} does not tell the pods of a {workload.kind} apart"
            yield call.place, message, f"set --node_rank=$({workload.rank_variable})"


def _is_rank(given: str, call: Invocation, workload: Workload) -> bool:
    variable = find_reference(given)
    others = {"PyTorchJob": "RANK", "TrainJob": "JOB_COMPLETION_INDEX"}
    if variable is None or variable in (workload.rank_variable, others.get(workload.kind)):
        return variable is not None
    sources = [item for item in mappings(call.container, "env") if text(item, "name") == variable]
    return any(_INDEX_FIELD in text(item, "valueFrom", "fieldRef", "fieldPath") for item in sources)


def check_rank_variable(workload: Workload) -> Iterator[Problem]:
    """No container sets an index variable itself: the controllers leave a variable alone that is already there."""
    for path, container in (one for pod_set in workload.pod_sets for one in pod_set.containers()):
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
    places += [place for _, call in workload.calls for place in _container_ports(call)]
    for service in workload.services:
        for position, one in enumerate(mappings(service.body, "spec", "ports")):
            if text(one, "name") in ("", "rendezvous"):
                what = f"{service.label} spec.ports[{position}].port"
                places.append(("spec.template.spec.subdomain", what, number(one, "port")))
    roles = pytorch_roles(workload.document)
    if roles:
        what = "the plugin's port, which the workers' pods wait for,"
        places.append(("spec.plugins.pytorch", what, _port(roles[2])))
    for path, what, port in places:
        if port is not None and port != expected:
            message = f"{what} is {port}, but the first msrun has --master_port={expected}"
            yield path, message, "use one port everywhere"


def _container_ports(call: Invocation) -> Iterator[tuple[str, str, int | None]]:
    for position, port in enumerate(mappings(call.container, "ports")):
        if text(port, "name") in ("rendezvous", "pytorchjob-port", "ascendjob-port"):
            path = f"{call.path}.ports[{position}].containerPort"
            yield path, f"port {text(port, 'name')}", number(port, "containerPort")
    for position, item in enumerate(mappings(call.container, "env")):
        if text(item, "name") == "MASTER_PORT":
            yield f"{call.path}.env[{position}].value", "MASTER_PORT", _port(text(item, "value"))


def _port(word: str) -> int | None:
    return int(word[:9]) if word.isascii() and word.isdigit() else None


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
        yield path, "pods have no DNS name without it", f"set subdomain: {workload.document.name}"
    elif not workload.services:
        message = f"no Service {subdomain!r} in the same namespace among the files given"
        yield path, message, "add a headless Service of that name, or give its file to lint too"
    for service in workload.services:
        for message, remedy in _service_faults(service, workload):
            yield path, f"{service.label} {message}", remedy


def _service_faults(service: Document, workload: Workload) -> Iterator[tuple[str, str]]:
    spec, name = mapping(service.body, "spec"), workload.document.name
    if spec.get("clusterIP") != "None":
        yield "is not headless, so pod 0 has no name of its own", "set spec.clusterIP: None"
    if spec.get("publishNotReadyAddresses") is not True:
        yield "hides pods that are not ready, so they wait for each other", "set spec.publishNotReadyAddresses: true"
    labels = mapping(workload.pod_sets[0].template, "metadata", "labels")
    labels = {**labels, "job-name": name, "batch.kubernetes.io/job-name": name}
    selector = mapping(spec, "selector")
    if not selector or not selector.items() <= labels.items():
        yield f"does not select the pods of Job {name}", f"set spec.selector: {{job-name: {name}}}"


def check_dns_names(workload: Workload) -> Iterator[Problem]:
    """The name of pod 0 resolves: JobSet makes names, and a pod in its host's network asks the cluster's DNS."""
    if workload.kind == "JobSet" and dig(workload.document.body, "spec", "network", "enableDNSHostnames") is False:
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
    if workload.kind == "VolcanoJob" and len(workload.pod_sets) > 1 and not pytorch_roles(workload.document):
        message = f"{len(workload.pod_sets)} tasks: VC_TASK_INDEX starts at 0 in each, so node ranks repeat"
        yield "spec.tasks", message, "use one task with all replicas, or the plugin pytorch"
    if workload.kind == "JobSet" and [one.copies for one in workload.pod_sets] not in ([], [1]):
        message = "several jobs: JOB_COMPLETION_INDEX starts at 0 in each, so node ranks repeat"
        yield "spec.replicatedJobs", message, "use one replicated job with replicas: 1 and more completions"


def check_extra_task(workload: Workload) -> Iterator[Problem]:
    """Volcano's plugin pytorch, up to 1.11, counts the pods of all tasks in WORLD_SIZE, also those without a worker."""
    for other in workload.others if pytorch_roles(workload.document) else ():
        name = other.stem.removeprefix(f"{workload.document.name}-")
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


_CHECKS = (
    *(check_msrun_option, check_msrun_command, check_world_size, check_master_address, check_node_rank),
    *(check_rank_variable, check_port, check_headless_service, check_dns_names, check_host_network, check_index_once),
    *(check_extra_task, check_rank_table_mount),
)
RULES = rules_of(_CHECKS, warnings=(check_msrun_command, check_host_network, check_extra_task))
