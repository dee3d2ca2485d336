"""Network namespaces as hosts: veth pairs on one bridge, an address each. Needs root and iproute2."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

NETWORK = "10.77"
DEADLINE_S = 30.0
_made = 0


class HostNetError(Exception):
    """Namespaces cannot be made here; the message says why."""


def _ip(*words):
    _run(["ip", *words])


def _run(command, text=""):
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise HostNetError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _set_network(descriptor):
    libc = ctypes.CDLL(None, use_errno=True)
    new_net = 0x40000000  # CLONE_NEWNET
    if libc.setns(descriptor, new_net) != 0:
        raise HostNetError(f"setns: {os.strerror(ctypes.get_errno())}")


class HostNet:
    """`count` hosts, named by process and number; leaving the context takes all of them away.

    With `has_control` there is one host more, number `control`, from which a launcher drives the others.
    """

    def __init__(self, count, *, has_control=False):
        global _made
        _made += 1
        self._name = f"mg{os.getpid():x}{_made:x}"  # interface names have 15 letters at most
        self.count = count
        self.control = count
        self.has_ipv6 = True
        self._all = range(count + has_control)

    def __enter__(self):
        """Make them. Where that cannot be, the test that asks for them is skipped; what fails later fails it."""
        try:
            self._make()
        except HostNetError as error:
            pytest.skip(f"cannot make hosts: {error}")
        return self

    def _make(self):
        if shutil.which("ip") is None:
            raise HostNetError("there is no ip command; apt-get install iproute2")
        try:
            self._build()
        except BaseException:
            self._remove()
            raise

    def __exit__(self, _, __, ___):
        self._remove()

    def namespace(self, host):
        """Return the name of a host's namespace."""
        return f"{self._name}n{host}"

    def address(self, host):
        """Return a host's address; 9 is the last number of host 0, 10 of host 1: as text they come the other way."""
        return f"{NETWORK}.0.{9 + host}"

    def address6(self, host):
        """Return a host's IPv6 address; see `has_ipv6`."""
        return f"fd77::{9 + host:x}"

    def prefix(self, host):
        """Return the words that run a command on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def processes(self, *hosts):
        """Return the ids of all processes that run on these hosts."""
        spaces = (Path("/run/netns", self.namespace(host)) for host in hosts)
        wanted = {space.stat().st_ino for space in spaces if space.exists()}
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "ns" / "net").stat().st_ino in wanted:
                    found.append(int(entry.name))
            except OSError:  # it has ended
                continue
        return found

    @contextlib.contextmanager
    def inside(self, host):
        """Have this thread, and those that it starts, on a host's network until the context is left."""
        with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{self.namespace(host)}") as other:
            _set_network(other.fileno())
            try:
                yield
            finally:
                _set_network(own.fileno())

    def cut(self, host):
        """Take a host's cable out."""
        _ip("link", "set", self._port(host), "down")

    def mend(self, host):
        """Put a host's cable in again."""
        _ip("link", "set", self._port(host), "up")

    def limit(self, host, rate):
        """Let a host send no more than `rate`, such as 1mbit."""
        bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
        tc = shutil.which("tc") or "/usr/sbin/tc"
        _run([tc, "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root", *bucket])

    def _port(self, host):
        return f"{self._name}v{host}"

    def _build(self):
        bridge = f"{self._name}b"
        lines = [f"link add {bridge} type bridge", f"link set {bridge} up"]
        for host in self._all:
            space, port = self.namespace(host), self._port(host)
            lines.append(f"netns add {space}")
            lines.append(f"link add {port} type veth peer name eth0 netns {space}")
            lines.append(f"link set {port} master {bridge} up")
        _run(["ip", "-batch", "-"], "\n".join(lines))
        for host in self._all:
            lines = [f"address add {self.address(host)}/24 dev eth0", "link set eth0 up", "link set lo up"]
            _run(["ip", "-n", self.namespace(host), "-batch", "-"], "\n".join(lines))
            if self.has_ipv6:
                own = f"{self.address6(host)}/64"
                try:
                    _ip("-n", self.namespace(host), "address", "add", own, "dev", "eth0", "nodad")
                except HostNetError:
                    self.has_ipv6 = False

    def end_processes(self):
        """End what runs on the hosts, for their namespaces would live as long."""
        end = time.monotonic() + DEADLINE_S
        while left := self.processes(*self._all):
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > end:
                raise HostNetError(f"processes {left} cannot be ended")
            time.sleep(0.005)

    def _remove(self):
        """Remove what there is."""
        lines = [f"link del {self._name}b"]
        for host in self._all:
            lines += [f"link del {self._port(host)}", f"netns del {self.namespace(host)}"]
        command = ["ip", "-force", "-batch", "-"]
        subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, timeout=DEADLINE_S, check=False)


class TypedHosts:
    """Starts msrun on each host, all in one directory, as on a shared disk."""

    def __init__(self, runner, net, cwd):
        self.runner = runner
        self.net = net
        self.cwd = cwd

    def start(self, host, *words, node=-1, master=0, **env):
        """Start msrun on a host. `node`: its --node_rank, if it is given one, and where its logs will be."""
        numbered = [] if node < 0 else [f"--node_rank={node}"]
        log_dir = "log_output" if node <= 0 else f"log_output/node_{node}"
        place = [f"--master_addr={self.net.address(master)}", *numbered]
        return self.runner.start(*place, *words, cwd=self.cwd, prefix=self.net.prefix(host), log_dir=log_dir, env=env)

    def start_all(self, locals_, *words):
        """Start nodes 0, 1, ... with so many workers each."""
        size = f"--worker_num={sum(locals_)}"
        return [
            self.start(node, size, f"--local_worker_num={count}", *words, node=node)
            for node, count in enumerate(locals_)
        ]

    def run_all(self, locals_, *words):
        """Run them to their ends."""
        return [job.finish() for job in self.start_all(locals_, *words)]
