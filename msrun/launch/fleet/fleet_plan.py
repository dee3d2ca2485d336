"""The plan of a job over many hosts: put together from what each host has decided for itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msrun import contract
from msrun.agent.attempt import keep_logs
from msrun.cluster.messages import Message
from msrun.errors import ClusterError
from msrun.launch.directory.log_directory import write_private
from msrun.launch.transport.pipe import agent_command
from msrun.planning.build import plan_agent, plan_job
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import assign_hosts
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.record_json import decode_record
from msrun.planning.spec import LaunchSpec


def spec_of_host(spec: LaunchSpec, assignment: HostAssignment) -> LaunchSpec:
    """Return what is asked of one host; master, log directory and the other hosts come when the job starts."""
    entry = spec.host_entries[assignment.node_rank]
    return replace(
        spec,
        host_entries=(),
        stands_for=entry if entry.is_rehearsed else None,
        table_hosts=(assignment,),
        local_worker_num=len(assignment.ranks),
        node_rank=assignment.node_rank if len(spec.host_entries) > 1 else -1,
        token="",
        tls=None,
        rank_table_file=None,
        settings=(),
        tail_ranks=(),
    )


def ranks_of_hosts(spec: LaunchSpec) -> dict[int, tuple[int, ...]]:
    """Return the global ranks of each node rank."""
    return {assignment.node_rank: assignment.ranks for assignment in assign_hosts(spec.host_entries, spec.table_hosts)}


class HostPlans:
    """What each host of a start has decided to run."""

    def __init__(
        self,
        spec: LaunchSpec,
        job_id: str,
        forwarded: Mapping[str, str],
        check: Callable[[int, HostPlan], None] = lambda _node, _host: None,
    ) -> None:
        """
        Args:
            forwarded: variables that the hosts got from here.
            check: called with each host's plan before it counts; raises what speaks against it.
        """
        self._check = check
        self._spec, self._job_id, self._forwarded = spec, job_id, forwarded
        self.hosts: dict[int, HostPlan] = {}
        """By node_rank."""
        self._notes: dict[int, list[str]] = {}
        self._target = ""

    def take(self, node_rank: int, message: Message) -> None:
        """Take the `planned` of a host."""
        host = decode_record(HostPlan, message["host"])
        self._check(node_rank, host)
        self.hosts[node_rank] = host
        self._notes[node_rank] = [str(note) for note in message["notes"]]
        self._target = self._target or str(message["target"])

    @property
    def is_whole(self) -> bool:
        """Whether all hosts have said it."""
        return len(self.hosts) == len(self._spec.host_entries)

    def assemble(self, master: tuple[str, int]) -> LaunchPlan:
        """Return the plan of the whole job as this launcher shows it: every log by its name here."""
        spec, hosts = self._spec, self.hosts
        entries, job_id = spec.host_entries, self._job_id
        fleet = tuple(
            replace(assignment, name=hosts[assignment.node_rank].name, address=hosts[assignment.node_rank].address)
            for assignment in assign_hosts(entries, spec.table_hosts)
            if assignment.node_rank in hosts
        )
        return plan_job(
            spec,
            [_at_home(hosts[node], entries[node], spec.log_dir) for node in sorted(hosts)],
            job_id=job_id,
            run_dir=str(Path(tempfile.gettempdir(), f"msrun-{job_id}{f'-{spec.node_rank}' if spec.is_joined else ''}")),
            master=master,
            target=(self._target, f"as found on {hosts[0].name}" if 0 in hosts else ""),
            notes=_merge_notes(self._notes, entries),
            fleet=fleet if len(entries) > 1 else (),
            forwarded=self._forwarded,
        )


def _at_home(host: HostPlan, entry: HostEntry, log_dir: Path) -> HostPlan:
    if entry.has_come:  # its logs stay there
        return host
    workers = tuple(
        replace(
            worker,
            log_path=str(log_dir / Path(worker.log_path).name),
            error_log_path=worker.error_log_path and str(log_dir / Path(worker.error_log_path).name),
        )
        for worker in host.workers
    )
    servers = tuple(replace(server, log_path=str(log_dir / Path(server.log_path).name)) for server in host.servers)
    place = host.place or f"{entry.name} ({host.name})"
    return replace(host, workers=workers, servers=servers, place=place, agent=plan_agent(entry, agent_command))


def _merge_notes(notes: Mapping[int, Sequence[str]], entries: Sequence[HostEntry]) -> tuple[str, ...]:
    said: dict[str, list[str]] = {}
    for node_rank, texts in sorted(notes.items()):
        for text in texts:
            said.setdefault(text, []).append(entries[node_rank].name)
    return tuple(
        text if len(names) == len(entries) else f"{names[0]}{' and others' if len(names) > 1 else ''}: {text}"
        for text, names in said.items()
    )


def keep_attempt(log_dir: Path, attempt: int, plan: LaunchPlan | None, names: Iterable[str]) -> None:
    """Rename the files of an attempt after which the job goes on elsewhere, and keep the plan that names its ranks.

    Args:
        names: logs and traces of that attempt; those that are not there are passed over.

    Raises:
        ClusterError: one cannot be renamed, or the plan cannot be written.
    """
    kept = log_dir / contract.attempt_plan_name(attempt)
    try:
        if plan is not None:
            write_private(kept, json.dumps(plan.to_json(), indent=2) + "\n")
    except OSError as error:
        raise ClusterError(f"cannot start again: cannot write {kept} ({error.strerror})") from None
    keep_logs([str(log_dir / name) for name in names if (log_dir / name).exists()], attempt)
