"""What starts msrun on several hosts and says so in the environment: torchrun's variables, Slurm, Open MPI,
Kubernetes, Volcano, and those of `variables`; in the order in which they are asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.discovery.surroundings import (
    OFF,
    HostView,
    Surroundings,
    Told,
    derived_port,
    read_master,
    read_number,
    read_place,
    read_port,
)
from msrun.planning.discovery.variables import (
    ALLOCATIONS,
    PMIX_RANK,
    SAGEMAKER_HOSTS,
    TABLE,
    VERTEX,
    find_allocation,
    find_pmix,
    find_sagemaker,
    find_variables,
    find_vertex,
)
from msrun.planning.hosts.host_entry import blamed_on
from ranktable.hosts.brackets import expand
from ranktable.hosts.ranges import RangeError, read_ranges

NODES = "PET_NNODES"
NODE_RANK = "PET_NODE_RANK"
LOCAL = "PET_NPROC_PER_NODE"
ENDPOINT = "PET_RDZV_ENDPOINT"
BACKEND = "PET_RDZV_BACKEND"
ADDRESSES = ("PET_MASTER_ADDR", "MASTER_ADDR")
PORTS = ("PET_MASTER_PORT", "MASTER_PORT")
POD_RANK = "RANK"
POD_NUM = "WORLD_SIZE"
IN_POD = "KUBERNETES_SERVICE_HOST"
TORCHRUN = "torchrun's variables"
OF_WORKER = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")
"""Set for a worker: what else it carries is the place of its launcher."""

_DEVICE_WORDS = ("auto", "gpu", "npu", "xpu")
_DEFAULT_PORT = 29400
"""torchrun's for an endpoint without a port."""


