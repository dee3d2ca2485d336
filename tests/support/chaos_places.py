"""Where the jobs of chaos run: one host, or some, over SSH or rehearsed. What can be hit there, by one set of names."""

import contextlib
import os
from pathlib import Path

import psutil
from job_runner import latest_job, parent_of, wait_until

SIGNS = {"worker": "msrun: worker {}:", "scheduler": "msrun: scheduler", "fork server": "fork_server"}
"""In the command line of a process; {} is its rank."""


class Place:
    """The hosts of one round, which see `cwd` alike: here, agents on this machine stand for them."""

    lacks = ("connection", "cable")
    """What cannot be hit there."""
    moments = ("running",)
    """When a process can be hit."""
    patience_s = 10.0
    """How long what is left may take to go."""

    def __init__(self, rehearsals):
        self._rehearsals = rehearsals
        self.cwd = rehearsals.cwd

    def start(self, slots, *words):
        """Start a job; all hosts have as many workers as the first one."""
        return self._rehearsals.start(f"{len(slots)}x{slots[0]}", *words)

    def processes(self, host):
        """Return the processes of the job on a host, by its number in the list."""
        found = []
        for agent in self.agents(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [agent, *(child.pid for child in psutil.Process(agent).children(recursive=True))]
        return found

    def agents(self, host):
        return [self._rehearsals.agent(host)]

    def connections(self, host):
        """Return the processes that serve the connections to a host."""
        raise NotImplementedError("a rehearsal has none")

    def cut(self, host):
        """Take the cable of a host out."""
        raise NotImplementedError("a rehearsal has no cables")

    def mend(self, host):
        """Put it in again."""

    def prove_nothing_left(self, deadline_s=10.0):
        """Fail when a process or a folder of the job is anywhere after the deadline."""
        self._rehearsals.runner.prove_nothing_left(deadline_s)


class OneHost(Place):
    """This host alone, where the launcher is the agent as well."""

    lacks = ("agent", "connection", "cable")
    moments = ("start", "running", "teardown")
    patience_s = 0.0

    def __init__(self, runner, cwd):
        self._runner = runner
        self.cwd = cwd

    def start(self, slots, *words):
        self._job = self._runner.start(f"--worker_num={len(slots)}", *words, cwd=self.cwd)
        return self._job

    def agents(self, host):
        return [self._job.pid]

    def prove_nothing_left(self, deadline_s=10.0):
        if self._job.process.returncode < 0:
            wait_until(lambda: not self._runner.processes(), "processes gone", deadline_s)
            for folder in self._runner.temporary.glob("msrun-*"):
                events = latest_job(self._job.log_dir) / "events.jsonl"
                if not events.exists() or '"event": "ready"' not in events.read_text():  # else the fork server does it
                    (folder / "progress").unlink(missing_ok=True)
                    folder.rmdir()  # killed before anybody else knew of the folder: it held that file at most
        self._runner.prove_nothing_left(deadline_s)


class OverSsh(Place):
    """Hosts with an SSH server each, of which each has a disk of its own."""

    lacks = ()

    def __init__(self, fleet, log_dir):
        self._fleet = fleet
        self._log_dir = log_dir
        self.cwd = fleet.cwd

    def start(self, slots, *words):
        return self._fleet.start(slots, *words, log_dir=self._log_dir)

    def processes(self, host):
        return self._fleet.net.processes(host)

    def agents(self, host):
        return self._fleet.agents(host)

    def connections(self, host):
        return self._fleet.net.sessions(host)

    def cut(self, host):
        self._fleet.net.cut(host)

    def mend(self, host):
        self._fleet.net.mend(host)

    def prove_nothing_left(self, deadline_s=10.0):
        self._fleet.prove_nothing_left(deadline_s)


def find(place, target, host, job):
    """Return the processes of a host that go by a name: agent, worker, fork server, scheduler, connection, launcher."""
    if target == "launcher":
        return [job.pid]
    if target == "agent":
        return place.agents(host)
    if target == "connection":
        return place.connections(host)
    sign = SIGNS[target].format(host).encode()
    return leaders([pid for pid in place.processes(host) if sign in command_line(pid)])


def leaders(pids):
    """Return those of them that lead a session, and that no other of them has forked."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == pid and parent_of(pid) not in pids:
                found.append(pid)
    return found


def command_line(pid):
    """Return the words that a process goes by; empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
