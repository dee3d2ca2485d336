"""What a job over many hosts would do, without starting it: each host is asked (--dry_run), or looked at (--check)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace

from msrun.agent.signals import SignalPipe
from msrun.cluster.protocol import Finding
from msrun.errors import ClusterError, MsrunError
from msrun.launch.console import say
from msrun.launch.directory.jobs import new_job_id
from msrun.launch.fleet.agents import ANSWER_S, Agents
from msrun.launch.fleet.fleet_plan import HostPlans
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.fleet.preparation import Preparation, ReadyHosts
from msrun.launch.preflight.checks import inspect_host
from msrun.launch.preflight.fleet_checks import exit_code_of_findings, order_findings, render_fleet_findings
from msrun.planning.hosts.forwarded import forwarded_environment
from msrun.planning.plan import LaunchPlan
from msrun.planning.record_json import decode_record, encode_record
from msrun.planning.spec import LaunchSpec

PLANNED_JOB = "JOB"
"""Stands for the id that a run chooses, so that two plans of a job are the same."""


def ask_for_plan(spec: LaunchSpec, caller: Mapping[str, str], *, quiet: bool) -> LaunchPlan:
    """Reach and check all hosts as a run does, and return the plan that it would carry out. Starts no worker.

    Raises:
        UsageError, ClusterError, RendezvousTimeout, Interrupted: as a run before it starts.
    """
    job_id = new_job_id()

    def tell(text: str) -> None:
        say(text, quiet=quiet)

    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalPipe())
        opener = HostOpener(spec, job_id, tell)
        preparation = Preparation(spec, caller, job_id, opener, signals, None, tell)
        agents = stack.enter_context(preparation)
        ready = preparation.run(spec, None)
        plans = HostPlans(spec, job_id, forwarded_environment(caller, spec.forward_env))
        _ask(spec, job_id, agents, ready, plans)
        for warning in ready.warnings:
            tell(warning)
    plan = plans.assemble((ready.master[0], spec.master_port))
    return decode_record(LaunchPlan, json.loads(json.dumps(encode_record(plan)).replace(job_id, PLANNED_JOB)))


def _ask(spec: LaunchSpec, job_id: str, agents: Agents, ready: ReadyHosts, plans: HostPlans) -> None:
    """Have each host say what it would run."""
    faults: list[MsrunError] = []
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


OF_LAUNCHER = frozenset({"log_dir", "disk"})
"""What the launcher needs of its own host: room for all logs."""


def check_fleet(spec: LaunchSpec, caller: Mapping[str, str], *, quiet: bool) -> tuple[int, list[str]]:
    """Return the exit status and the lines of `--check`; with `quiet` only what needs attention.

    Raises:
        Interrupted: a signal came.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalPipe())
        job_id = new_job_id()
        opener = HostOpener(spec, job_id, lambda text: say(text, quiet=quiet))
        preparation = Preparation(spec, caller, job_id, opener, signals, None, lambda text: say(text, quiet=quiet))
        stack.enter_context(preparation)
        preparation.look(spec)
    findings = order_findings([*inspect_launcher(spec, caller), *preparation.findings])
    return exit_code_of_findings(findings), render_fleet_findings(findings, spec.host_entries, quiet=quiet)


def inspect_launcher(spec: LaunchSpec, caller: Mapping[str, str]) -> list[Finding]:
    """Return what was found on this host; writes nothing."""
    return [replace(found, text=f"here: {found.text}") for found in inspect_host(spec, caller, OF_LAUNCHER)]
