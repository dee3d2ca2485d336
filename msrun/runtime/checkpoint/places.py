"""Where a save goes: ranks that give one path on one file system write together, others for themselves."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msrun.runtime.agreement import attempt, attempt_all, gather
from msrun.runtime.world import get_rank

VISIBLE_WITHIN_S = 10.0
"""How long a file that another host made may take to appear."""

_shared: dict[tuple[str, tuple[str, ...]], bool] = {}
"""(folder, hosts) -> whether they see the same files in it; looked at once"""


@dataclass(frozen=True)
class Place:
    """One path, and the ranks to which it is the same."""

    path: Path
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that does what is done once."""
        return self.ranks[0]


def find_places(path: str | os.PathLike[str]) -> list[Place]:
    """Return where all ranks' paths lead, the lowest rank's first. All ranks call it together."""
    own = Path(path).absolute()
    asked = gather((str(own), host()))
    together: dict[str, dict[str, list[int]]] = {}
    for rank, (text, its_host) in enumerate(asked):
        together.setdefault(text, {}).setdefault(its_host, []).append(rank)
    found = []
    for text, hosts in together.items():
        if len(hosts) == 1 or _is_shared(Path(text).parent, hosts):
            found.append(Place(Path(text), tuple(sorted(rank for ranks in hosts.values() for rank in ranks))))
        else:
            found += [Place(Path(text), tuple(ranks)) for ranks in hosts.values()]
    return sorted(found, key=lambda place: place.leader)


def own_place(places: Sequence[Place], rank: int) -> int:
    """Return the index of a rank's place."""
    return next(index for index, place in enumerate(places) if rank in place.ranks)


def host() -> str:
    """Return what processes have in common that see the same files: the host, and the container on it."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/mnt').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _is_shared(folder: Path, hosts: dict[str, list[int]]) -> bool:
    """Return whether all these hosts have one folder under its name. All ranks of the world call it together."""
    key = (str(folder), tuple(sorted(hosts)))
    if key not in _shared:
        lookers = [min(ranks) for ranks in hosts.values()]
        first = min(lookers)
        name = gather(f".msrun-{uuid.uuid4().hex}")[first]

        def make() -> None:
            if get_rank() == first:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()

        def see() -> bool:
            return get_rank() not in lookers or _appears(folder / name)

        try:
            attempt(make)
            _shared[key] = all(attempt_all(see))
        finally:
            if get_rank() == first:
                (folder / name).unlink(missing_ok=True)
    return _shared[key]


def _appears(path: Path) -> bool:
    end = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
