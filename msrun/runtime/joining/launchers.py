"""Worlds that a launcher made: msrun, torchrun, Open MPI's mpirun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.spec import WorldSpec, choose_meeting, parse_number

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
