"""How many workers each host gets, and how many that makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msrun.errors import UsageError
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.ranks import count_workers
from ranktable.hostlist.brackets import fold, shorten
from ranktable.hostlist.host_name import MAX_SLOTS


def give_slots(
    entries: Sequence[HostEntry], *, worker_num: int | None, local_worker_num: int | None
) -> tuple[HostEntry, ...]:
    """Return the hosts with their number of workers, where the list says none.

    It is `local_worker_num`, else an even share of what `worker_num` leaves, else 1, as with torchrun and mpirun.

    Args:
        worker_num: of the job, as the user gave it; None = not given.
        local_worker_num: the same for each host.

    Raises:
        UsageError: a number contradicts the list, or cannot be shared evenly.
    """
    silent = [entry for entry in entries if not entry.slots]
    if local_worker_num is not None:
        _check_local(entries, silent, local_worker_num)
        share = local_worker_num
    elif worker_num is not None and silent:
        share = _share(entries, silent, worker_num)
    else:
        share = 1
    found = tuple(
        entry if entry.slots else replace(entry, slots=share, device_ids=tuple(range(share))) for entry in entries
    )
    total = sum(entry.slots for entry in found)
    if worker_num is not None and worker_num != total:
        raise UsageError(
            f"--worker_num {worker_num}: the slots of {_hosts(found)} add up to {total}; make them equal, or leave "
            "--worker_num out"
        )
    return found


def _check_local(entries: Sequence[HostEntry], silent: Sequence[HostEntry], local_worker_num: int) -> None:
    if not 1 <= local_worker_num <= MAX_SLOTS:
        raise UsageError(f"--local_worker_num {local_worker_num}: must be 1 to {MAX_SLOTS} with several hosts")
    other = next((entry for entry in entries if entry.slots != local_worker_num), None)
    if not silent and other is not None:
        raise UsageError(
            f"--local_worker_num {local_worker_num}: {other.source} gives {other.name} {other.slots} slots; leave "
            "--local_worker_num out, it is for hosts without slots"
        )


def _share(entries: Sequence[HostEntry], silent: Sequence[HostEntry], worker_num: int) -> int:
    left = worker_num - sum(entry.slots for entry in entries)
    share, rest = divmod(left, len(silent))
    if rest or not 1 <= share <= MAX_SLOTS:
        raise UsageError(
            f"--worker_num {worker_num}: leaves {count_workers(left)} for {_hosts(silent)} without slots "
            f"({shorten(fold(entry.name for entry in silent))}), which cannot be shared evenly; give slots, e.g. "
            f"{silent[0].name}:8"
        )
    return share


def _hosts(entries: Sequence[HostEntry]) -> str:
    return f"{len(entries)} hosts" if len(entries) > 1 else entries[0].name
