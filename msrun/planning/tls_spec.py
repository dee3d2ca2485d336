"""TlsSpec: how the connections between hosts and scheduler are encrypted, from a JSON file with MindSpore's keys.

    {"server_cert_path": "server.pem", "client_cert_path": "client.pem", "ca_cert_path": "ca.crt", "crl_path": "",
     "cipher_list": "ECDHE-ECDSA-AES256-GCM-SHA384", "cert_expire_warning_time_in_day": 90}

Ours are `server_password_file`, `client_password_file` and `server_name`. Paths count from the folder of the file.
Source: MindSpore's dynamic cluster, "Security"; ps/constants.h for the cipher suites and the limits."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from msrun.errors import UsageError, near_miss
from ranktable.bounded_text import TextError, load_json


def check_private(mode: int, place: str, path: object) -> None:
    """Refuse a file of `st_mode` mode that others may read or write (UsageError); `place` is what names it."""
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{place}: others may read it (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")


SERVER_PASSWORD_VARIABLE = "MSRUN_TLS_SERVER_PASSWORD"  # noqa: S105 - the name of a variable
CLIENT_PASSWORD_VARIABLE = "MSRUN_TLS_CLIENT_PASSWORD"  # noqa: S105 - the name of a variable
PSK_CIPHER = "ECDHE-PSK-CHACHA20-POLY1305"
"""On MindSpore's list, but it goes with a shared key instead of certificates, so that two hosts never agree on it."""
CIPHERS = (
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-CHACHA20-POLY1305",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-CCM",
    "ECDHE-ECDSA-AES128-CCM",
)
"""The suites of TLS 1.2 that MindSpore allows, strongest first. TLS 1.3 has three of its own, with the same ciphers."""
WARNING_DAYS = 90
MIN_WARNING_DAYS, MAX_WARNING_DAYS = 7, 180
SHOWN_CIPHERS = 3
PATH_KEYS = (
    *("server_cert_path", "client_cert_path", "ca_cert_path", "crl_path"),
    *("server_password_file", "client_password_file"),
)
DAYS_KEY = "cert_expire_warning_time_in_day"
OTHER_KEYS = ("cipher_list", DAYS_KEY, "server_name")
MINDSPORE_KEYS = ("recovery", "connection_num", "cert_check_interval_in_hour")
"""What else a file of MindSpore's may hold; it has no meaning here."""
PASSWORD_KEYS = ("server_password", "client_password", "password")


@dataclass(frozen=True, kw_only=True)
class TlsSpec:
    """What the user asked for; none of the files it names was read."""

    source: str  # the path as given with --tls_config, for messages
    client_cert_path: str  # certificate and key of this host. All paths are absolute
    ca_cert_path: str
    server_cert_path: str = ""  # certificate and key of the scheduler; may be empty on hosts without it
    crl_path: str = ""
    ciphers: tuple[str, ...] = CIPHERS
    warning_days: int = WARNING_DAYS
    server_name: str = ""
    """Name or address that the scheduler's certificate has to be for; empty = the CA vouches for all it signed."""
    server_password_file: str = ""
    client_password_file: str = ""
    server_password: str = field(default="", repr=False)  # from the environment; wins over the file
    client_password: str = field(default="", repr=False)

    def place(self, key: str) -> str:
        return f"--tls_config {self.source}: {key} {getattr(self, key)}"


def parse_tls_config(text: str, source: str, folder: str, environ: Mapping[str, str]) -> TlsSpec:
    """Read the file of --tls_config (UsageError); `folder`: where its paths count from; `environ`: for passwords."""
    values = _load(text, source)
    found = {}
    for key in (*PATH_KEYS, "cipher_list", "server_name"):
        value = values.get(key)
        if not isinstance(value, str | None) or "\0" in (value or ""):
            _fail(source, f"{key}: {json.dumps(value)[:80]} is no text; give it in quotes")
        found[key] = str(value or "")
    paths = {key: os.path.join(folder, found[key]) if found[key] else "" for key in PATH_KEYS}  # noqa: PTH118 - pure
    for key in ("client_cert_path", "ca_cert_path"):
        if not paths[key]:
            _fail(source, f"{key}: is missing; both sides prove who they are, so every host needs it")
    days = values.get(DAYS_KEY, WARNING_DAYS)
    if type(days) is not int or not MIN_WARNING_DAYS <= days <= MAX_WARNING_DAYS:
        shown = json.dumps(days)[:80]
        _fail(source, f"{DAYS_KEY}: {shown}: must be {MIN_WARNING_DAYS} to {MAX_WARNING_DAYS} days")
    return TlsSpec(
        source=source,
        **paths,
        ciphers=_ciphers(list(dict.fromkeys(filter(None, found["cipher_list"].split(":")))), source),
        warning_days=days,
        server_name=found["server_name"],
        server_password=environ.get(SERVER_PASSWORD_VARIABLE, ""),
        client_password=environ.get(CLIENT_PASSWORD_VARIABLE, ""),
    )


def _fail(source: str, message: str) -> NoReturn:
    raise UsageError(f"--tls_config {source}: {message}")


def _load(text: str, source: str) -> dict[str, Any]:
    if not text.strip():
        _fail(source, "is empty; give JSON with client_cert_path, ca_cert_path and so on")
    try:
        value = load_json(text)
    except TextError as error:
        _fail(source, str(error))
    if not isinstance(value, dict):
        _fail(source, 'is no JSON object; give {"ca_cert_path": "ca.crt", ...}')
    known = [*PATH_KEYS, *OTHER_KEYS]
    for key in value:
        if key in PASSWORD_KEYS:
            _fail(
                source,
                f"{key}: no password belongs into this file; set {SERVER_PASSWORD_VARIABLE} and "
                f"{CLIENT_PASSWORD_VARIABLE}, or name files with server_password_file and client_password_file",
            )
        if key not in (*known, *MINDSPORE_KEYS):
            _fail(source, f"{key!r}: no such key{near_miss(key, known)}; there are {', '.join(known)}")
    return value


def _ciphers(names: Sequence[str], source: str) -> tuple[str, ...]:
    wrong = [name for name in names if name not in (*CIPHERS, PSK_CIPHER)]
    if wrong:
        shown = ", ".join(f"{name!r}{near_miss(name, CIPHERS, cutoff=0.95)}" for name in wrong[:SHOWN_CIPHERS])
        more = f" and {len(wrong) - SHOWN_CIPHERS} more" if len(wrong) > SHOWN_CIPHERS else ""
        _fail(
            source,
            f"cipher_list: {shown}{more}: not allowed, by MindSpore neither; leave cipher_list out to have all "
            f"that are, or give some of {':'.join(CIPHERS)}",
        )
    if names == [PSK_CIPHER]:
        _fail(source, f"cipher_list: {PSK_CIPHER} alone cannot be used with certificates; add {CIPHERS[0]}")
    return tuple(name for name in names if name != PSK_CIPHER) or CIPHERS
