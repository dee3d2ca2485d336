"""A network link of limited rate between two ranks of this host: two network namespaces joined by a veth pair.

Needs root, `ip` and `tc` (Debian: `apt-get install iproute2`). Each direction has its own token bucket filter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launch import DEADLINE_S

PORT = 29400
LATENCY_MS = 50
"""How long a packet may wait in the filter: deep enough that it shapes and does not drop."""
BURST_KB = 64
FRAME_BYTES = 9000
"""Jumbo frames, as networks of accelerators have. The filter cuts what is sent into frames one by one; with 1500 bytes
that took half of both processors here, which a real network card would not."""


def why_no_link() -> str:
    """Return why this machine cannot have such a link; empty when it can."""
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install iproute2"
    return "" if os.geteuid() == 0 else "network namespaces need root"


@contextlib.contextmanager
def limited_link(mbit_per_s: int) -> Iterator[list[str]]:
    """Make two namespaces with a veth pair of this rate; yield their names; take them away afterwards."""
    names = [f"msrun-{os.getpid()}-{end}" for end in range(2)]
    made = []
    try:
        for name in names:
            _call("ip", "netns", "add", name)
            made.append(name)
        _call(
            "ip", "link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1]
        )
        for end, name in enumerate(names):
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"10.77.0.{end + 1}/24", "dev", "veth0")
            _call(*inside, "link", "set", "lo", "up")
            _call(*inside, "link", "set", "veth0", "mtu", str(FRAME_BYTES), "up")
            limit = ("rate", f"{mbit_per_s}mbit", "burst", f"{BURST_KB}kb", "latency", f"{LATENCY_MS}ms")
            _call("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf", *limit)
        yield names
    finally:
        for name in made:
            _call("ip", "netns", "del", name)


def run_ranks(names: Sequence[str], argv: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
    """Run one rank in each namespace, on processors of its own, with torchrun's variables, to the good end of both.

    Raises:
        SystemExit: a rank failed; the other one is ended.
    """
    processes = []
    available = sorted(os.sched_getaffinity(0))
    processors = [",".join(map(str, available[rank :: len(names)])) or str(available[0]) for rank in range(len(names))]
    try:
        for rank, name in enumerate(names):
            own = {
                **env,
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(names)),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "veth0",
            }
            with (folder / f"rank_{rank}.log").open("wb") as log:
                command = ["ip", "netns", "exec", name, "taskset", "-c", processors[rank], *argv]
                processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log))
        for rank, process in enumerate(processes):
            if process.wait(DEADLINE_S) != 0:
                said = (folder / f"rank_{rank}.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"rank {rank} ended with {process.returncode}:\n{said}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} failed: {done.stderr.decode().strip()}")