def find_torchrun(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job that PET_NNODES and its like describe; None without it, and in a worker of torchrun.

    Raises:
        UsageError: variables that contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    min_hosts, node_num = _node_num(environ)
    node_rank = None
    if environ.get(NODE_RANK) and environ.get(BACKEND, "static") == "static":  # other backends number hosts themselves
        node_rank, _ = read_place({**environ, NODES: str(node_num.value)}, NODE_RANK, NODES)
    master_addr, master_port = None, None
    if node_num.value > 1:
        master_addr = read_master(environ, host, node_rank, *ADDRESSES)
        master_port = read_port(environ, *PORTS)
        if master_addr is None:
            master_addr, master_port = _endpoint(environ)
    return Surroundings(
        name=_name(environ, host),
        node_num=node_num,
        min_hosts=min_hosts if min_hosts.value < node_num.value else None,
        node_rank=node_rank,
        local_worker_num=_local_worker_num(environ, host),
        without_devices=Told(host.cpu_count, f"{LOCAL}=auto") if environ.get(LOCAL, "").lower() == "auto" else None,
        master_addr=master_addr,
        master_port=master_port,
        remedy=f"set {ADDRESSES[0]}, or give --master_addr ADDRESS",
    )


def find_pytorch_pods(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job of an operator that sets MASTER_ADDR, MASTER_PORT, and WORLD_SIZE and RANK of pods, in a pod.

    Raises:
        UsageError: variables that contradict each other.
    """
    needed = (POD_RANK, POD_NUM, ADDRESSES[1], PORTS[1], IN_POD)
    if not all(environ.get(name) for name in needed) or any(name in environ for name in OF_WORKER):
        return None
    node_rank, node_num = read_place(environ, POD_RANK, POD_NUM)
    return Surroundings(
        name=_name(environ, host),
        node_num=node_num,
        node_rank=node_rank,
        master_addr=read_master(environ, host, node_rank, ADDRESSES[1]) if node_num.value > 1 else None,
        master_port=read_port(environ, PORTS[1]),
    )


def _name(environ: Mapping[str, str], host: HostView) -> str:
    return f"Kubernetes pod {host.name}" if environ.get(IN_POD) else TORCHRUN


def _node_num(environ: Mapping[str, str]) -> tuple[Told[int], Told[int]]:
    """Return how few hosts are enough, and how many there are."""
    least, colon, most = environ[NODES].partition(":")
    low, high = (read_number({NODES: text}, NODES, least=1) for text in (least, most if colon else least))
    if low > high:
        raise UsageError(f"{NODES}={environ[NODES]}: MIN:MAX is expected, such as 2:4; correct the variable")
    return Told(low, NODES), Told(high, NODES)


def _local_worker_num(environ: Mapping[str, str], host: HostView) -> Told[int] | None:
    """Return the workers per host; None where they are to be one for each device."""
    word = environ.get(LOCAL, "").strip().lower()
    if not word or word in _DEVICE_WORDS:
        return None
    if word == "cpu":
        return Told(host.cpu_count, f"{LOCAL}=cpu")
    return Told(read_number(environ, LOCAL, least=1), LOCAL)


def _endpoint(environ: Mapping[str, str]) -> tuple[Told[str] | None, Told[int] | None]:
    """Return where torchrun's hosts would meet, if at one of them and not at an etcd server."""
    text = environ.get(ENDPOINT, "")
    if not text or environ.get(BACKEND, "static") not in ("static", "c10d"):
        return None, None
    address, colon, port = text.rpartition(":")
    if not colon or "]" in port or (":" in address and not address.startswith("[")):
        address, port = text, str(_DEFAULT_PORT)
    if not port.isdigit():
        raise UsageError(f"{ENDPOINT}={text}: HOST:PORT is expected; correct the variable, or give {OFF}")
    return Told(address.strip("[]"), ENDPOINT), Told(int(port), ENDPOINT)


JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
STEP_NODES = "SLURM_STEP_NUM_NODES"
STEP_TASKS = "SLURM_STEP_NUM_TASKS"
STEP_LIST = "SLURM_STEP_NODELIST"
JOB_NODES = "SLURM_JOB_NUM_NODES"
NODE = "SLURM_NODEID"
NODE_NAME = "SLURMD_NODENAME"
GPUS = "SLURM_GPUS_ON_NODE"
TASKS = "SLURM_NTASKS"


def find_slurm(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job step that this process is a task of, or the host of a batch script; None outside Slurm.

    Raises:
        UsageError: several tasks on a host, or variables that contradict each other.
    """
    name = f"Slurm job {environ[JOB]}"
    gpus = Told(read_number(environ, GPUS), GPUS) if environ.get(GPUS) else None
    local = gpus if gpus and gpus.value else None
    if not environ.get(STEP_LIST) or not environ.get(STEP_NODES):
        alone, hint = Told(1, f"no {STEP_NODES}"), _hint(environ, name)
        if local is None and not hint and environ.get(TASKS):  # of a batch script that is to start them itself
            local = Told(read_number(environ, TASKS, least=1), TASKS)
        return Surroundings(name=name, node_num=alone, local_worker_num=local, hint=hint)
    _check_tasks(environ)
    node_rank, node_num = read_place(environ, NODE, STEP_NODES)
    if node_num.value == 1:
        return Surroundings(name=name, node_num=node_num, local_worker_num=local, hint=_hint(environ, name))
    nodes = _nodes(environ, node_rank.value, node_num.value)
    return Surroundings(
        name=name,
        node_num=node_num,
        node_rank=node_rank,
        local_worker_num=local,
        master_addr=Told(nodes[0], STEP_LIST),
        master_port=derived_port(JOB, f"slurm {environ[JOB]}.{environ.get(STEP, '')}"),
        cpu_count=host.cpu_count,
        cpu_remedy="srun --cpus-per-task=N gives more",
    )


def _hint(environ: Mapping[str, str], name: str) -> str:
    count = read_number(environ, JOB_NODES) if environ.get(JOB_NODES) else 1
    if count <= 1:
        return ""
    how = "srun --ntasks-per-node=1 msrun ..."
    return f"{name} has {count} nodes ({JOB_NODES}), but msrun was started once, for this host: {how} uses all of them"


def _check_tasks(environ: Mapping[str, str]) -> None:
    tasks = read_number(environ, STEP_TASKS, least=1) if environ.get(STEP_TASKS) else 1
    if tasks > read_number(environ, STEP_NODES, least=1):
        raise UsageError(
            f"{STEP_TASKS}={tasks} on {environ[STEP_NODES]} hosts: srun starts msrun once per worker; start it once "
            f"per host (srun --ntasks-per-node=1 msrun ...), or give {OFF} for {tasks} jobs, each on one host"
        )


def _nodes(environ: Mapping[str, str], node_rank: int, node_num: int) -> list[str]:
    with blamed_on(STEP_LIST):
        nodes = expand(environ[STEP_LIST])
    if len(nodes) != node_num:
        raise UsageError(
            f"{STEP_LIST}={environ[STEP_LIST]}: {len(nodes)} nodes, but {STEP_NODES}={node_num}; are these variables "
            f"of another step? unset them, or give {OFF}"
        )
    own = environ.get(NODE_NAME)
    if own and nodes[node_rank] != own:
        raise UsageError(
            f"{NODE}={node_rank}: is {nodes[node_rank]} in {STEP_LIST}={environ[STEP_LIST]}, but {NODE_NAME}={own}; "
            f"give --node_rank and --master_addr, or {OFF}"
        )
    return nodes


RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
DAEMON = "PMIX_SERVER_URI"
"""Begins the names of PMIX_SERVER_URI4 and the like: `JOB.DAEMON;ADDRESS`."""
MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"
"""Where mpirun listens, in version 4: `JOB.0;tcp://10.0.0.1,10.1.0.1:5000;tcp6://[fd00::1]:5000`."""
NODE_REGEX = "OMPI_MCA_orte_node_regex"
"""All hosts by daemon, in version 4 and not on mpirun's own host: `login[1:1],node[2:1-4]@0(5)`."""
NAMESPACE = "PMIX_NAMESPACE"
"""Of the job; in version 5 it holds the name of mpirun's host: `prterun-HOST-PID@1`."""

_REMEDY = "add --master_addr ADDRESS of the host of rank 0: mpirun ... msrun --master_addr ADDRESS ..."
_REGEX_PIECE = re.compile(r"([^,\[\]@]*)(?:\[([0-9]{1,9}):([0-9,-]+)\]([^,\[\]@]*))?(?:,|@|\Z)")
_MAX_HOSTS = 16_384


def find_open_mpi(environ: Mapping[str, str], _host: HostView) -> Surroundings | None:
    """Return the job whose ranks are the msruns that mpirun has started; None outside of one.

    Raises:
        UsageError: several ranks on a host, or variables that contradict each other.
    """
    if not environ.get(SIZE):
        return None
    node_rank, node_num = read_place(environ, RANK, SIZE)
    local_size = read_number(environ, LOCAL_SIZE, least=1) if environ.get(LOCAL_SIZE) else 1
    if local_size > 1:
        raise UsageError(
            f"{LOCAL_SIZE}={local_size}: mpirun starts msrun once per worker; start it once per host (mpirun --map-by "
            f"ppr:1:node msrun ...), or give {OFF} for {node_num.value} jobs, each on one host"
        )
    key = environ.get(NAMESPACE, "")
    return Surroundings(
        name="mpirun",
        node_num=node_num,
        node_rank=node_rank,
        master_addr=_master(environ, node_rank.value) if node_num.value > 1 else None,
        master_port=derived_port(NAMESPACE, f"mpirun {key}") if key else None,
        remedy=_REMEDY,
    )


def _master(environ: Mapping[str, str], rank: int) -> Told[str] | None:
    daemon = _own_daemon(environ)
    if daemon is None:
        return None
    if daemon == rank:  # rank 0 runs on mpirun's own host
        return _mpirun_address(environ) or _mpirun_name(environ)
    names = read_node_regex(environ.get(NODE_REGEX, ""))
    first = daemon - rank
    return Told(names[first], NODE_REGEX) if 0 < first < len(names) else None


def _own_daemon(environ: Mapping[str, str]) -> int | None:
    for name in sorted(environ):
        match = name.startswith(DAEMON) and re.match(r"[^;]*\.(\d{1,9});", environ[name])
        if match:
            return int(match[1])
    return None


def _mpirun_address(environ: Mapping[str, str]) -> Told[str] | None:
    """Return the first address on which mpirun listens for its daemons, IPv4 before IPv6."""
    uri = environ.get(MPIRUN_URI, "")
    match = re.search(r"tcp://([0-9.]+)[,:]", uri) or re.search(r"tcp6://\[([0-9a-fA-F:]+)[],]", uri)
    return Told(match[1], MPIRUN_URI) if match else None


def _mpirun_name(environ: Mapping[str, str]) -> Told[str] | None:
    match = re.match(r"[a-z]+-(.+)-\d+@\d+\Z", environ.get(NAMESPACE, ""))
    return Told(match[1], NAMESPACE) if match else None


def read_node_regex(text: str) -> list[str]:
    """Return the hosts of orte_node_regex in the order of their daemons; none when it is not understood.

    `node[2:1-4,7].dc` is node01.dc to node04.dc and node07.dc: the number before the colon is that of digits.
    """
    names: list[str] = []
    position = 0
    while position < len(text) and text[position - 1 : position] != "@":
        match = _REGEX_PIECE.match(text, position)
        if match is None or not match[0]:
            return []
        names += _names(*match.groups()) if match[3] else [match[1]]
        position = match.end()
        if len(names) > _MAX_HOSTS:
            return []
    return names


def _names(head: str, width: str, ranges: str, tail: str) -> list[str]:
    try:
        numbers = read_ranges(ranges, _MAX_HOSTS + 1)
    except RangeError:
        return []
    return [f"{head}{number:0{min(int(width), 9)}}{tail}" for number in numbers]


INDEX = "JOB_COMPLETION_INDEX"
HOSTS_FILE = "/etc/hosts"


def find_kubernetes_job(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the Indexed Job that this pod is of; None elsewhere.

    Raises:
        UsageError: an index that is no number.
    """
    remedy = "make a headless Service, name it as the pods' subdomain"
    return _numbered_pod(environ, host, INDEX, remedy)


def _numbered_pod(
    environ: Mapping[str, str], host: HostView, variable: str, remedy: str, kind: str = "Kubernetes"
) -> Surroundings:
    index = read_number(environ, variable)
    master = first_pod(host, index)
    return Surroundings(
        name=f"{kind} pod {host.name}",
        node_rank=Told(index, variable),
        master_addr=master,
        are_peers_near=master is not None,
        remedy=f"{remedy}, or give --master_addr ADDRESS",
    )


def first_pod(host: HostView, index: int) -> Told[str] | None:
    """Return the name of pod 0 as its peers know it; None when pods of this job have no such names."""
    stem, dash, last = host.name.rpartition("-")
    if not host.domain or not dash or last != str(index):
        return None
    return Told(f"{stem}-0.{host.domain}", HOSTS_FILE)


def read_domain(hosts_file: str, host_name: str) -> str:
    """Return what follows a host's name in /etc/hosts, where the kubelet writes it for a pod with a subdomain.

    The line is "10.1.0.7 train-1.train.default.svc.cluster.local train-1"; without a subdomain "10.1.0.7 train-1".
    """
    for line in hosts_file.splitlines():
        names = line.partition("#")[0].split()[1:]
        if host_name in names:
            for name in names:
                if name.startswith(f"{host_name}."):
                    return name.removeprefix(f"{host_name}.")
    return ""


TASK_INDEX = "VC_TASK_INDEX"
_HOSTS = re.compile(r"VC_(\w+)_HOSTS\Z")


def find_volcano(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the Volcano job that this pod is of; None elsewhere.

    Raises:
        UsageError: several tasks, whose pods have the same numbers, or variables that contradict each other.
    """
    name = f"Volcano pod {host.name}"
    tasks = {match[1]: environ[name] for name in sorted(environ) if (match := _HOSTS.match(name)) and environ[name]}
    if not tasks:
        return _numbered_pod(environ, host, TASK_INDEX, "add the plugin svc to the job", kind="Volcano")
    if len(tasks) > 1:
        raise UsageError(
            f"VC_<TASK>_HOSTS of {len(tasks)} tasks ({', '.join(tasks)}): {TASK_INDEX} starts at 0 in each, so the "
            "pods have no numbers of their own; put all pods into one task, use the plugin pytorch, or give "
            f"--worker_num, --local_worker_num, --node_rank and --master_addr, or {OFF}"
        )
    (task, hosts_text), *_ = tasks.items()
    hosts, variable = hosts_text.split(","), f"VC_{task}_HOSTS"
    count = f"VC_{task}_NUM"
    if environ.get(count) and read_number(environ, count) != len(hosts):
        raise UsageError(f"{count}={environ[count]}: but {variable} has {len(hosts)} hosts; give {OFF}")
    node_rank, node_num = read_place({**environ, variable: str(len(hosts))}, TASK_INDEX, variable)
    return Surroundings(name=name, node_num=node_num, node_rank=node_rank, master_addr=Told(hosts[0], variable))


Finder = Callable[[Mapping[str, str], HostView], Surroundings | None]

FINDERS: Final[tuple[tuple[Finder, tuple[str, ...]], ...]] = (
    (find_torchrun, (NODES,)),  # set on purpose, for a launcher of this kind: nearer than the cluster that it runs in
    (find_open_mpi, (RANK,)),  # an mpirun in a Slurm allocation, or in a pod of an MPIJob, has started this process
    (find_slurm, (JOB,)),
    (find_sagemaker, (SAGEMAKER_HOSTS,)),
    (find_vertex, (VERTEX,)),
    (find_variables, tuple(row.node_rank for row in TABLE)),
    (find_pytorch_pods, (POD_RANK,)),  # of Kubeflow, or of Volcano's plugin pytorch, which numbers pods over all tasks
    (find_volcano, (TASK_INDEX,)),
    (find_kubernetes_job, (INDEX,)),  # after those that make their pods through Indexed Jobs
    (find_pmix, (PMIX_RANK,)),
    (find_allocation, ALLOCATIONS),  # last: it knows no place, and says what is not used
)
"""Who reads the variables of which launcher, if one of these is set. What is nearer to this process comes first: the
first that finds something decides alone."""


def find_surroundings(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job of several hosts, or the one host of an allocation, that this process was started in.

    None outside of all that is known, and in a worker of msrun: what its environment tells is msrun's own place.

    Raises:
        UsageError: variables that contradict each other, or that ask for what msrun does not do.
    """
    if contract.MSRUN_JOB_ID in environ:
        return None
    told = (find(environ, host) for find, names in FINDERS if any(environ.get(name) for name in names))
    return next((job for job in told if job is not None), None)
