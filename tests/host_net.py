"""Network namespaces as hosts: veth pairs on one bridge, an address each. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

NETWORK = "10.77"
_made = 0


class HostNetError(Exception):
    """Namespaces cannot be made here; the message says why."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise HostNetError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")


class HostNet:
    """`count` hosts, named by process and number; leaving the context takes all of them away."""

    def __init__(self, count: int) -> None:
        global _made
        _made += 1
        self._name = f"mg{os.getpid():x}{_made:x}"  # interface names have 15 letters at most
        self.count = count
        self.has_ipv6 = True

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise HostNetError("there is no ip command; apt-get install iproute2")
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._remove()

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self._name}n{host}"

    def address(self, host: int) -> str:
        """Return a host's address; 9 is the last number of host 0, 10 of host 1: as text they come the other way."""
        return f"{NETWORK}.0.{9 + host}"

    def address6(self, host: int) -> str:
        """Return a host's IPv6 address; see `has_ipv6`."""
        return f"fd77::{9 + host:x}"

    def prefix(self, host: int) -> list[str]:
        """Return the words that run a command on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def cut(self, host: int) -> None:
        """Take a host's cable out."""
        _ip("link", "set", self._port(host), "down")

    def _port(self, host: int) -> str:
        return f"{self._name}v{host}"

    def _build(self) -> None:
        bridge = f"{self._name}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in range(self.count):
            space = self.namespace(host)
            _ip("netns", "add", space)
            _ip("link", "add", self._port(host), "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", self._port(host), "master", bridge, "up")
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            try:
                _ip("-n", space, "address", "add", f"{self.address6(host)}/64", "dev", "eth0", "nodad")
            except HostNetError:
                self.has_ipv6 = False
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        """Remove what there is; a namespace whose processes live on goes with the last of them."""
        for host in range(self.count):
            for words in (("link", "del", self._port(host)), ("netns", "del", self.namespace(host))):
                subprocess.run(["ip", *words], capture_output=True, timeout=20, check=False)
        subprocess.run(["ip", "link", "del", f"{self._name}b"], capture_output=True, timeout=20, check=False)
