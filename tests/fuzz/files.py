"""Files that somebody else may have written: each is read, or refused in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from fuzz.mutation import change_bytes, change_text, change_value, encode_any
from msrun.cli.options import SETTABLE
from msrun.errors import UsageError
from msrun.launch.job_hosts import read_host_list, read_table_hosts
from msrun.launch.rank_table_file import check_rank_table
from msrun.launch.transport.ssh import address_of, explain_end
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.settings import parse_config
from msrun.planning.tls_spec import parse_tls_config
from ranktable.errors import HostListError
from ranktable.hosts.host_list import parse_hosts
from ranktable.hosts.hostfile import parse_hostfile

SSH_LOG = """\
OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.19 27 Jan 2026
debug1: Executing proxy command: exec ssh -v -W '[10.77.0.9]:9' host1
debug1: Connecting to 10.77.0.10 [10.77.0.10] port 22.
debug1: Connection established.
debug1: Remote protocol version 2.0, remote software version OpenSSH_9.2p1
debug1: Authenticating to 10.77.0.10:22 as 'root'
debug1: Server host key: ssh-ed25519 SHA256:b1DTKwcV7uIDB8BILjt1CO4ZZ02x91/6rqn+EvUw4EE
Offending ED25519 key in /home/me/.ssh/known_hosts:1
  ssh-keygen -f "/home/me/.ssh/known_hosts" -R "10.77.0.9"
debug1: Offering public key: /home/me/.ssh/id_ed25519 ED25519 SHA256:d0+XPH8n6SWadLbpw9bfPWnjNks3GEo0uryUlJnQN1M agent
debug1: Server accepts key: /home/me/.ssh/id_ed25519 ED25519 SHA256:d0+XPH8n6SWadLbpw9bfPWnjNks3GEo0uryUlJnQN1M
Authenticated to 10.77.0.10 ([10.77.0.10]:22) using "publickey".
channel 0: open failed: connect failed: Connection refused
stdio forwarding failed
kex_exchange_identification: Connection closed by remote host
"""
SSH_WORDS = (
    *("debug1: ", "Permission denied (publickey,password)", "Host key verification failed.", "Too many authentication"),
    *(
        "ssh: connect to host h port 9: Connection refused",
        "Connection closed by UNKNOWN port 65535",
        "banner line 0: x",
    ),
    *(
        "ssh: Could not resolve hostname gone: Name or service not known",
        "exec request failed on channel 0",
        "\r",
        "[]",
    ),
    *(
        "no matching cipher found. Their offer: a,b",
        "revoked by file /x",
        "No X host key is known for h and",
        "via proxy",
    ),
)
HOSTFILE = """\
# hosts
node[01-04]   slots=8 python=/opt/py/bin/python address=10.0.0.[1-4]
me@gate:4     port=2222
h9 slots=2 devices=4,6
fd77::9  slots=1
[fd77::8]:8
"""
HOST_WORDS = (
    *("node[1-3]", "[1-99999999]", "[1-", "a[b]c", "slots=0", "slots=-1", "slots=9" * 9, "me@", "@h", "port=0", "x=y"),
    *("devices=1-", "devices=0-3", "address=10.0.0.[1-2]", "python=rel", "'", '"a b"', "h" * 300, "::", "fd77::1%eth0"),
)
CONFIG = """\
version: 1
worker_num: 8
hosts: [h1, h2]
env: {NAME: value, OTHER: "1"}
bind_core: {cpu0: [0-3]}
log_dir: &a logs
tail_worker_log: all
script: train.py
args: [--lr, 0.1]
"""
CONFIG_WORDS = (
    *(
        "*a",
        "&b",
        "<<: *a",
        "!!python/object:os.system",
        "null",
        "1e3",
        "010",
        "~",
        "- x",
        "{",
        "}",
        "[a, b",
        "? x",
        "|",
    ),
    *(">", "'", "---", "%TAG", "config: x", "args:", "true", "{a: {b: {c: d}}}", "? [x]\n: y"),
)
TABLE = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": f"10.0.0.{node}",
            "device": [
                {"device_id": str(i), "device_ip": f"192.1.{node}.{i}", "rank_id": str(2 * node + i)} for i in range(2)
            ],
            "host_nic_ip": "reserve",
        }
        for node in range(2)
    ],
    "status": "completed",
}


def _as_read(text: str) -> str:
    """Return a text as it comes out of a file of UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _each(rng_of: Iterator[Random], read: Callable[[Random], object], *errors: type[BaseException]) -> Iterator[None]:
    for rng in rng_of:
        try:
            read(rng)
        except errors as error:
            assert str(error) and "\n" not in str(error), f"not one line: {error}"
        yield


def ssh_logs(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """What ssh, its ways to a host and the host have written to stderr."""

    def read(rng: Random) -> None:
        text = change_text(rng, SSH_LOG, SSH_WORDS)
        fault = explain_end(text, rng.choice([None, 1.5]))
        assert fault.text and "\n" not in fault.text + fault.place
        assert "\n" not in address_of(text)

    yield from _each(rng_of, read)


def host_lists(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Hostfiles and --hosts."""

    def read(rng: Random) -> None:
        parse_hostfile(_as_read(change_text(rng, HOSTFILE, HOST_WORDS)), HostEntry, "hosts")

    def read_words(rng: Random) -> None:
        parse_hosts(change_text(rng, "h1:8,me@node[01-16,20].dc:8,[fd77::9]:8", HOST_WORDS), HostEntry)

    yield from _each(rng_of, lambda rng: (read if rng.random() < 0.7 else read_words)(rng), HostListError)


def configs(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """--config and --tls_config."""
    options = {name: one for name, one in SETTABLE.items() if name not in ("config", "env")}
    tls = {"server_cert_path": "s", "client_cert_path": "c", "ca_cert_path": "a", "crl_path": "", "cipher_list": "x:y"}

    def read(rng: Random) -> None:
        if rng.random() < 0.3:
            text = encode_any(rng, change_value(rng, tls)).decode("utf-8", "replace")
            parse_tls_config(text, "tls.json", "/etc", {})
        else:
            parse_config(_as_read(change_text(rng, CONFIG, CONFIG_WORDS)), "job.yaml", options)

    yield from _each(rng_of, read, UsageError)


def rank_tables(rng_of: Iterator[Random], folder: Path) -> Iterator[None]:
    """--rank_table_file, as a list of hosts and as the table of a job."""
    path = folder / "table.json"
    plain = json.dumps(TABLE).encode()

    def read(rng: Random) -> None:
        data = encode_any(rng, change_value(rng, TABLE)) if rng.random() < 0.8 else change_bytes(rng, plain)
        path.write_bytes(data)
        for use in (read_host_list, read_table_hosts, lambda path: check_rank_table(path, 4, "ascend")):
            with contextlib.suppress(UsageError):
                use(path)

    yield from _each(rng_of, read)
