"""One process that the fork server is asked to start: a worker, a server or the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msrun.planning.program import Program

SCHEDULER_ID = -1  # process id within the job of the scheduler; workers have their global rank
MINDSPORE_SCHEDULER_ID = -10
"""Process id within the job of MindSpore's own scheduler, which is started anew with the workers."""
FIRST_SERVER_ID = -11  # process id within the job of parameter server 0; that of server 1 is one less, and so on
_NAMES = {
    SCHEDULER_ID: "the scheduler",
    MINDSPORE_SCHEDULER_ID: "MindSpore's scheduler",
}


def server_index(process_id: int) -> int | None:
    """Return which parameter server a process id stands for; None when it is none."""
    return FIRST_SERVER_ID - process_id if process_id <= FIRST_SERVER_ID else None


@dataclass(frozen=True)
class ProcessSpec:
    """One process that the fork server is asked to start."""

    process_id: int  # global rank, or one of the ids above
    log_path: str  # existing file; stdout and stderr go to its end
    program: Program | None = None  # none for the scheduler
    use_exec: bool = False
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Set over the server's environment; None removes a name."""
    cpus: tuple[int, ...] = ()  # processors to run on; empty = as the server
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes to take memory from; empty = as the server
    error_log_path: str = ""  # existing file for stderr alone; empty = it goes where stdout goes
    terminal: str = ""
    """Path of the terminal that is its stdin, stdout and stderr, and its session's own; empty = it has none."""
    has_stdin: bool = False  # whether its stdin is the one that the fork server was given; else it is empty

    @property
    def name(self) -> str:
        index = server_index(self.process_id)
        return _NAMES.get(self.process_id, f"worker {self.process_id}" if index is None else f"server {index}")
