"""Hosts with an OpenSSH server each: own address, host key, host name and, if wanted, own disk. Needs root and sshd."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from host_net import DEADLINE_S, HostNet, HostNetError

SSHD = "/usr/sbin/sshd"
SERVER_OPTIONS = {
    "AuthenticationMethods": "publickey",
    "KbdInteractiveAuthentication": "no",
    "LogLevel": "VERBOSE",
    "MaxStartups": "10:30:100",
    "PasswordAuthentication": "no",
    "PidFile": "none",
    "Port": "22",
    "PrintMotd": "no",
    "StrictModes": "no",
    "UsePAM": "no",
}
_BECOME_HOST = """
set -e
name=$1 hosts=$2 folders=$3
shift 3
hostname "$name"
mount --bind "$hosts" /etc/hosts
for file in ~/.bashrc ~/.zshenv; do test ! -e "$file" || mount --bind /dev/null "$file"; done  # this machine's own
while read -r folder; do test -z "$folder" || mount -t tmpfs -o mode=0755 none "$folder"; done <"$folders"
echo "host is made" >&2
exec setpriv --pdeathsig KILL -- "$@"
"""
_ENTER = 'cd "$1" && shift && exec "$@"'


def make_key(path):
    """Write a new private key and return the public one as `known_hosts` and `authorized_keys` have it."""
    key = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


class SshNet(HostNet):
    """Hosts `host0`, `host1`, ... that let root in with a key, and one host `control` without a server.

    What a client needs is in `client`: `id_ed25519`, `known_hosts` and a `config` that names both for all hosts; as
    `home`/.ssh it is found by itself by those who go by $HOME. The names are in /etc/hosts of every host.
    """

    def __init__(self, count, *, private=(), options=None, host_options=None, keys=0):
        """Set up nothing yet.

        Args:
            private: existing folders that are empty and its own on every host, `control` included.
            options: lines of sshd_config beside, or in place of, SERVER_OPTIONS.
            host_options: the same of single hosts.
            keys: so many further keys `other_0`, ... in `client`, which no server knows.
        """
        super().__init__(count, has_control=True)
        self._private = private
        self._options = {**SERVER_OPTIONS, **(options or {})}
        self._host_options = host_options or {}
        self._keys = keys
        self._holders = []

    def name(self, host):
        """Return a host's name."""
        return "control" if host == self.control else f"host{host}"

    def prefix(self, host):
        """Return the words that run a command on a host, in the directory that they are run in."""
        enter = f"exec nsenter --target {self._holders[host].pid} --net --mount --uts -- "
        return ["sh", "-c", f"""{enter} sh -c '{_ENTER}' sh "$(pwd)" "$@" """, "sh"]

    def path(self, host, path):
        """Return where this process finds a file of a host, in one of its own folders, too."""
        return Path(f"/proc/{self._holders[host].pid}/root{path}")

    def server(self, host):
        """Return the process id of the server that listens."""
        return self._holders[host].pid

    def sessions(self, host):
        """Return the ids of the server's processes that serve connections."""
        servers = []
        for pid in self.processes(host):
            try:
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd") and pid != self.server(host):
                    servers.append(pid)
            except OSError:
                continue
        return sorted(servers)

    def server_log(self, host):
        """Return what a server has said."""
        return (self.folder / f"{self.name(host)}.log").read_text(errors="backslashreplace")

    def _build(self):
        if not Path(SSHD).exists():
            raise HostNetError("there is no sshd; apt-get install openssh-server")
        super()._build()
        self.folder = Path(tempfile.mkdtemp(prefix="ssh-", dir="/tmp"))
        self.folder.chmod(0o711)  # sshd reads authorized_keys as the user who logs in
        self.home = self.folder / "home"
        self.client = self.home / ".ssh"
        self.client.mkdir(parents=True, mode=0o700)
        (self.folder / "there").mkdir(mode=0o700)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # without it no server starts
        self._write_files()
        for host in self._all:
            self._holders.append(self._start(host))
        self._wait_until_made()

    def _write_files(self):
        (self.folder / "authorized_keys").write_text(make_key(self.client / "id_ed25519") + "\n")
        for number in range(self._keys):
            make_key(self.client / f"other_{number}")
        (self.folder / "private").write_text("".join(f"{folder}\n" for folder in self._private))
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {self.name(host)}" for host in self._all for address in self._addresses(host)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        known, config = [], []
        for host in range(self.count):
            public = make_key(self.folder / f"host_key_{host}")
            if host == 0 and self._has_penalties():
                self._options["PerSourcePenalties"] = "no"
            known.append(f"{','.join([self.name(host), *self._addresses(host)])} {public}")
            config.append(f"Host {self.name(host)}\n    HostName {self.address(host)}")
            self._write_server_config(host)
        config.append(
            f"Host *\n    User root\n    IdentityFile {self.client}/id_ed25519\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {self.client}/known_hosts"
        )
        (self.client / "known_hosts").write_text("\n".join(known) + "\n")
        (self.client / "config").write_text("\n".join(config) + "\n")

    def _addresses(self, host):
        return [self.address(host), *([self.address6(host)] if self.has_ipv6 else [])]

    def _has_penalties(self):
        """Tell whether the server is one (from 9.8 on) that shuts out whoever has come too often in vain."""
        command = [SSHD, "-t", "-f", "/dev/null", "-h", f"{self.folder}/host_key_0", "-o", "PerSourcePenalties=no"]
        return subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0

    def _write_server_config(self, host):
        options = {**self._options, **self._host_options.get(host, {})}
        lines = [f"{name} {value}" for name, value in options.items()]
        lines += [f"HostKey {self.folder}/host_key_{host}", f"AuthorizedKeysFile {self.folder}/authorized_keys"]
        lines.append(f"SetEnv HOME={self.folder}/there")  # not this machine's shell profile, which may take its time
        path = self.folder / f"sshd_config_{host}"
        path.write_text("\n".join(lines) + "\n")

    def _start(self, host):
        server = [SSHD, "-D", "-e", "-f", f"{self.folder}/sshd_config_{host}"]
        words = [self.name(host), f"{self.folder}/hosts", f"{self.folder}/private"]
        words += ["sleep", "infinity"] if host == self.control else server
        with (self.folder / f"{self.name(host)}.log").open("wb") as log:
            return subprocess.Popen(
                [*super().prefix(host), "unshare", "--uts", "sh", "-c", _BECOME_HOST, "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C ends the test first
            )

    def _wait_until_made(self):
        end = time.monotonic() + DEADLINE_S
        for host, holder in enumerate(self._holders):
            sign = "host is made" if host == self.control else "Server listening on"
            while sign not in self.server_log(host):
                if holder.poll() is not None or time.monotonic() > end:
                    raise HostNetError(f"{self.name(host)}: {self.server_log(host).strip() or 'does not come up'}")
                time.sleep(0.005)

    def _remove(self):
        try:
            self.end_processes()
            for holder in self._holders:
                holder.wait(DEADLINE_S)
        finally:
            self._holders.clear()
            super()._remove()
            if hasattr(self, "folder"):
                shutil.rmtree(self.folder, ignore_errors=True)
