"""SshSettings: how the hosts of a job are reached over SSH, as far as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msrun.errors import UsageError
from msrun.planning.hosts.host_entry import MAX_PORT, check_user

HostKeyPolicy = Literal["strict", "accept-new", "off"]
HOST_KEY_POLICIES: tuple[HostKeyPolicy, ...] = ("strict", "accept-new", "off")
NO_CONFIG = "none"
"""In place of a file: no ssh_config is read; ssh -F has the same word."""
CONNECT_TIME_OUT_S = 30.0
WINDOW = 32
MAX_WINDOW = 1024
MAX_CONNECT_TIME_OUT_S = 3600.0


@dataclass(frozen=True)
class SshSettings:
    """What holds for all hosts; what a host list says of one host wins, ssh_config fills in the rest."""

    config_file: Path | None = None
    """Read in place of ~/.ssh/config and /etc/ssh/ssh_config; `NO_CONFIG` for none."""
    user: str = ""
    port: int = 0
    """0 = that of ssh_config, else 22."""
    identity_files: tuple[Path, ...] = ()
    """Private keys that are tried before those of ssh_config."""
    host_keys: HostKeyPolicy | None = None
    """What to do with the host key of an unknown host; None = as ssh_config says, else strict."""
    connect_time_out_s: float = CONNECT_TIME_OUT_S
    """For one host, from its name to its agent, with all tries."""
    window: int = WINDOW
    """How many hosts are being connected at a time."""


def check_ssh_settings(settings: SshSettings) -> None:
    """Refuse what can be seen to be wrong in the words alone.

    Raises:
        UsageError: naming the option, its value, the constraint and the remedy.
    """
    if settings.user:
        check_user(settings.user, "--ssh_user")
    if not 0 <= settings.port <= MAX_PORT:
        raise UsageError(f"--ssh_port {settings.port}: must be 1 to {MAX_PORT}; leave it out for that of ssh_config")
    if not 0 < settings.connect_time_out_s <= MAX_CONNECT_TIME_OUT_S:
        raise UsageError(
            f"--ssh_connect_time_out {settings.connect_time_out_s:g}: "
            f"must be more than 0 and up to {MAX_CONNECT_TIME_OUT_S:g} seconds"
        )
    if not 1 <= settings.window <= MAX_WINDOW:
        raise UsageError(f"--ssh_window {settings.window}: must be 1 to {MAX_WINDOW} hosts at a time")
