"""Rules on how the msrun processes of a job find each other. Pure.

Sources: the Job, JobSet, Volcano and training-operator naming rules (see workload.py), and msrun's own options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from launch_templates.lint.document import Document, dig, mapping, number, sequence, text
from launch_templates.lint.finding import Problem, Rule, Severity
from launch_templates.lint.invocation import Invocation, find_invocations
from launch_templates.lint.workload import PodSet, Workload
from launch_templates.msrun_options import NAMES
from launch_templates.names import RANK_VARIABLES, find_reference

_NEEDED = ("worker_num", "local_worker_num", "master_addr", "master_port", "node_rank")
_INDEX_FIELD = "batch.kubernetes.io/job-completion-index"


def check_command(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Each pod set runs msrun, with every option that the form by hand needs."""
    found = dict(find_invocations(workload))
    for position, pod_set in enumerate(workload.pod_sets):
        if position not in found:
            if workload.has_ranks_from_mpi and position in workload.host_sets:
                continue  # the launcher's mpirun starts it there
            message = "no container runs msrun, so ranks, port and address cannot be checked"
            yield Problem(f"{pod_set.path}.spec.containers", message, "run msrun, directly or as: exec msrun ...")
            continue
        missing = [name for name in _needed(workload, found[position]) if name not in found[position].options]
        if missing and workload.num_pods != 1:
            options = ", ".join(f"--{name}" for name in missing)
            yield Problem(found[position].path, f"msrun lacks {options}", "give all of them on every pod")


def _needed(workload: Workload, call: Invocation) -> list[str]:
    """Options without which an msrun does not know its place; a rank table and mpirun tell it a part."""
    told = {"node_rank"} if workload.has_ranks_from_mpi else set()
    if "rank_table_file" in call.options:
        told |= {"worker_num", "local_worker_num", "master_addr", "node_rank"}
    return [name for name in _NEEDED if name not in told]


