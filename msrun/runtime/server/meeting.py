"""How workers find the parameter servers of their job: each writes its address into a store.

On one host that is a file beside the workers' own, of several hosts the store in which the workers meet, too; in a job
that was started by hand the scheduler's.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.meet import STORE, connect_store

FILE = "file://"
FIND_S = 60.0
"""How long the servers may take to start; they start with the workers."""


def _open_store() -> Store:
    place = os.environ[contract.MSRUN_RENDEZVOUS]
    if place.startswith(FILE):
        store: Store = FileStore(f"{place.removeprefix(FILE)}.servers")
    elif place.startswith(STORE):
        address, _, port = place.removeprefix(STORE).rpartition(":")
        store = connect_store(address.strip("[]"), int(port))
    else:
        store = connect_store(os.environ[contract.MASTER_ADDR], int(os.environ[contract.MASTER_PORT]))
    attempt = os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, "0")
    return PrefixStore(f"servers of attempt {attempt}", store)


def publish(index: int, address: str, port: int) -> None:
    """Write down where a server listens."""
    _open_store().set(str(index), f"{address} {port}")


def find_addresses(servers: int) -> list[tuple[str, int]]:
    """Return address and port of every server, when all have started.

    Raises:
        WorldError: one did not start in time.
    """
    store = _open_store()
    names = [str(index) for index in range(servers)]
    try:
        store.wait(names, timedelta(seconds=FIND_S))
    except RuntimeError:
        raise WorldError(
            f"the {servers} parameter servers have not started within {FIND_S:g} s: see {contract.server_name(0)}.log "
            "and the others in the log directory"
        ) from None
    found = [store.get(name).decode().rpartition(" ") for name in names]
    return [(address, int(port)) for address, _, port in found]
