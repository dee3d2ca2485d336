"""The job's rank table: awaited and checked when the user gives one, generated when not."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from msrun import contract
from msrun.errors import RendezvousTimeout, UsageError, refused_as
from msrun.launch.directory.log_directory import write_private
from msrun.planning.plan import LaunchPlan
from ranktable.bounded_text import load_json
from ranktable.files import MAX_BYTES, read_at_most, read_text

if TYPE_CHECKING:
    from ranktable import RankTable


TABLE_RETRY_S = 0.2  # how often a table is read whose producer has not finished it
_LINE_S = 30.0  # how often the user is told of it


def await_rank_table(path: Path, limit_s: float, tell: Callable[[str], None]) -> None:
    """Wait `limit_s` (negative: for ever) until a table's status is not "initializing" (RendezvousTimeout)."""

    def is_initializing() -> bool:
        try:
            data = read_at_most(path, MAX_BYTES + 1) if path.is_file() else b""
            table = load_json(data) if b"initializing" in data and len(data) <= MAX_BYTES else None
        except (OSError, ValueError):
            return False  # found, and refused, when it is read as a table
        return isinstance(table, dict) and table.get("status") == "initializing"

    begin = next_line = time.monotonic()
    while is_initializing():
        now = time.monotonic()
        if 0 <= limit_s <= now - begin:
            raise RendezvousTimeout(
                f'--cluster_time_out {limit_s:g}: the status of --rank_table_file {path} is still "initializing"; look '
                "at what writes it, such as the operator of the cluster"
            )
        if now >= next_line:
            next_line = now + _LINE_S
            tell(f'--rank_table_file {path}: its status is "initializing"; waiting until it is "completed"')
        time.sleep(TABLE_RETRY_S)


def linked_table(path: Path | None) -> str | None:
    """Return the text of a table that is a symbolic link, as of a ConfigMap, for workers to copy; else None."""
    if path is None or not path.is_symlink():
        return None
    with refused_as(f"--rank_table_file {path}: cannot be read", "give another file"):
        return read_text(path, MAX_BYTES)


def write_rank_table(plan: LaunchPlan, text: str | None = None, folder: Path | None = None) -> None:
    """Write the table of this job, or `text`, into `folder` or the log directory (UsageError: wrong, or no place)."""
    path = Path(folder or plan.log_dir, contract.RANK_TABLE_JSON)
    with refused_as(f"--log_dir {plan.log_dir}: cannot write {path}", "give a directory that you may write"):
        write_private(path, render_rank_table(plan) if text is None else text)


def render_rank_table(plan: LaunchPlan) -> str:
    """Return the text of the table of a job for which none was given; UsageError: it is none that HCCL takes."""
    from ranktable.values import render_json

    hosts = [(assignment.address, assignment.device_ids) for assignment in plan.fleet]
    hosts = hosts or [(host.address, tuple(w.device_id for w in host.workers)) for host in plan.hosts]
    ids = [address for address, _ in hosts]
    hosts = [  # two msruns on one machine are two servers
        (f"{address}-{index}" if address in ids[:index] else address, devices)
        for index, (address, devices) in enumerate(hosts)
    ]
    ranks = count()
    servers = [
        {"server_id": name, "device": [{"device_id": str(one), "rank_id": str(next(ranks))} for one in devices]}
        for name, devices in hosts
    ]
    head = {"version": "1.0", "server_count": str(len(servers))}
    text = render_json({**head, "server_list": servers, "status": "completed"})
    if plan.device_target == "ascend":
        from ranktable import parse_table, validate_table

        first = next((problem for problem in validate_table(parse_table(text)) if problem.is_error), None)
        if first is not None:
            raise UsageError(f"rank table of this job: {first.path}: {first.message}; {first.remedy}")
    return text


def read_given_table(path: Path) -> RankTable:
    from ranktable import RankTableError, read_table

    if path.exists() and not path.is_file():
        raise UsageError(f"--rank_table_file {path}: no plain file, and every worker reads it; give a file")
    try:
        return read_table(path)
    except RankTableError as error:
        raise UsageError(f"--rank_table_file {path}: {error}") from None


def check_rank_table(path: Path, world_size: int, device_target: str) -> None:
    """Refuse a table that cannot be read or breaks a rule, or of another number of ranks, by a UsageError."""
    from ranktable import validate_file

    table = read_given_table(path)
    problems = [problem for problem in validate_file(path, device_target=device_target).problems if problem.is_error]
    if problems:
        first = problems[0]
        more = f" ({len(problems) - 1} more; see ranktable validate {path})" if len(problems) > 1 else ""
        raise UsageError(f"--rank_table_file {path}: {first.path}: {first.message}; {first.remedy}{more}")
    check_ranks(table, path)
    if table.world_size != world_size:
        raise UsageError(
            f"--rank_table_file {path}: holds {table.world_size} ranks but --worker_num is {world_size}; "
            "make them equal"
        )


def check_ranks(table: RankTable, path: Path) -> None:
    """Refuse a table (UsageError) whose ranks are not 0 to n-1, each once, as one of several services (MindIE)."""
    ranks = sorted(device.rank_id for _, device in table.placements)
    if ranks != list(range(len(ranks))):
        raise UsageError(
            f"--rank_table_file {path}: its rank_ids are not 0 to {len(ranks) - 1}, each once; see ranktable validate"
        )
