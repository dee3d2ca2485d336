"""The msrun command as a manifest gives it: its options, however a container spells them. Pure.

A test holds them against the command itself, which this package does not import.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from launch_templates.names import find_reference

_VALUE_MAY_BE_LEFT_OUT = """
bind_core bind_numa check debug discover dry_run interactive join json keep_going log_split
log_time pass_local_rank virtual_local_rank
plan progress quiet rank_args raw ship ssh trace warm watch
"""
_VALUE = """
chdir cluster_time_out config device_target env env_file exclude exit_time_out forward_env grace hang_time_out
heartbeat_time_out hostfile hosts include join_window local_worker_num log_dir log_keep log_keep_jobs log_max_bytes role
master_addr master_port max_restarts metrics_file min_hosts mindspore mindspore_semantics nnodes no_restart_on
node_rank preload python rank_table_file rehearse rescale restart_on server_num signals sim_device sim_level sim_rank_id
spares ssh_config ssh_connect_time_out ssh_host_keys ssh_identity ssh_port ssh_user ssh_window start_method
status stop tail_worker_log time_limit tls_config token_file warm_time worker_log_name worker_num
"""
VALUE_MAY_BE_LEFT_OUT = frozenset(_VALUE_MAY_BE_LEFT_OUT.split())
"""Options that take a value after `=` only."""
FLAGS = frozenset({"help", "version"})
NAMES = VALUE_MAY_BE_LEFT_OUT | FLAGS | frozenset(_VALUE.split())
"""Every option, with underscores; each may also be written with hyphens."""


def hint_of_option(name: str, otherwise: str) -> str:
    """What to do about an option that msrun does not have."""
    near = get_close_matches(name, NAMES, n=1)
    return f"did you mean --{near[0]}?" if near else f"see msrun --help; {otherwise}"


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
    line = CommandLine({}, {}, list(words))
    while line.rest and line.rest[0].startswith("--") and line.rest[0] != "--":
        text, equals, value = line.rest.pop(0).removeprefix("--").partition("=")
        name = text.replace("-", "_")
        if not equals and name not in VALUE_MAY_BE_LEFT_OUT | FLAGS:
            value = line.rest.pop(0) if line.rest else ""
        line.options[name], line.words[name] = value, f"--{text}"
    return line


_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_STARTERS = frozenset({"mpirun", "mpiexec"})
"""Commands that start another one, which stands somewhere among their words."""
_KUBELET_REFERENCE = re.compile(r"\$\(([^()]+)\)")


@dataclass
class Invocation:
    """One msrun command line in a container."""

    container: dict[str, Any]
    path: str
    """Path of the container in its document."""
    place: str
    """Path of its key under which the options stand: args or command."""
    line: CommandLine
    is_under_shell: bool
    """A shell stands between the container and msrun: SIGTERM stops there."""

    def __post_init__(self) -> None:
        self.options = self.line.options
        env = self.container.get("env")
        items = [item for item in env if isinstance(item, dict)] if isinstance(env, list) else []
        self._variables = {str(one.get("name")): one["value"] for one in items if isinstance(one.get("value"), str)}

    def value(self, name: str) -> str | None:
        """Text of an option with literal variables of the container put in; None when absent or still unknown."""
        given = self.options.get(name)
        if given is None:
            return None
        whole = find_reference(given)
        if whole in self._variables:
            return str(self._variables[whole])
        known = _KUBELET_REFERENCE.sub(lambda match: self._variables.get(match[1], match[0]), given)
        return None if "$" in known else known

    def whole_number(self, name: str) -> int | None:
        """Integer of an option; None when absent, unknown or no integer."""
        given = self.value(name)
        return int(given) if given is not None and re.fullmatch(r"[0-9]{1,9}", given) else None


def read_invocation(container: dict[str, Any], path: str) -> Invocation | None:
    """The msrun command of a container: as argument list or inside `sh -c TEXT`; None when it runs something else."""
    lists = [container.get(key) for key in ("command", "args")]
    words = [str(word) for one in lists if isinstance(one, list) for word in one]
    is_shell = bool(words) and words[0].rpartition("/")[2] in _SHELLS
    if is_shell:
        words = _shell_words(words)
    for position, word in enumerate(words):
        before = words[position - 1] if position else "--"
        is_command = before in ("exec", "&&", ";", "-m", "--") or "=" in before
        if word.rpartition("/")[2] == "msrun" and (is_command or words[0].rpartition("/")[2] in _STARTERS):
            place = f"{path}.{'args' if 'args' in container else 'command'}"
            is_under_shell = is_shell and "exec" not in words[:position]
            return Invocation(container, path, place, read_options(words[position + 1 :]), is_under_shell)
    return None


def _shell_words(words: list[str]) -> list[str]:
    scripts = [word for flag, word in pairwise(words) if flag.startswith("-") and flag.endswith("c")]
    # a line end separates commands as ; does, unless it is escaped
    one_line = scripts[0].replace("\\\n", " ").replace("\n", "\n;\n") if scripts else ""
    lexer = shlex.shlex(one_line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []
