"""Files that somebody else may have written: each is read, or refused in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from unittest import mock

from ssh_certificates import SshAuthority, blob_of
from ssh_net import make_key

from fuzz.mutation import change_bytes, change_text, change_value, encode_any
from msrun.cli import command
from msrun.cli.sources import option_shapes
from msrun.errors import UsageError
from msrun.launch.job_hosts import read_host_list, read_table_hosts
from msrun.launch.rank_table_file import check_rank_table
from msrun.launch.transport.ssh.client_config import AUTHORITY_SIGNATURES, ClientConfig, ConfigFiles
from msrun.launch.transport.ssh.key_ring import read_key_file
from msrun.launch.transport.ssh.known_hosts import BadCertificate, KnownHosts, check_certificate
from msrun.planning.config import parse_config
from msrun.planning.hosts.host_list import parse_hostfile, parse_hosts
from msrun.planning.spec import SshSettings
from msrun.planning.tls_spec import parse_tls_config

SSH_CONFIG = """\
Host h1 h* !h9
  HostName %h.example
  User me
  Port 2222
  IdentityFile ~/.ssh/%n
  ProxyJump me@gate:22,other
Match host h1 user me
  ConnectTimeout 1m
  Ciphers +aes256-ctr,-x
  StrictHostKeyChecking accept-new
Match originalhost "h2" exec "test %h"
  ProxyCommand nc %h %p
  UserKnownHostsFile /a ~/b none
Match final all
  RequiredRSASize 2048
  RevokedHostKeys /none
  HostKeyAlias x
Include conf.d/*.conf
"""
SSH_WORDS = (
    *("%h", "%%", "%z", "${HOME}", "${NO}", "yes", "none", "*", "!", '"', "Match", "Host", "all", "final", "Port", "0"),
    *("99999", "ProxyJump", "h1,h1", "ssh://a@b:1", "User", "canonical", "-oX", "$(id)", "=", "IdentityAgent"),
    *("~nobody-here/x", "conf**", "**", "[", "..", "none,yes", "+", "1h", "${"),
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


def ssh_configs(rng_of: Iterator[Random], folder: Path) -> Iterator[None]:
    """ssh_config, with no command run and no file outside included."""
    path = folder / "config"

    def read(rng: Random) -> None:
        text = change_text(rng, SSH_CONFIG, SSH_WORDS)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        ClientConfig(SshSettings(config_file=path)).resolve(rng.choice(["h1", "h2", "10.0.0.1", "x%hy"]))

    with mock.patch.object(ConfigFiles, "_ends_well", staticmethod(lambda *_: True)):
        yield from _each(rng_of, read, UsageError)


def ssh_keys(rng_of: Iterator[Random], folder: Path) -> Iterator[None]:
    """known_hosts, private keys and certificates."""
    public, authority = make_key(folder / "key"), SshAuthority()
    private, signed = (folder / "key").read_bytes(), authority.sign(public, "h1")
    kind, blob = signed.split()[0], blob_of(signed)
    known = (
        f"h1 {public}\n@cert-authority *.dc {authority.public}\n@revoked * {public}\n|1|AAAA|AAAA {public}\n".encode()
    )

    def read(rng: Random) -> None:
        (folder / "known").write_bytes(change_bytes(rng, known))
        KnownHosts([folder / "known"]).find("h1")
        (folder / "changed").write_bytes(change_bytes(rng, private))
        read_key_file(folder / "changed")
        with contextlib.suppress(BadCertificate):
            check_certificate(kind, change_bytes(rng, blob), blob_of(public), ["h1"], AUTHORITY_SIGNATURES)

    yield from _each(rng_of, read)


def host_lists(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Hostfiles and --hosts."""

    def read(rng: Random) -> None:
        parse_hostfile(_as_read(change_text(rng, HOSTFILE, HOST_WORDS)), "hosts")

    def read_words(rng: Random) -> None:
        parse_hosts(change_text(rng, "h1:8,me@node[01-16,20].dc:8,[fd77::9]:8", HOST_WORDS))

    yield from _each(rng_of, lambda rng: (read if rng.random() < 0.7 else read_words)(rng), UsageError)


def configs(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """--config and --tls_config."""
    shapes = {name: shape for name, shape in option_shapes(command.params).items() if name not in ("config", "env")}
    tls = {"server_cert_path": "s", "client_cert_path": "c", "ca_cert_path": "a", "crl_path": "", "cipher_list": "x:y"}

    def read(rng: Random) -> None:
        if rng.random() < 0.3:
            text = encode_any(rng, change_value(rng, tls)).decode("utf-8", "replace")
            parse_tls_config(text, "tls.json", "/etc", {})
        else:
            parse_config(_as_read(change_text(rng, CONFIG, CONFIG_WORDS)), "job.yaml", shapes)

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
