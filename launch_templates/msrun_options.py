"""The options of the msrun command, as a manifest may give them. Pure.

A test holds them against the command itself, which this package does not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_VALUE_MAY_BE_LEFT_OUT = """
bind_core bind_numa check debug discover dry_run install_completion interactive join json keep_going pass_local_rank
plan progress quiet rank_args raw ship ssh trace warm watch
"""
_VALUE = """
chdir cluster_time_out config device_target env env_file exclude exit_time_out forward_env grace hang_time_out
heartbeat_time_out hostfile hosts include join_window local_worker_num log_dir log_keep log_keep_jobs log_max_bytes
master_addr master_port max_restarts metrics_file min_hosts mindspore mindspore_semantics nnodes no_restart_on
node_rank preload python rank_table_file rehearse restart_on server_num signals sim_device sim_level sim_rank_id
spares ssh_client ssh_config ssh_connect_time_out ssh_host_keys ssh_identity ssh_port ssh_user ssh_window start_method
status stop tail_worker_log time_limit tls_config token_file warm_time worker_log_name worker_num
"""
VALUE_MAY_BE_LEFT_OUT = frozenset(_VALUE_MAY_BE_LEFT_OUT.split())
"""Options that take a value after `=` only."""
FLAGS = frozenset({"help", "version"})
NAMES = VALUE_MAY_BE_LEFT_OUT | FLAGS | frozenset(_VALUE.split())
"""Every option, with underscores; each may also be written with hyphens."""


@dataclass(frozen=True)
class CommandLine:
    """What stands before the script."""

    options: dict[str, str]
    """Names with underscores to values; the last one wins."""
    words: dict[str, str]
    """Names to the words that gave them, as they were written."""
    rest: list[str]
    """The script and what follows it."""


def read_options(words: Sequence[str]) -> CommandLine:
    """Read the words after `msrun` as the command does: its options end at the script, at `-m` and at `--`."""
    options: dict[str, str] = {}
    written: dict[str, str] = {}
    position = 0
    while position < len(words) and words[position].startswith("--") and words[position] != "--":
        text, equals, value = words[position].removeprefix("--").partition("=")
        name = text.replace("-", "_")
        position += 1
        if not equals and name not in VALUE_MAY_BE_LEFT_OUT | FLAGS:
            value = words[position] if position < len(words) else ""
            position += 1
        options[name] = value
        written[name] = f"--{text}"
    return CommandLine(options, written, list(words[position:]))
