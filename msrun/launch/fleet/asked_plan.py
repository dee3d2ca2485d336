"""The plan of a job over many hosts before it starts: each host is asked what it would run, as in a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping

from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import Message
from msrun.errors import ClusterError, MsrunError
from msrun.launch.console import say
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_plan import assemble_plan
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.fleet.preparation import ANSWER_S, Preparation, ReadyHosts, error_of
from msrun.launch.job import new_job_id
from msrun.planning.hosts.forwarded import forwarded_environment
from msrun.planning.plan import HostPlan, LaunchPlan
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
        preparation = Preparation(spec, caller, job_id, opener, signals, None, None, tell)
        agents = stack.enter_context(preparation)
        ready = preparation.run()
        hosts, notes, target = _ask(spec, agents, ready)
        for warning in ready.warnings:
            tell(warning)
    forwarded = forwarded_environment(caller, spec.forward_env)
    master = (ready.master[0], spec.master_port)
    plan = assemble_plan(spec, job_id, master, hosts, notes, target, forwarded)
    return decode_record(LaunchPlan, json.loads(json.dumps(encode_record(plan)).replace(job_id, PLANNED_JOB)))


def _ask(spec: LaunchSpec, agents: Agents, ready: ReadyHosts) -> tuple[dict[int, HostPlan], dict[int, list[str]], str]:
    """Return what each host would run, what is to be known of that, and the device target."""
    hosts: dict[int, HostPlan] = {}
    notes: dict[int, list[str]] = {}
    targets: list[str] = []
    faults: list[MsrunError] = []

    def take(node: int, message: Message) -> None:
        hosts[node] = decode_record(HostPlan, message["host"])
        notes[node] = [str(note) for note in message["notes"]]
        targets.append(str(message["target"]))

    same = ready.told(spec, spec.master_port)
    for link in agents.links:
        link.send("plan", **same, use_shared=link.node_rank in ready.shared)
    handlers = {
        "planned": take,
        **dict.fromkeys(("error", "fault"), lambda _, message: faults.append(error_of(message))),
        "lost": lambda node, message: faults.append(ready.explain_loss(node, message)),
    }
    agents.hear(lambda: len(hosts) == len(agents.links) or bool(faults), handlers, deadline=time.monotonic() + ANSWER_S)
    silent = [link.entry.name for link in agents.links if link.node_rank not in hosts]
    if faults or silent:
        raise faults[0] if faults else ClusterError(f"{silent[0]}: no plan of its part within {ANSWER_S:g} s")
    return hosts, notes, targets[0]
