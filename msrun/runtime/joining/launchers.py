"""The ways to start a job that this process may have been started in: msrun, torchrun, Open MPI's mpirun, Slurm, a rank
table, a dry run.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError, near_miss
from msrun.runtime.joining.spec import ALONE, Meeting, WorldSpec, choose_meeting, parse_number
from ranktable.files import MAX_BYTES, read_at_most

if TYPE_CHECKING:
    from ranktable import RankTable, Server


OMPI_RANK = "OMPI_COMM_WORLD_RANK"
_HOST_OF_MPIRUN = "OMPI_MCA_orte_hnp_uri"
"""Where mpirun listens: `job.0;tcp://address,address:port;tcp6://[address]:port`."""
_HOST_OF_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
"""The same of the daemon that started this rank; on mpirun's own host that is mpirun."""
_RANDOM_KEY = "OMPI_MCA_orte_precondition_transports"
_SESSION_FOLDERS = ("PMIX_SERVER_TMPDIR", "OMPI_MCA_orte_jobfam_session_dir")
"""A folder of the job and its user alone; mpirun removes it at the end."""


def find_msrun(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that msrun gave this process."""
    if contract.MSRUN_JOB_ID not in environ or contract.RANK not in environ:
        return None
    return _torch_world(environ, "msrun", environ.get(contract.MSRUN_RENDEZVOUS) or "env://")


def find_torchrun(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that torchrun, or whoever speaks torch's variables, gave this process."""
    if contract.RANK not in environ or contract.WORLD_SIZE not in environ:
        return None
    spec = _torch_world(environ, "torchrun", "env://")
    if contract.TORCHELASTIC_RUN_ID not in environ:
        _refuse_left_over(environ, spec, OMPI_RANK, "mpirun")
    return spec


def find_mpirun(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that Open MPI's mpirun gave this process.

    Ranks of one host meet in mpirun's own folder of the job, without any port. Those of several meet on mpirun's host
    when rank 0 runs there. Seen with Open MPI 4.1; where a variable is missing, MASTER_ADDR is asked for.
    """
    if OMPI_RANK not in environ:
        return None
    size = parse_number(environ, "OMPI_COMM_WORLD_SIZE")
    rank = parse_number(environ, OMPI_RANK)
    local_rank = parse_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    local_size = parse_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    key = environ.get(_RANDOM_KEY) or environ.get("PMIX_NAMESPACE", "")
    folder = next((environ[name] for name in _SESSION_FOLDERS if environ.get(name)), "")
    if local_size == size and folder and key and contract.MASTER_ADDR not in environ:
        path = f"{folder}/msrun_world_{re.sub(r'[^0-9A-Za-z-]', '_', key)}"
        return WorldSpec("mpirun", rank, size, local_rank, local_size, f"file://{path}", device_id=local_rank)
    alone = (("127.0.0.1",), "OMPI_COMM_WORLD_LOCAL_SIZE")
    addresses, told = alone if local_size == size else _mpirun_host(environ, rank)
    meeting = choose_meeting(environ, addresses, told, f"mpirun {key}")
    return WorldSpec("mpirun", rank, size, local_rank, local_size, "", meeting, local_rank)


def _mpirun_host(environ: Mapping[str, str], rank: int) -> tuple[tuple[str, ...], str]:
    """Return the addresses of mpirun's host and who told them, or none and the remedy."""
    remedy = "mpirun -x MASTER_ADDR=ADDRESS_OF_THE_FIRST_HOST"
    if contract.MASTER_ADDR in environ:
        return (), remedy
    here, _, places = environ.get(_HOST_OF_MPIRUN, "").partition(";")
    if not places:
        return (), remedy
    if rank == 0 and environ.get(_HOST_OF_DAEMON, "").partition(";")[0] != here:
        return (), f"rank 0 does not run on mpirun's own host; {remedy}"
    found: list[str] = []
    for kind, pattern in (("tcp://", r"tcp://([^;]*):\d+"), ("tcp6://", r"tcp6://\[([^;]*)\]:\d+")):
        for match in re.finditer(pattern, places):
            found += [word.strip(" []") for word in match.group(1).split(",")]
        if found and kind == "tcp://":
            break  # IPv6 only where there is nothing else
    return tuple(found), _HOST_OF_MPIRUN if found else remedy


def _torch_world(environ: Mapping[str, str], source: str, rendezvous: str) -> WorldSpec:
    size = parse_number(environ, contract.WORLD_SIZE)
    return WorldSpec(
        source,
        parse_number(environ, contract.RANK),
        size,
        parse_number(environ, contract.LOCAL_RANK, 0),
        parse_number(environ, contract.LOCAL_WORLD_SIZE, size),
        rendezvous,
    )


def _refuse_left_over(environ: Mapping[str, str], spec: WorldSpec, name: str, launcher: str) -> None:
    """Refuse RANK of an earlier job in the shell: every rank of mpirun would take it for its own."""
    if name in environ and parse_number(environ, name) != spec.global_rank:
        raise WorldError(
            f"{contract.RANK}={spec.global_rank}, but {launcher} says {name}={environ[name]}: left over in the shell? "
            f"unset {contract.RANK} and {contract.WORLD_SIZE}, or give each rank its own"
        )


_SIZE, _NODE, _NODES = "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def find_slurm(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that srun gave this process; ranks meet on the first host of the step.

    The port follows from the ids of job and step.
    """
    if "SLURM_PROCID" not in environ or _SIZE not in environ:
        return None
    size = parse_number(environ, _SIZE)
    if size == 1:
        return None  # an interactive shell on a node carries these variables too
    rank = parse_number(environ, "SLURM_PROCID")
    local_rank = parse_number(environ, "SLURM_LOCALID", 0)
    node = parse_number(environ, _NODE, 0)
    local_size = _tasks_of(environ.get(_COUNTS, ""), node) or size // parse_number(environ, "SLURM_STEP_NUM_NODES", 1)
    host, told = first_host(environ.get(_NODES, "")), _NODES
    if local_size == size:
        host = "127.0.0.1"
    elif rank == 0 and node != 0:
        host = ""
    if not host:
        told = "export it, the address of rank 0's host, before srun"
    job = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    meeting = choose_meeting(environ, (host,) if host else (), told, f"Slurm {'.'.join(job)}")
    return WorldSpec("Slurm", rank, size, local_rank, local_size, "", meeting, local_rank)


def first_host(folded: str) -> str:
    """Return the first host of a folded list.

    >>> first_host("node[08-16,20],login")
    'node08'
    """
    first = re.split(r",(?![^\[]*\])", folded)[0].strip()
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _tasks_of(folded: str, node: int) -> int:
    """Return how many tasks a node has of `8(x2),4`; 0 when that is not told."""
    counts: list[int] = []
    for part in folded.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            return 0
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts[node] if 0 <= node < len(counts) else 0


OLD_NAME = "MINDSPORE_HCCL_CONFIG_PATH"
"""What MindSpore called the variable first, and still takes."""


def find_rank_table(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that the rank table gives to RANK_ID; reads the file that RANK_TABLE_FILE names.

    Ranks of several servers meet at the pod_ip, host_ip or server_id of rank 0's server, those of one on its loopback
    address. The port follows from the table; on one host from its path too, so that two copies do not meet.
    """
    name = next((name for name in (contract.RANK_TABLE_FILE, OLD_NAME) if environ.get(name)), None)
    if contract.RANK_ID not in environ or name is None:
        _refuse_half(environ, name)
        return None
    path = Path(environ[name])
    where = f"{name} {path}"
    table = _read(path, where)
    rank = parse_number(environ, contract.RANK_ID)
    size = table.world_size
    if parse_number(environ, contract.RANK_SIZE, size) != size:
        raise WorldError(
            f"{contract.RANK_SIZE}={environ[contract.RANK_SIZE]}, but {where} has {size} ranks: make them equal, or "
            f"unset {contract.RANK_SIZE}"
        )
    if not 0 <= rank < size:
        raise WorldError(
            f"{contract.RANK_ID}={rank}: {where} has ranks 0 to {size - 1} only; correct it, or the start of the ranks"
        )
    server = table.server_of(rank)
    device_id = table.device_of(rank).device_id
    if parse_number(environ, contract.DEVICE_ID, device_id) != device_id:
        raise WorldError(
            f"{contract.DEVICE_ID}={environ[contract.DEVICE_ID]} with {contract.RANK_ID}={rank}, but {where} gives "
            f"that rank device {device_id} of server {server.server_id}: make them equal, or unset {contract.DEVICE_ID}"
        )
    servers = [server for server in table.servers if server.devices]
    meeting = choose_meeting(environ, (_address(table, servers),), where, _key(path, len(servers)))
    ranks = server.ranks
    return WorldSpec("rank table", rank, size, ranks.index(rank), len(ranks), "", meeting, device_id)


def _refuse_half(environ: Mapping[str, str], name: str | None) -> None:
    """Refuse ranks without a table, and a table with a number of ranks but without the own one."""
    if parse_number(environ, contract.RANK_SIZE, 1) < 2:
        return
    size = f"{contract.RANK_SIZE}={environ[contract.RANK_SIZE]}"
    if name is not None:
        raise WorldError(f"{name} and {size} are set, but not {contract.RANK_ID}: export it, or start with msrun")
    if contract.RANK_ID in environ:
        raise WorldError(
            f"{contract.RANK_ID}={environ[contract.RANK_ID]} and {size} are set, but not {contract.RANK_TABLE_FILE}: "
            "export it, unset both, or start with msrun"
        )


def _read(path: Path, where: str) -> RankTable:
    from ranktable import RankTableError, read_table

    try:
        table = read_table(path)
    except RankTableError as error:
        raise WorldError(f"{where}: {error}") from None
    ranks = sorted(device.rank_id for _, device in table.placements)
    if not ranks or ranks != list(range(len(ranks))):
        raise WorldError(
            f"{where}: its rank_ids are not 0 to {max(len(ranks) - 1, 0)}, each once; see ranktable validate"
        )
    return table


def _address(table: RankTable, servers: list[Server]) -> str:
    first = table.server_of(0)
    return "127.0.0.1" if len(servers) == 1 else first.pod_ip or first.host_ip or first.server_id


def _key(path: Path, servers: int) -> str:
    """Return what the ranks of a job have in common: what the table says, on one host also where it is."""
    content = hashlib.sha256(read_at_most(path, MAX_BYTES)).hexdigest()
    return f"rank table {content}" + (f" {os.getuid()} {path.resolve()}" if servers == 1 else "")


TIME_OUT = "MS_TOPO_TIMEOUT"
"""Seconds for all to come, for ever when negative; MindSpore's default is 1800."""
SILENCE = "MS_NODE_TIMEOUT"
"""Seconds without a sign of life after which a worker counts as lost; 30."""
OWN_ADDRESS = "MS_WORKER_IP"
"""Which of its addresses a worker is to use towards the scheduler."""
DEFAULT_SILENCE_S = 30
_ROLES = (contract.ROLE_WORKER, contract.ROLE_SCHEDULER, contract.ROLE_SERVER)
_OTHERS = (contract.MS_WORKER_NUM, contract.MS_SCHED_HOST, contract.MS_SCHED_PORT)


def find_worker(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place of a process with MS_ROLE=MS_WORKER; its rank is -1 when the scheduler is to assign it."""
    if not environ.get(contract.MS_ROLE):
        return None
    role = environ[contract.MS_ROLE]
    if role not in _ROLES:
        known = f"{', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
        raise WorldError(f"{contract.MS_ROLE}={role!r}: {known} is expected{near_miss(role, _ROLES)}")
    if role != contract.ROLE_WORKER:
        return None
    size = parse_number(environ, contract.MS_WORKER_NUM)
    device = parse_number(environ, contract.DEVICE_ID) if contract.DEVICE_ID in environ else None
    rank = _asked_rank(environ)
    return WorldSpec("MS_ROLE", rank, size, 0, size, "", _meeting(environ), device)


def find_cluster(environ: Mapping[str, str], role: str) -> tuple[Meeting, int, int] | None:
    """Return where a process with MS_ROLE=MS_SCHED or MS_PSERVER meets the others, and how many workers and parameter
    servers there are; None for a process of another role.
    """
    is_launched = contract.RANK in environ and {contract.WORLD_SIZE, contract.MSRUN_JOB_ID} & environ.keys()
    if environ.get(contract.MS_ROLE) != role or is_launched:
        return None
    size, servers = parse_number(environ, contract.MS_WORKER_NUM), parse_number(environ, contract.MS_SERVER_NUM, 0)
    least = int(role == contract.ROLE_SERVER)
    for name, number, lowest in ((contract.MS_WORKER_NUM, size, 1), (contract.MS_SERVER_NUM, servers, least)):
        if number < lowest:
            raise WorldError(f"{name}={number}: at least {lowest} is expected")
    return _meeting(environ), size, servers


def refuse_without_role(environ: Mapping[str, str]) -> None:
    """Refuse a process that has the other variables of a dynamic cluster, but no role in it."""
    found = [f"{name}={environ[name]}" for name in _OTHERS if environ.get(name)]
    if len(found) > 1 and not environ.get(contract.MS_ROLE):
        raise WorldError(
            f"{' and '.join(found)} are set, but not {contract.MS_ROLE}: export {contract.MS_ROLE}="
            f"{contract.ROLE_WORKER}, {contract.MS_ROLE}={contract.ROLE_SCHEDULER} for the scheduler, or unset them"
        )


def joining_limit_s(environ: Mapping[str, str], default_s: float) -> float:
    """Return how long to wait for the others: MS_TOPO_TIMEOUT, or the default; infinite when negative."""
    seconds = parse_number(environ, TIME_OUT) if TIME_OUT in environ else default_s
    return seconds if seconds >= 0 else float("inf")


def silence_limit_s(environ: Mapping[str, str]) -> int:
    """Return after how many silent seconds a host counts as lost."""
    seconds = parse_number(environ, SILENCE, DEFAULT_SILENCE_S)
    if seconds < 1:
        raise WorldError(f"{SILENCE}={seconds}: at least 1 is expected")
    return seconds


def _asked_rank(environ: Mapping[str, str]) -> int:
    """Return RANK_ID, or MS_NODE_ID where it is a number; -1 without either.

    Source: in MindSpore a numeric node id asks for that rank.
    """
    node = environ.get(contract.MS_NODE_ID, "")
    named = int(node) if node.isdecimal() else -1
    rank = parse_number(environ, contract.RANK_ID, named)
    if named not in (-1, rank):
        raise WorldError(f"{contract.RANK_ID}={rank}, but {contract.MS_NODE_ID}={node}: make them equal, or unset one")
    if contract.RANK_ID in environ and rank < 0:
        raise WorldError(f"{contract.RANK_ID}={rank}: 0 or more is expected, or unset it to be given a rank")
    return rank


def _meeting(environ: Mapping[str, str]) -> Meeting:
    port = parse_number(environ, contract.MS_SCHED_PORT)
    if not 0 < port < 65536:
        raise WorldError(f"{contract.MS_SCHED_PORT}={port}: a port from 1 to 65535 is expected")
    host = environ.get(contract.MS_SCHED_HOST) or "127.0.0.1"
    return Meeting((host,), port, "MS_ROLE", contract.MS_SCHED_HOST, "the scheduler", may_be_foreign=True)


SOURCE = "dry run"
LEVELS = range(4)
REAL_VALUES = 3
"""Level from which parameters have values and steps are run."""


def find_simulated(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that `msrun --sim_level` gave this process."""
    if contract.MSRUN_SIM_LEVEL not in environ:
        return None
    read_level(environ)
    size, rank = parse_number(environ, contract.WORLD_SIZE), parse_number(environ, contract.RANK)
    local_size = parse_number(environ, contract.LOCAL_WORLD_SIZE, size)
    return WorldSpec(SOURCE, rank, size, rank % local_size, local_size, "fake://")


def read_level(environ: Mapping[str, str]) -> int:
    """Return the level of this process' dry run."""
    level = parse_number(environ, contract.MSRUN_SIM_LEVEL)
    if level not in LEVELS:
        raise WorldError(f"{contract.MSRUN_SIM_LEVEL}={level}: must be 0, 1, 2 or 3; start with msrun --sim_level")
    return level


def join_fake_world(spec: WorldSpec) -> None:
    """Make torch's default group one whose collectives send nothing: every other rank seems to hold what this one does.

    Its groups cost nothing to make, whatever their size (torch 2.11 to 2.13).
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # it registers torch's backend "fake"
    dist.init_process_group("fake", store=HashStore(), rank=spec.global_rank, world_size=spec.world_size)


_FINDERS = (find_simulated, find_msrun, find_torchrun, find_worker, find_mpirun, find_slurm, find_rank_table)


def find_world(environ: Mapping[str, str]) -> WorldSpec:
    """Find this process's place from its environment; opens nothing but the rank table.

    Order: a dry run; msrun's variables; torchrun's; MS_ROLE by hand, which in MindSpore too comes before what follows;
    mpirun's (OMPI_*); Slurm's; RANK_TABLE_FILE with RANK_ID; none of them = one process.
    """
    for finder in _FINDERS:
        spec = finder(environ)
        if spec is not None:
            _check(spec)
            return spec
    refuse_without_role(environ)
    return ALONE


def _check(spec: WorldSpec) -> None:
    if spec.global_rank == -1 and spec.source == "MS_ROLE" and spec.world_size > 0:
        return
    if not 0 <= spec.global_rank < spec.world_size:
        raise WorldError(
            f"rank {spec.global_rank} of a world of {spec.world_size} ({spec.source} variables): must be 0 to "
            f"{spec.world_size - 1}; stale variables in the shell? start with msrun"
        )
