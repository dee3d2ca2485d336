"""The world of a Slurm step: `srun python train.py`.

Source: the output environment variables of Slurm's srun page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msrun.runtime.joining.spec import WorldSpec, choose_meeting, parse_number

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
