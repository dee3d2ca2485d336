"""MindSpore's dynamic cluster by hand: one process with MS_ROLE=MS_SCHED, the others with MS_ROLE=MS_WORKER, and in a
job with parameter servers MS_ROLE=MS_PSERVER."""

from __future__ import annotations

from collections.abc import Mapping

from msrun import contract
from msrun.errors import WorldError, near_miss
from msrun.runtime.joining.spec import Meeting, WorldSpec, parse_number

TIME_OUT = "MS_TOPO_TIMEOUT"
"""Seconds for all to come, for ever when negative; MindSpore's default is 1800."""
SILENCE = "MS_NODE_TIMEOUT"
"""Seconds without a sign of life after which a worker counts as lost; 30."""
OWN_ADDRESS = "MS_WORKER_IP"
"""Which of its addresses a worker is to use towards the scheduler."""
DEFAULT_SILENCE_S = 30
RECOVERY = "MS_ENABLE_RECOVERY"
RECOVERY_NOTE = (
    f"{RECOVERY}=1 recovers nothing here: workers end with their scheduler, so start all of them again, from a "
    "checkpoint; msrun --max_restarts N does so by itself"
)
_ROLES = (contract.ROLE_WORKER, contract.ROLE_SCHEDULER, contract.ROLE_SERVER)
_OTHERS = (contract.MS_WORKER_NUM, contract.MS_SCHED_HOST, contract.MS_SCHED_PORT)


def find_worker(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place of a process with MS_ROLE=MS_WORKER; its rank is -1 when the scheduler is to assign it.

    Raises:
        WorldError: MS_ROLE is none of the roles, or what belongs to it is missing or no number.
    """
    if not environ.get(contract.MS_ROLE):
        return None
    _check_role(environ[contract.MS_ROLE])
    if environ[contract.MS_ROLE] != contract.ROLE_WORKER:
        return None
    size = parse_number(environ, contract.MS_WORKER_NUM)
    device = parse_number(environ, contract.DEVICE_ID) if contract.DEVICE_ID in environ else None
    rank = _asked_rank(environ)
    return WorldSpec("MS_ROLE", rank, size, 0, size, "", _meeting(environ), device)


def find_cluster(environ: Mapping[str, str], role: str) -> tuple[Meeting, int, int] | None:
    """Return where a process with MS_ROLE=MS_SCHED or MS_PSERVER meets the others, and how many workers and parameter
    servers there are; None for a process of another role.

    Raises:
        WorldError: a number is missing or out of its range.
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
    """Refuse a process that has the other variables of a dynamic cluster, but no role in it.

    Raises:
        WorldError: it names them.
    """
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


def _check_role(role: str) -> None:
    if role not in _ROLES:
        known = f"{', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
        raise WorldError(f"{contract.MS_ROLE}={role!r}: {known} is expected{near_miss(role, _ROLES)}")
