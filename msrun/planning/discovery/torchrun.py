"""torchrun's variables: PET_NNODES and the like, which Kubeflow's operators set for every pod.

Source: torch.distributed.run, where each option may be given as PET_<OPTION>; Kubeflow's training operator (PyTorchJob)
and trainer (TrainJob), which set them beside MASTER_ADDR and MASTER_PORT. WORLD_SIZE and RANK of a PyTorchJob count
pods, not workers.
"""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import UsageError
from msrun.planning.discovery.surroundings import (
    OFF,
    HostView,
    Surroundings,
    Told,
    read_master,
    read_number,
    read_place,
    read_port,
)

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
OF_WORKER = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")
"""Set for a worker: what else it carries is the place of its launcher."""

_DEVICE_WORDS = ("auto", "gpu", "npu", "xpu")
_DEFAULT_PORT = 29400
"""torchrun's for an endpoint without a port."""


def find_torchrun(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job that PET_NNODES and its like describe; None without it, and in a worker of torchrun.

    Raises:
        UsageError: an elastic number of hosts, or variables that contradict each other.
    """
    if not environ.get(NODES) or "TORCHELASTIC_RUN_ID" in environ:
        return None
    node_num = _node_num(environ)
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
        node_rank=node_rank,
        local_worker_num=_local_worker_num(environ, host),
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
    return f"Kubernetes pod {host.name}" if environ.get(IN_POD) else "torchrun's variables"


def _node_num(environ: Mapping[str, str]) -> Told[int]:
    least, _, most = environ[NODES].partition(":")
    if most and most != least:
        raise UsageError(
            f"{NODES}={environ[NODES]}: the number of hosts is fixed, with msrun; set one number, such as {most}"
        )
    return Told(read_number({NODES: least}, NODES, least=1), NODES)


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
