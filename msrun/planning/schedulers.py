"""What starts msrun on several hosts and says so in the environment: a table of those that say a host's place in plain
variables, and functions for those that need more.

The names are those of each one's own documentation: torchrun (PET_), Slurm, Open MPI, Kubernetes, Kubeflow, Volcano,
SkyPilot (distributed jobs), dstack (distributed tasks), Amazon SageMaker (training toolkit), Vertex AI (CLUSTER_SPEC),
Azure ML (PyTorch distribution), LeaderWorkerSet, IBM's jsrun, MPICH's and Intel MPI's hydra, LSF, PBS, Ray; and what
people export by hand. Variables that contradict each other are refused with UsageError."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.hosts import blamed_on
from msrun.planning.record import Record
from ranktable.hosts.brackets import expand
from ranktable.hosts.ranges import RangeError, read_ranges

T = TypeVar("T", int, str)
Environ = Mapping[str, str]

OFF = "--discover=False"
FIRST_PORT = 10_000
PORT_COUNT = 20_000  # below the ports that Linux (from 32768) and Kubernetes (from 30000) give away
LISTED = "number of hosts in "

_MAX_DIGITS = 9
_LOOPBACK = r"localhost\Z|127\.[0-9.]+\Z|::1\Z"


class Told(Record, Generic[T]):
    """A value, and where it came from."""

    value: T
    source: str  # name of a variable, or more words than that


class HostView(Record):
    """The little that must be known of this host to understand its variables."""

    name: str
    domain: str = ""  # what follows the name where peers ask for it: a pod's headless service; empty: none
    cpu_count: int = 1
    listed: tuple[str, ...] = ()  # the hosts in the file that PBS_NODEFILE names, one for each of their slots


class Surroundings(Record, kw_only=True):
    """A job of which this host is a part, as far as variables tell of it; None = no variable says it."""

    name: str  # in words: "Slurm job 4711"
    node_num: Told[int] | None = None
    min_hosts: Told[int] | None = None  # how few of them are enough to begin; None = all are needed
    node_rank: Told[int] | None = None  # index of this host; None = hosts are numbered when they meet
    worker_num: Told[int] | None = None
    local_worker_num: Told[int] | None = None
    without_devices: Told[int] | None = None  # workers where nothing else says it; None = one
    master_addr: Told[str] | None = None  # name or address of node 0
    master_port: Told[int] | None = None  # None = any that is equal on all hosts
    are_peers_near: bool = False  # whether others of the same job are known to be there although nobody says how many
    cpu_count: int = 0  # processors that msrun was given, maybe fewer than it needs; 0 = all of the host
    cpu_remedy: str = ""
    hint: str = ""  # what to say when this host turns out to be the only one
    remedy: str = ""  # what to do when the address of node 0 is not known, in words


# -- single variables -----------------------------------------------------------------------------------------------


def _number(environ: Environ, name: str, least: int = 0) -> Told[int]:
    shown = environ.get(name, "")
    text = shown.strip()
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or int(text) < least:
        raise UsageError(
            f"{name}={shown!r}: a whole number from {least} on is expected; correct the variable, or give {OFF}"
        )
    return Told(int(text), name)


def _first_number(environ: Environ, *names: str, least: int = 0) -> Told[int] | None:
    return next((_number(environ, name, least) for name in names if environ.get(name)), None)


def _place(environ: Environ, name: str, size: Told[int]) -> Told[int]:
    rank = _number(environ, name)
    if rank.value >= size.value:
        raise UsageError(
            f"{name}={rank.value}: must be below {size.source}={size.value}; are these variables of another job? unset "
            f"them, or give {OFF}"
        )
    return rank


def _master(environ: Environ, host: HostView, node_rank: Told[int] | None, *names: str) -> Told[str] | None:
    """Return the address of node 0 in the first variable that is set; its host name where node 0 is told localhost."""
    name = next((name for name in names if environ.get(name)), "")
    if not name or not re.match(_LOOPBACK, environ[name]):
        return Told(environ[name], name) if name else None
    if node_rank is not None and node_rank.value == 0:
        return Told(host.name, f"host name; {name} is {environ[name]}")
    raise UsageError(f"{name}={environ[name]}: other hosts cannot be reached by it; set it to the address of node 0")


def _port(source: str, key: str) -> Told[int]:
    """Return a port that all hosts of a job find alike, by a `key` of the job, and two jobs on a host hardly share."""
    return Told(FIRST_PORT + zlib.crc32(key.encode(errors="surrogateescape")) % PORT_COUNT, source)


def _workers(environ: Environ, *names: str) -> Told[int] | None:
    """Return the workers on this host in the first variable that is set; 0, of a host without devices, is none."""
    found = _first_number(environ, *names)
    return found if found and found.value else None


def _check_count(count: Told[int] | None, hosts: Sequence[str], variable: str) -> None:
    if count and len(hosts) != count.value:
        raise UsageError(
            f"{count.source}={count.value}: but {variable} has {len(hosts)} hosts; are these variables of another job? "
            f"unset them, or give {OFF}"
        )


def _once(found: str, launcher: str, how: str, jobs: object = "as many") -> UsageError:
    return UsageError(
        f"{found}: {launcher} starts msrun once per worker; {how}, or give {OFF} for {jobs} jobs, each on one host"
    )


# -- those that say all in plain variables --------------------------------------------------------------------------

BY_HAND = "NODE_RANK and MASTER_ADDR"
IN_POD = "KUBERNETES_SERVICE_HOST"
HOSTS_FILE = "/etc/hosts"


class Variables(Record, kw_only=True):
    """The variables of one scheduler; of several names the first that is set counts."""

    name: str  # in words; `{NAME}` stands for the value of that variable, {} for this host
    node_rank: str
    node_num: tuple[str, ...] = ()
    hosts: str = ""  # lists all hosts in the order of their ranks, between blanks; the first one is node 0
    needed: tuple[str, ...] = ()  # must be set, too: what tells this one from others with the same words
    unless: tuple[str, ...] = ()  # set for a worker: what else it carries is the place of its launcher
    worker_num: str = ""
    local_worker_num: tuple[str, ...] = ()  # workers on this host; 0 = it has no devices
    tasks_here: str = ""  # how many processes were started on this host, each of which sees its own rank: must be 1
    once: str = ""  # how to have one a host, where that is not so
    master_addr: tuple[str, ...] = ()
    master_port: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # what tells two jobs of a host apart; a port follows from it where none is said
    are_peers_near: bool = False
    is_numbered_pod: bool = False  # only the rank is said, and pod 0's name follows from this one's
    remedy: str = ""

    def find(self, environ: Environ, host: HostView) -> Surroundings | None:
        """Return the job, if all its variables are set."""
        counts = (*self.node_num, self.hosts, self.worker_num)
        is_set = all(environ.get(name) for name in (self.node_rank, *self.needed))
        is_bare = self.are_peers_near or self.is_numbered_pod
        if not is_set or not (is_bare or any(map(environ.get, counts))) or any(name in environ for name in self.unless):
            return None
        return self.read(environ, host)

    def read(self, environ: Environ, host: HostView, listed: Sequence[str] = ()) -> Surroundings:
        """Return the job, whose variables have to be right; `listed`: what `hosts` holds in a form of its own."""
        self._check_tasks(environ)
        hosts, node_num = listed or environ.get(self.hosts, "").split(), _first_number(environ, *self.node_num, least=1)
        _check_count(node_num if hosts else None, hosts, self.hosts)
        node_num = node_num or (Told(len(hosts), LISTED + self.hosts) if hosts else None)
        is_one = node_num is not None and node_num.value == 1
        rank = None
        if node_num is None:
            rank = _number(environ, self.node_rank)
        elif not is_one or IN_POD in self.needed:  # the numbers of an operator belong together
            rank = _place(environ, self.node_rank, node_num)
        name = re.sub(r"\{(\w*)\}", lambda match: environ.get(match[1], "") if match[1] else host.name, self.name)
        key = " ".join(filter(None, map(environ.get, self.job)))
        master, port = None, None
        if rank is not None and self.is_numbered_pod:  # pod 0 as its peers know it, if pods of this job have such names
            stem, dash, last = host.name.rpartition("-")
            is_known = host.domain and dash and last == str(rank.value)
            master = Told(f"{stem}-0.{host.domain}", HOSTS_FILE) if is_known else None
        elif not is_one:
            said = _master(environ, host, rank, *self.master_addr)
            master = Told(hosts[0], self.hosts) if hosts else said
            port = _first_number(environ, *self.master_port, least=1)
            port = port or (_port(" and ".join(self.job), key) if key else None)
        return Surroundings(
            name=name.strip(),
            node_num=node_num,
            node_rank=None if is_one else rank,
            worker_num=_first_number(environ, self.worker_num, least=1) if node_num is None else None,
            local_worker_num=_workers(environ, *self.local_worker_num),
            master_addr=master,
            master_port=port,
            are_peers_near=self.are_peers_near or (self.is_numbered_pod and master is not None),
            remedy=self.remedy,
        )

    def _check_tasks(self, environ: Environ) -> None:
        tasks = _first_number(environ, self.tasks_here, least=1)
        if tasks and tasks.value > 1:
            raise _once(f"{self.tasks_here}={tasks.value}", self.name, f"start it once per host ({self.once})")
        if "AZUREML_RUN_ID" in self.needed and environ["RANK"] != environ["NODE_RANK"]:
            found = f"RANK={environ['RANK']} on node {environ['NODE_RANK']}"
            raise _once(found, "Azure ML", "set process_count_per_instance: 1")


def read_domain(hosts_file: str, host_name: str) -> str:
    """Return what follows a host's name in /etc/hosts, where the kubelet writes it for a pod with a subdomain:
    "10.1.0.7 train-1.train.default.svc.cluster.local train-1"."""
    lines = (line.partition("#")[0].split()[1:] for line in hosts_file.splitlines())
    found = (name for names in lines if host_name in names for name in names if name.startswith(f"{host_name}."))
    return next(found, "").removeprefix(f"{host_name}.")


SKYPILOT = Variables(
    name="SkyPilot task {SKYPILOT_TASK_ID}",
    node_rank="SKYPILOT_NODE_RANK",
    node_num=("SKYPILOT_NUM_NODES",),
    hosts="SKYPILOT_NODE_IPS",
    local_worker_num=("SKYPILOT_NUM_GPUS_PER_NODE",),
    job=("SKYPILOT_TASK_ID",),
)
DSTACK = Variables(
    name="dstack run {DSTACK_RUN_NAME}",
    node_rank="DSTACK_NODE_RANK",
    node_num=("DSTACK_NODES_NUM",),
    local_worker_num=("DSTACK_GPUS_PER_NODE",),
    master_addr=("DSTACK_MASTER_NODE_IP",),
    job=("DSTACK_RUN_NAME",),
)
AZURE = Variables(
    name="Azure ML run {AZUREML_RUN_ID}",
    node_rank="NODE_RANK",
    needed=("AZUREML_RUN_ID", "MASTER_ADDR", "WORLD_SIZE", "RANK"),
    node_num=("WORLD_SIZE",),
    master_addr=("MASTER_ADDR",),
    master_port=("MASTER_PORT",),
)
LEADER_WORKER_SET = Variables(
    name="LeaderWorkerSet pod",
    node_rank="LWS_WORKER_INDEX",
    node_num=("LWS_GROUP_SIZE",),
    master_addr=("LWS_LEADER_ADDRESS",),
)
JSRUN = Variables(
    name="jsrun",
    node_rank="JSM_NAMESPACE_RANK",
    node_num=("JSM_NAMESPACE_SIZE",),
    tasks_here="JSM_NAMESPACE_LOCAL_SIZE",
    once="jsrun -r 1 msrun ...",
    job=("LSB_JOBID",),
    remedy="add --master_addr ADDRESS of the host of rank 0: jsrun -r 1 msrun --master_addr ADDRESS ...",
)
HYDRA = Variables(
    name="mpiexec",
    node_rank="PMI_RANK",
    node_num=("PMI_SIZE",),
    tasks_here="MPI_LOCALNRANKS",
    once="mpiexec -ppn 1 msrun ...",
    remedy="add --master_addr ADDRESS of the host of rank 0: mpiexec -ppn 1 msrun --master_addr ADDRESS ...",
)
HAND = Variables(
    name=BY_HAND,
    node_rank="NODE_RANK",
    needed=("MASTER_ADDR",),
    node_num=("NNODES", "NUM_NODES", "NODE_COUNT"),
    worker_num="WORLD_SIZE",
    local_worker_num=("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "GPUS_PER_NODE"),
    master_addr=("MASTER_ADDR",),
    master_port=("MASTER_PORT",),
)
PYTORCH_PODS = Variables(  # of Kubeflow, or of Volcano's plugin pytorch, which numbers pods over all tasks
    name="Kubernetes pod {}",
    node_rank="RANK",
    needed=("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", IN_POD),
    unless=("TORCHELASTIC_RUN_ID", "LOCAL_RANK"),
    node_num=("WORLD_SIZE",),
    master_addr=("MASTER_ADDR",),
    master_port=("MASTER_PORT",),
)
VOLCANO_PODS = Variables(
    name="Volcano pod {}",
    node_rank="VC_TASK_INDEX",
    is_numbered_pod=True,
    remedy="add the plugin svc to the job, or give --master_addr ADDRESS",
)
INDEXED_JOB = Variables(
    name="Kubernetes pod {}",
    node_rank="JOB_COMPLETION_INDEX",
    is_numbered_pod=True,
    remedy="make a headless Service, name it as the pods' subdomain, or give --master_addr ADDRESS",
)
PMIX = Variables(  # a PMIx launcher that is neither mpirun nor srun: of it only the own rank is known
    name="PMIx", node_rank="PMIX_RANK", are_peers_near=True, remedy="add --master_addr ADDRESS of rank 0's"
)


# -- torchrun -------------------------------------------------------------------------------------------------------

TORCHRUN = "torchrun's variables"
NODES, NODE_RANK, LOCAL = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
ENDPOINT, BACKEND = "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"
_DEVICE_WORDS = ("", "auto", "gpu", "npu", "xpu")
_DEFAULT_PORT = 29400


def find_torchrun(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the job that PET_NNODES and its like describe; None in a worker of torchrun."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    least, colon, most = environ[NODES].partition(":")
    min_hosts, node_num = (_number({NODES: text}, NODES, least=1) for text in (least, most if colon else least))
    if min_hosts.value > node_num.value:
        raise UsageError(f"{NODES}={environ[NODES]}: MIN:MAX is expected, such as 2:4; correct the variable")
    backend, node_rank = environ.get(BACKEND, "static"), None
    if environ.get(NODE_RANK) and backend == "static":  # other backends number hosts themselves
        node_rank = _place(environ, NODE_RANK, node_num)
    master_addr, master_port = None, None
    if node_num.value > 1:
        master_addr = _master(environ, host, node_rank, "PET_MASTER_ADDR", "MASTER_ADDR")
        master_port = _first_number(environ, "PET_MASTER_PORT", "MASTER_PORT", least=1)
        if master_addr is None:
            master_addr, master_port = _endpoint(environ.get(ENDPOINT, ""), backend)
    word, local = environ.get(LOCAL, "").strip().lower(), None
    if word not in _DEVICE_WORDS:  # else there is one for each device
        local = Told(host.cpu_count, f"{LOCAL}=cpu") if word == "cpu" else _number(environ, LOCAL, least=1)
    return Surroundings(
        name=f"Kubernetes pod {host.name}" if environ.get(IN_POD) else TORCHRUN,
        node_num=node_num,
        min_hosts=min_hosts if min_hosts.value < node_num.value else None,
        node_rank=node_rank,
        local_worker_num=local,
        without_devices=Told(host.cpu_count, f"{LOCAL}=auto") if word == "auto" else None,
        master_addr=master_addr,
        master_port=master_port,
        remedy="set PET_MASTER_ADDR, or give --master_addr ADDRESS",
    )


def _endpoint(text: str, backend: str) -> tuple[Told[str] | None, Told[int] | None]:
    if not text or backend not in ("static", "c10d"):
        return None, None
    address, colon, port = text.rpartition(":")
    if not colon or "]" in port or (":" in address and not address.startswith("[")):
        address, port = text, str(_DEFAULT_PORT)
    if not port.isdigit():
        raise UsageError(f"{ENDPOINT}={text}: HOST:PORT is expected; correct the variable, or give {OFF}")
    return Told(address.strip("[]"), ENDPOINT), Told(int(port), ENDPOINT)


# -- Slurm ----------------------------------------------------------------------------------------------------------

JOB, JOB_NODES, TASKS = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS"
STEP, STEP_NODES, STEP_TASKS = "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"
STEP_LIST = "SLURM_STEP_NODELIST"
NODE, NODE_NAME, GPUS = "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE"
SLURM = Variables(
    name="Slurm job {SLURM_JOB_ID}", node_rank=NODE, node_num=(STEP_NODES,), hosts=STEP_LIST, local_worker_num=(GPUS,)
)


def find_slurm(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the job step that this process is a task of, or the host of a batch script."""
    name, count = f"Slurm job {environ[JOB]}", _first_number(environ, JOB_NODES)
    hint = _unused(name, count.value if count else 1, "nodes", JOB_NODES, "srun --ntasks-per-node=1 msrun ...")
    if not environ.get(STEP_LIST) or not environ.get(STEP_NODES):
        local = _workers(environ, GPUS)
        if local is None and not hint:  # a batch script that is to start them itself
            local = _first_number(environ, TASKS, least=1)
        return Surroundings(name=name, node_num=Told(1, f"no {STEP_NODES}"), local_worker_num=local, hint=hint)
    node_num, tasks = _number(environ, STEP_NODES, least=1), _first_number(environ, STEP_TASKS, least=1)
    if tasks and tasks.value > node_num.value:
        found = f"{STEP_TASKS}={tasks.value} on {environ[STEP_NODES]} hosts"
        raise _once(found, "srun", "start it once per host (srun --ntasks-per-node=1 msrun ...)", tasks.value)
    with blamed_on(STEP_LIST):
        nodes = expand(environ[STEP_LIST])
    job = SLURM.read(environ, host, nodes)
    if job.node_rank is None:
        return replace(job, master_port=None, hint=hint)
    own = environ.get(NODE_NAME)
    if own and (listed := nodes[job.node_rank.value]) != own:
        raise UsageError(
            f"{NODE}={job.node_rank.value}: is {listed} in {STEP_LIST}={environ[STEP_LIST]}, but {NODE_NAME}={own}; "
            f"give --node_rank and --master_addr, or {OFF}"
        )
    port = _port(JOB, f"slurm {environ[JOB]}.{environ.get(STEP, '')}")
    more = "srun --cpus-per-task=N gives more"
    return replace(job, master_port=port, cpu_count=host.cpu_count, cpu_remedy=more)


