"""The world of a rank table: RANK_TABLE_FILE with RANK_ID, as the run.sh of MindSpore's documents starts it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.spec import WorldSpec, choose_meeting, parse_number
from ranktable.files import MAX_BYTES, read_at_most

if TYPE_CHECKING:
    from ranktable import RankTable, Server

OLD_NAME = "MINDSPORE_HCCL_CONFIG_PATH"
"""What MindSpore called the variable first, and still takes."""


def find_rank_table(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that the rank table gives to RANK_ID; reads the file that RANK_TABLE_FILE names.

    Ranks of several servers meet at the pod_ip, host_ip or server_id of rank 0's server, those of one on its loopback
    address. The port follows from the table; on one host from its path too, so that two copies do not meet.

    Raises:
        WorldError: the table cannot be read, or RANK_ID, RANK_SIZE or DEVICE_ID contradict it.
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
