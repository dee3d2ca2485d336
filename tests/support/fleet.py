"""Jobs on many hosts, started by one msrun over real SSH; network namespaces stand in for the hosts."""

import tempfile
from pathlib import Path

from job_runner import MARK, wait_until


class FleetRunner:
    """Starts msrun on the host `control`, which has no server; all hosts see the directory of the test."""

    def __init__(self, runner, net, cwd):
        self.runner = runner
        self.net = net
        self.cwd = cwd

    def hosts(self, *slots):
        """Return a host list: so many workers on host0, host1, ..."""
        return ",".join(f"{self.net.name(host)}:{count}" for host, count in enumerate(slots))

    def start(self, hosts, *words, log_dir="log_output", **env):
        """Start a job; `log_dir`, on a disk of `control` too, is where msrun is told to put its logs.

        `hosts`: empty where another option names them.
        """
        listed = hosts if isinstance(hosts, str) else self.hosts(*hosts)
        at = self.net.path(self.net.control, Path(log_dir)) if Path(log_dir).is_absolute() else log_dir
        return self.runner.start(
            *([f"--hosts={listed}"] if listed else []),
            f"--forward_env={MARK}",
            f"--log_dir={log_dir}",
            *words,
            cwd=self.cwd,
            prefix=self.net.prefix(self.net.control),
            log_dir=str(at),
            env={"HOME": str(self.net.home), **env},
        )

    def run(self, hosts, *words, log_dir="log_output", **env):
        """Run a job to its end; nothing of it may be left on any host."""
        finished = self.start(hosts, *words, log_dir=log_dir, **env).finish()
        self.prove_nothing_left()
        return finished

    def prove_nothing_left(self, deadline_s=10.0):
        """Fail when a process or a folder of a job is on any host after the deadline."""
        self.runner.prove_nothing_left(deadline_s)
        wait_until(lambda: not self.agents(), "agents gone", 10.0)
        wait_until(lambda: not self.spools(), f"spools gone: {self.spools()}", 10.0)

    def spools(self):
        """Return the folders that agents of this runner's jobs have on their hosts."""
        ids = set(self.runner.job_ids())
        found = Path(tempfile.gettempdir()).glob("msrun-spool-*")
        return [path.name for path in found if path.name.split("-")[2] in ids]

    def agents(self, *hosts):
        """Return the process ids of agents on these hosts, or on all."""
        found = []
        for pid in self.net.processes(*(hosts or range(self.net.count))):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if len(words) > 2 and words[1] == b"-c" and b"hashlib" in words[2]:
                found.append(pid)
        return found
