"""The plan of a job over many hosts, from what each has decided for itself: of a run, of --dry_run, and --check."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from msrun import contract
from msrun.agent.attempt import keep_logs
from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import Message
from msrun.cluster.protocol import Finding
from msrun.errors import ClusterError, MsrunError
from msrun.launch.console import say
from msrun.launch.directory.jobs import new_job_id
from msrun.launch.directory.log_directory import write_private
from msrun.launch.fleet.agents import ANSWER_S
from msrun.launch.fleet.hosts import ListedHosts
from msrun.launch.preflight.checks import CHECKS
from msrun.launch.preflight.finding import exit_code_of_findings, order_findings, render_fleet_findings
from msrun.launch.transport.opener import HostOpener
from msrun.launch.transport.pipe import agent_command
from msrun.planning.build import plan_job
from msrun.planning.hosts.assignment import assign_hosts
from msrun.planning.hosts.forwarded import forwarded_environment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.record_json import decode_record, encode_record
from msrun.planning.remote_plan import plan_agent
from msrun.planning.spec import LaunchSpec

PLANNED_JOB = "JOB"  # stands for the id that a run chooses, so that two plans of a job are the same
OF_LAUNCHER = frozenset({"log_dir", "disk"})  # what the launcher needs of its own host: room for all logs


class HostPlans:
    """What each host of a start has decided to run."""

    def __init__(
        self,
        spec: LaunchSpec,
        job_id: str,
        forwarded: Mapping[str, str],
        check: Callable[[int, HostPlan], None] = lambda _node, _host: None,
    ) -> None:
        """`forwarded`: variables that the hosts got from here; `check`: raises what speaks against a host's plan."""
        self._check = check
        self._spec, self._job_id, self._forwarded = spec, job_id, forwarded
        self.hosts: dict[int, HostPlan] = {}  # by node_rank
        self._notes: dict[int, list[str]] = {}
        self._target = ""

    def take(self, node_rank: int, message: Message) -> None:
        host = decode_record(HostPlan, message["host"])
        self._check(node_rank, host)
        self.hosts[node_rank] = host
        self._notes[node_rank] = [str(note) for note in message["notes"]]
        self._target = self._target or str(message["target"])

    @property
    def is_whole(self) -> bool:
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
    """Rename the logs and traces of an attempt after which the job goes on elsewhere, as far as they are there, and
    keep the plan that names its ranks.

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


# -- what a job would do, without starting it -------------------------------------------------------------------------


@contextlib.contextmanager
def _reached(spec: LaunchSpec, caller: Mapping[str, str], job_id: str, *, quiet: bool) -> Iterator[ListedHosts]:
    tell = partial(say, quiet=quiet)
    with (
        SignalPipe() as signals,
        ListedHosts(spec, caller, job_id, HostOpener(spec, job_id, tell), signals, None, tell) as hosts,
    ):
        yield hosts


def ask_for_plan(spec: LaunchSpec, caller: Mapping[str, str], *, quiet: bool) -> LaunchPlan:
    """Reach and check all hosts as a run does, and return the plan that it would carry out. Starts no worker.

    Raises:
        UsageError, ClusterError, RendezvousTimeout, Interrupted: as a run before it starts.
    """
    job_id = new_job_id()
    with _reached(spec, caller, job_id, quiet=quiet) as hosts:
        ready, agents, faults = hosts.run(spec, None), hosts.agents, list[MsrunError]()
        plans = HostPlans(spec, job_id, forwarded_environment(caller, spec.forward_env))
        for link, part in zip(agents.links, ready.parts(spec, job_id, spec.master_port), strict=True):
            link.send("plan", part=encode_record(part))
        agents.hear(
            lambda: plans.is_whole or bool(faults),
            {"planned": plans.take},
            deadline=time.monotonic() + ANSWER_S,
            on_loss=lambda _, error: faults.append(error),
        )
        silent = [link.entry.name for node, link in enumerate(agents.links) if node not in plans.hosts]
        if faults or silent:
            raise faults[0] if faults else ClusterError(f"{silent[0]}: no plan of its part within {ANSWER_S:g} s")
        for warning in ready.warnings:
            say(warning, quiet=quiet)
    plan = plans.assemble((ready.master[0], spec.master_port))
    return decode_record(LaunchPlan, json.loads(json.dumps(encode_record(plan)).replace(job_id, PLANNED_JOB)))


def check_fleet(spec: LaunchSpec, caller: Mapping[str, str], *, quiet: bool) -> tuple[int, list[str]]:
    """Return the exit status and the lines of `--check`; with `quiet` only what needs attention. Raises Interrupted."""
    with _reached(spec, caller, new_job_id(), quiet=quiet) as hosts:
        hosts.look(spec)
    findings = order_findings([*inspect_launcher(spec, caller), *hosts.findings])
    return exit_code_of_findings(findings), render_fleet_findings(findings, spec.host_entries, quiet=quiet)


def inspect_launcher(spec: LaunchSpec, caller: Mapping[str, str]) -> list[Finding]:
    """Return what was found on this host; writes nothing."""
    findings = []
    for check in CHECKS:
        if check.name in OF_LAUNCHER:
            try:
                found = check.look(spec, caller)
                findings.append(replace(found, text=f"here: {found.text}"))
            except MsrunError as error:
                findings.append(Finding("fail", check.name, f"here: {error}", exit_code=error.exit_code))
    return findings
