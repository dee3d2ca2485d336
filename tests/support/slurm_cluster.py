"""A cluster of Slurm: slurmctld, and one slurmd on each host of a network, with a configuration of its own.

Every daemon believes to be on a machine of its own, with a name: see pod_container.py. Needs root; from Debian's
packages slurm-wlm and munge.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from job_runner import wait_until

CONTAINER = Path(__file__).with_name("pod_container.py")
COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "munged")
DEADLINE_S = 100.0
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
CONFIG = """\
ClusterName=tests
SlurmctldHost={first}({address})
SlurmUser=root
AuthInfo=socket={short}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={short}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
MpiDefault=none
"""


class SlurmCluster:
    """Nodes of these names on the first hosts of a network; leaving the context ends all daemons."""

    def __init__(self, net, names, folder):
        missing = [name for name in COMMANDS if shutil.which(name, path=PATH) is None]
        if missing:
            pytest.skip(f"no slurm: {', '.join(missing)}; apt-get install slurm-wlm munge")
        self.names = names
        self._net, self._folder = net, folder
        self._daemons = []
        self._short = Path(tempfile.mkdtemp(prefix="slurm_"))  # for sockets, whose paths have at most 107 bytes

    def __enter__(self):
        """Start it, and wait until all nodes are idle."""
        try:
            self._write_files()
            self._start_munge()
            self._daemons.append(self._popen(0, ["slurmctld", "-D"]))
            self._daemons += [self._popen(host, ["slurmd", "-D"]) for host in range(len(self.names))]
            idle = [f"{name} idle" for name in self.names]
            wait_until(
                lambda: self._run(["sinfo", "-hNo", "%N %T"]).splitlines() == idle,
                "all nodes of Slurm are idle",
                DEADLINE_S,
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, _, __, ___):
        """End the daemons, and what a job has left on the hosts."""
        self._net.end_processes()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self._short)

    def run_batch(self, script, log, env):
        """Have Slurm run a batch script in its own directory, and return the exit status of the job."""
        return self.finish_batch(self.start_batch(script, log, env))

    def start_batch(self, script, log, env):
        """Submit a batch script and return the id of the job."""
        return self._run(["sbatch", "--parsable", f"--output={log}", str(script)], script.parent, env).strip()

    def warn(self, job):
        """Send the batch script the signal that Slurm sends before the deadline (--signal=B:USR1@S)."""
        self._run(["scancel", "--batch", "--signal=USR1", job])

    def finish_batch(self, job, *, is_requeued=False):
        """Wait for the end of a batch script, not for what Slurm does on its nodes after it; return its exit status."""

        def status():
            told = dict(word.partition("=")[::2] for word in self._run(["scontrol", "show", "-o", "job", job]).split())
            if is_requeued and (told["Restarts"] == "0" or told["JobState"] == "COMPLETING"):
                return None
            if is_requeued and told.get("Reason") == "BeginTime":  # by itself it waits two minutes
                self._run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
            return None if told["JobState"] in ("PENDING", "RUNNING") else told["ExitCode"]

        return int(wait_until(status, f"job {job} of Slurm has ended", DEADLINE_S).partition(":")[0])

    def _run(self, words, directory=None, env=None):
        """Run a command of Slurm on the first node, to its end."""
        with self._popen(0, words, directory or self._folder, env) as process:
            out, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, (words, errors)
        return out.decode()

    def _write_files(self):
        nodes = [
            f"NodeName={name} NodeAddr={self._net.address(host)} CPUs=2 RealMemory=1024\n"
            for host, name in enumerate(self.names)
        ]
        config = CONFIG.format(
            first=self.names[0], address=self._net.address(0), folder=self._folder, short=self._short
        )
        partition = f"PartitionName=all Nodes={','.join(self.names)} Default=YES State=UP\n"
        (self._folder / "slurm.conf").write_text("".join([config, *nodes, partition]))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not looked for, and not used
        for folder in (self._folder / "state", *(self._short / name for name in self.names)):
            folder.mkdir()
        hosts = [f"{self._net.address(host)} {name}\n" for host, name in enumerate(self.names)]
        (self._folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
        for host in range(len(self.names)):
            (self._folder / f"root_{host}").mkdir()

    def _start_munge(self):
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        files = {name: self._folder / f"munge.{name[:-5]}" for name in ("pid-file", "log-file", "seed-file")}
        words = [f"--{name}={path}" for name, path in files.items()]
        socket = self._short / "munge.socket"
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *words]
        null = subprocess.DEVNULL
        self._daemons.append(subprocess.Popen(command, env={"PATH": PATH}, stdout=null, stderr=null))
        wait_until(socket.exists, "munged listens", DEADLINE_S)

    def _popen(self, host, words, directory=None, env=None):
        spec = {
            "host_name": self.names[host],
            "root": str(self._folder / f"root_{host}"),
            "mounts": {"/etc/hosts": str(self._folder / "hosts")},
            "working_directory": str(directory or self._folder),
            "words": list(words),
            "env": {"PATH": PATH, **(env or {}), "SLURM_CONF": str(self._folder / "slurm.conf")},
        }
        path = self._folder / f"spec_{time.monotonic_ns()}.json"
        path.write_text(json.dumps(spec))
        command = [*self._net.prefix(host), sys.executable, str(CONTAINER), str(path)]
        output = subprocess.DEVNULL if directory is None else subprocess.PIPE
        return subprocess.Popen(command, stdout=output, stderr=output)