# -- Open MPI -------------------------------------------------------------------------------------------------------

DAEMON = "PMIX_SERVER_URI"  # begins the names of PMIX_SERVER_URI4 and the like: `JOB.DAEMON;ADDRESS`
MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"  # of version 4: `JOB.0;tcp://10.0.0.1,10.1.0.1:5000;tcp6://[fd00::1]:5000`
NODE_REGEX = "OMPI_MCA_orte_node_regex"  # hosts by daemon, of version 4: `login[1:1],node[2:1-4]@0(5)`
NAMESPACE = "PMIX_NAMESPACE"  # of the job; in version 5 it holds the name of mpirun's host: `prterun-HOST-PID@1`
OPEN_MPI = Variables(
    name="mpirun",
    node_rank="OMPI_COMM_WORLD_RANK",
    node_num=("OMPI_COMM_WORLD_SIZE",),
    tasks_here="OMPI_COMM_WORLD_LOCAL_SIZE",
    once="mpirun --map-by ppr:1:node msrun ...",
    job=(NAMESPACE,),
    remedy="add --master_addr ADDRESS of the host of rank 0: mpirun ... msrun --master_addr ADDRESS ...",
)
_REGEX_PIECE = r"([^,\[\]@]*)(?:\[([0-9]{1,9}):([0-9,-]+)\]([^,\[\]@]*))?(?:,|@|\Z)"
_MAX_HOSTS = 16_384