def check_option_names(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Every option of msrun is one: the command refuses others, and the job with them."""
    for _, call in find_invocations(workload):
        for name, word in call.words.items():
            if name not in NAMES:
                near = get_close_matches(name, NAMES, n=1)
                remedy = f"did you mean --{near[0]}?" if near else "see msrun --help; the script's own follow its name"
                yield Problem(call.path, f"{word} is no option of msrun", remedy)


def check_world_size(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """worker_num = sum over all pods of local_worker_num."""
    calls = dict(find_invocations(workload))
    local = {position: call.whole_number("local_worker_num") for position, call in calls.items()}
    hosts = workload.host_sets
    if workload.has_ranks_from_mpi:
        local = dict.fromkeys(hosts, next(iter(local.values()), None))
    if not calls or len(local) < len(hosts):
        return
    total = 0
    for position, pod_set in hosts.items():
        per_pod = local[position]
        if per_pod is None or pod_set.replicas is None:
            return
        total += pod_set.replicas * per_pod
    for call in calls.values():
        asked = call.whole_number("worker_num")
        if asked is not None and asked != total:
            message = f"--worker_num={asked}, but {workload.num_pods} pods start {total} workers in all"
            yield Problem(call.path, message, f"set --worker_num={total} or change the number of pods")


def check_master_address(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """master_addr is the DNS name of pod 0: short, with namespace, or in full."""
    if not workload.master_name:
        return
    for _, call in find_invocations(workload):
        address = call.value("master_addr")
        if address is not None and not _is_master(address, workload):
            message = f"--master_addr={address} is not the name of the pod with node rank 0"
            yield Problem(call.path, message, f"set --master_addr={workload.master_name}")


def _is_master(address: str, workload: Workload) -> bool:
    if address == workload.master_name:
        return True
    rest = address.removeprefix(f"{workload.master_name}.")
    namespace, _, domain = rest.partition(".")
    is_own_namespace = namespace == (workload.document.namespace or namespace)
    return rest != address and is_own_namespace and (not domain or domain.split(".")[0] == "svc")


def check_node_rank(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """node_rank comes from the variable in which this kind of controller tells the index."""
    if workload.has_ranks_from_mpi:
        return
    remedy = f"set --node_rank=$({workload.rank_variable})"
    for position, call in find_invocations(workload):
        given = call.options.get("node_rank")
        if given is None or _is_rank(given, call, workload):
            continue
        is_single = workload.num_pods == 1 or _is_master_replica(workload.pod_sets[position], workload)
        if not (is_single and given == "0"):
            message = f"--node_rank={given} does not tell the pods of a {workload.kind} apart"
            yield Problem(call.path, message, remedy)


def _is_rank(given: str, call: Invocation, workload: Workload) -> bool:
    variable = find_reference(given)
    if variable is None:
        return False
    others = {"PyTorchJob": "RANK", "TrainJob": "JOB_COMPLETION_INDEX"}
    if variable in (workload.rank_variable, others.get(workload.kind)):
        return True
    sources = [item for item in sequence(call.container.body, "env") if text(item, "name") == variable]
    return any(_INDEX_FIELD in text(item, "valueFrom", "fieldRef", "fieldPath") for item in sources)


def _is_master_replica(pod_set: PodSet, workload: Workload) -> bool:
    return workload.kind in ("PyTorchJob", "AscendJob") and pod_set.stem == f"{workload.document.name}-master"


def check_rank_variable(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """No container sets an index variable itself: the controllers leave a variable alone that is already there."""
    for pod_set in workload.pod_sets:
        for container in pod_set.containers:
            for position, item in enumerate(sequence(container.body, "env")):
                if text(item, "name") in RANK_VARIABLES and "value" in mapping(item):
                    message = f"{text(item, 'name')} is set here, which hides the index of the controller"
                    yield Problem(f"{container.path}.env[{position}]", message, "remove it")


def check_port(workload: Workload, documents: Sequence[Document]) -> Iterator[Problem]:
    """The rendezvous port is the same in every msrun, container port, Service and variable."""
    calls = [call for _, call in find_invocations(workload)]
    ports = [call.whole_number("master_port") for call in calls]
    expected = next((port for port in ports if port is not None), None)
    if expected is None:
        return
    places = [(call.path, "--master_port", port) for call, port in zip(calls, ports, strict=True)]
    places += [place for call in calls for place in _container_ports(call)]
    places += [place for service in _services(workload, documents) for place in _service_ports(service)]
    for path, what, port in places:
        if port is not None and port != expected:
            message = f"{what} is {port}, but the first msrun has --master_port={expected}"
            yield Problem(path, message, "use one port everywhere")


def _container_ports(call: Invocation) -> Iterator[tuple[str, str, int | None]]:
    for position, port in enumerate(sequence(call.container.body, "ports")):
        if text(port, "name") in ("rendezvous", "pytorchjob-port", "ascendjob-port"):
            path = f"{call.container.path}.ports[{position}].containerPort"
            yield path, f"port {text(port, 'name')}", number(port, "containerPort")
    for position, item in enumerate(sequence(call.container.body, "env")):
        value = text(item, "value")
        if text(item, "name") == "MASTER_PORT" and value.isascii() and value.isdigit():
            yield f"{call.container.path}.env[{position}].value", "MASTER_PORT", int(value[:9])


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
        yield Problem("spec.replicaSpecs", message, "add one, or give its file to lint too")
    if workload.kind != "Job":
        return
    subdomain = text(workload.pod_sets[0].spec, "subdomain")
    path = f"{workload.pod_sets[0].path}.spec.subdomain"
    if not subdomain:
        yield Problem(path, "pods have no DNS name without it", f"set subdomain: {workload.document.name}")
        return
    services = _services(workload, documents)
    if not services:
        message = f"no Service {subdomain!r} in the same namespace among the files given"
        yield Problem(path, message, "add a headless Service of that name, or give its file to lint too")
    for service in services:
        for message, remedy in _service_faults(service, workload):
            yield Problem(path, f"{service.label} {message}", remedy)


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
    """JobSet gives its pods names only while enableDNSHostnames is not turned off."""
    if workload.kind == "JobSet" and dig(workload.document.body, "spec", "network", "enableDNSHostnames") is False:
        yield Problem("spec.network.enableDNSHostnames", "pods have no DNS name", "set it to true or remove it")


RULES = (
    Rule("msrun-option", Severity.ERROR, check_option_names),
    Rule("msrun-command", Severity.WARNING, check_command),
    Rule("world-size", Severity.ERROR, check_world_size),
    Rule("master-address", Severity.ERROR, check_master_address),
    Rule("node-rank", Severity.ERROR, check_node_rank),
    Rule("rank-variable", Severity.ERROR, check_rank_variable),
    Rule("port", Severity.ERROR, check_port),
    Rule("headless-service", Severity.ERROR, check_headless_service),
    Rule("dns-hostnames", Severity.ERROR, check_dns_names),
)