def find_open_mpi(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the job whose ranks are the msruns that mpirun has started; None outside of one."""
    job = OPEN_MPI.find(environ, host)
    return job and replace(job, master_addr=_mpirun_master(environ, job.node_rank.value) if job.node_rank else None)


def _mpirun_master(environ: Environ, rank: int) -> Told[str] | None:
    uris = (environ[name] for name in sorted(environ) if name.startswith(DAEMON))
    daemon = next((int(match[1]) for uri in uris if (match := re.match(r"[^;]*\.(\d{1,9});", uri))), None)
    if daemon is None:
        return None
    if daemon == rank:
        uri = environ.get(MPIRUN_URI, "")
        if found := re.search(r"tcp://([0-9.]+)[,:]", uri) or re.search(r"tcp6://\[([0-9a-fA-F:]+)[],]", uri):
            return Told(found[1], MPIRUN_URI)
        found = re.match(r"[a-z]+-(.+)-\d+@\d+\Z", environ.get(NAMESPACE, ""))
        return Told(found[1], NAMESPACE) if found else None
    names, first = read_node_regex(environ.get(NODE_REGEX, "")), daemon - rank
    return Told(names[first], NODE_REGEX) if 0 < first < len(names) else None


def read_node_regex(text: str) -> list[str]:
    """Return the hosts of orte_node_regex, by daemon: `node[2:1-4].dc` is node01.dc to node04.dc; else none."""
    names: list[str] = []
    position = 0
    while position < len(text) and text[position - 1 : position] != "@":
        match = re.compile(_REGEX_PIECE).match(text, position)
        if match is None or not match[0]:
            return []
        head, width, ranges, tail = match.groups()
        try:
            numbers = read_ranges(ranges, _MAX_HOSTS + 1) if ranges else None
        except RangeError:
            numbers = []
        names += [head] if numbers is None else [f"{head}{one:0{min(int(width), 9)}}{tail}" for one in numbers]
        position = match.end()
        if len(names) > _MAX_HOSTS:
            return []
    return names


# -- those that list their hosts in a form of their own -------------------------------------------------------------

SAGEMAKER = Variables(
    name="SageMaker job {TRAINING_JOB_NAME}",
    node_rank="SM_CURRENT_HOST",
    hosts="SM_HOSTS",
    local_worker_num=("SM_NUM_GPUS",),
    job=("TRAINING_JOB_NAME",),
)
VERTEX = "CLUSTER_SPEC"
VERTEX_JOB = Variables(name="Vertex AI job", node_rank=VERTEX, hosts=VERTEX)
_TRAINING_POOLS = ("workerpool0", "workerpool1")
_VOLCANO_HOSTS = r"VC_(\w+)_HOSTS\Z"


def find_sagemaker(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the SageMaker training job that this container is of: its hosts are a JSON list."""
    listed, current = "SM_HOSTS", "SM_CURRENT_HOST"
    if not environ.get(current):
        return None
    hosts, own = list(map(str, _json(environ, listed, list))), environ[current]
    if own not in hosts:
        raise UsageError(f"{current}={own}: is not in {listed}={environ[listed]}; give {OFF}")
    return SAGEMAKER.read({**environ, current: str(hosts.index(own))}, host, hosts)


def find_vertex(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the Vertex AI custom job that this replica is of: pool 0 is its chief, pool 1 the others."""
    spec = _json(environ, VERTEX, dict)
    try:
        pools = {name: list(spec["cluster"][name]) for name in sorted(spec["cluster"]) if name in _TRAINING_POOLS}
        kind, index = spec["task"]["type"], int(spec["task"]["index"])
        hosts = [str(one) for pool in pools.values() for one in pool]
        before = sum(len(pool) for name, pool in pools.items() if name < kind)
        is_training = kind in pools and index < len(pools[kind])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{VERTEX}: cluster with workerpool0 and task are expected in it; give {OFF}") from None
    if not is_training:
        return None  # a parameter server or an evaluator
    address, _, port = hosts[0].rpartition(":")
    job = VERTEX_JOB.read({VERTEX: str(before + index)}, host, [address or hosts[0], *hosts[1:]])
    told = Told(int(port), VERTEX) if address and port.isdigit() else None
    return replace(job, master_port=told) if len(hosts) > 1 else job


def _json(environ: Environ, name: str, kind: type) -> Any:
    try:
        value = json.loads(environ[name])
    except ValueError:
        value = None
    if not isinstance(value, kind) or not value:
        what = "a list of hosts" if kind is list else "an object"
        raise UsageError(f"{name}={environ[name][:80]!r}: JSON of {what} is expected; correct it, or give {OFF}")
    return value


def find_volcano(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the Volcano job that this pod is of."""
    index = VOLCANO_PODS.node_rank
    tasks = [match[1] for name in sorted(environ) if (match := re.match(_VOLCANO_HOSTS, name)) and environ[name]]
    if not tasks:
        return VOLCANO_PODS.find(environ, host)
    if len(tasks) > 1:
        raise UsageError(
            f"VC_<TASK>_HOSTS of {len(tasks)} tasks ({', '.join(tasks)}): {index} starts at 0 in each, so the "
            "pods have no numbers of their own; put all pods into one task, use the plugin pytorch, or give "
            f"--worker_num, --local_worker_num, --node_rank and --master_addr, or {OFF}"
        )
    listed, count = f"VC_{tasks[0]}_HOSTS", f"VC_{tasks[0]}_NUM"
    row = Variables(name=VOLCANO_PODS.name, node_rank=index, needed=(IN_POD,), node_num=(count,), hosts=listed)
    return row.read(environ, host, environ[listed].replace(",", " ").split())


# -- those that have started msrun once, for one host ---------------------------------------------------------------

LSF_JOB, LSF_HOSTS = "LSB_JOBID", "LSB_MCPU_HOSTS"
PBS_JOB, PBS_HOSTS = "PBS_JOBID", "PBS_NODEFILE"


def find_allocation(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the one host on which LSF, PBS or Ray has started msrun, with how to use the others; None elsewhere."""
    if environ.get(LSF_JOB) and environ.get(LSF_HOSTS):
        name, hosts = f"LSF job {environ[LSF_JOB]}", len(set(environ[LSF_HOSTS].split()[::2]))
        hint = _unused(name, hosts, "hosts", LSF_HOSTS, "msrun --hostfile $LSB_DJOB_HOSTFILE ...")
    elif environ.get(PBS_JOB):
        name = f"PBS job {environ[PBS_JOB]}"
        hint = _unused(name, len(set(host.listed)), "hosts", PBS_HOSTS, f"msrun --hostfile ${PBS_HOSTS} ...")
    elif environ.get("RAY_JOB_ID") or environ.get("RAY_ADDRESS"):
        name = "Ray"
        hint = (
            "Ray: no variable says which nodes a job has, so msrun uses this host alone; start it once on each, as a "
            "task of Ray, with --node_rank and --master_addr, or give --hosts"
        )
    else:
        return None
    return Surroundings(name=name, node_num=Told(1, f"started by {name}"), hint=hint)


def _unused(name: str, count: int, what: str, variable: str, how: str) -> str:
    if count < 2:
        return ""
    return f"{name} has {count} {what} ({variable}), but msrun was started once, for this host: {how} uses all of them"


FINDERS: tuple[tuple[str, Callable[[Environ, HostView], Surroundings | None]], ...] = (
    (NODES, find_torchrun),  # set on purpose, for a launcher of this kind: nearer than the cluster that it runs in
    (OPEN_MPI.node_rank, find_open_mpi),  # an mpirun in a Slurm allocation, or in a pod, has started this process
    (JOB, find_slurm),
    (SAGEMAKER.hosts, find_sagemaker),
    (VERTEX, find_vertex),
    *((row.node_rank, row.find) for row in (SKYPILOT, DSTACK, AZURE, LEADER_WORKER_SET, JSRUN, HYDRA, HAND)),
    (PYTORCH_PODS.node_rank, PYTORCH_PODS.find),
    (VOLCANO_PODS.node_rank, find_volcano),
    (INDEXED_JOB.node_rank, INDEXED_JOB.find),  # after those that make their pods through Indexed Jobs
    (PMIX.node_rank, PMIX.find),
    # last: it knows no place, and says what is not used
    *((name, find_allocation) for name in (LSF_JOB, PBS_JOB, "RAY_JOB_ID", "RAY_ADDRESS")),
)
"""Variable without which there is no such job, and who reads it; what is nearer to this process comes first: the first
that finds something decides alone."""


def is_surrounded(environ: Environ) -> bool:
    """Return whether anything may be found; not in a worker of msrun, whose place is msrun's own."""
    return contract.MSRUN_JOB_ID not in environ and any(environ.get(name) for name, _ in FINDERS)


def find_surroundings(environ: Environ, host: HostView) -> Surroundings | None:
    """Return the job, or the one host of an allocation, that this process was started in; None: none (UsageError)."""
    finders = [find for name, find in FINDERS if environ.get(name)] if is_surrounded(environ) else ()
    return next((job for find in finders if (job := find(environ, host)) is not None), None)
