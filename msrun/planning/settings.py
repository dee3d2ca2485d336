"""Settings of a job and where they came from: the command line, MSRUN_<OPTION> in the environment, a file, a default.

What is nearer wins: command line > environment > `--config` file > what a cluster manager tells > default.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msrun import contract
from msrun.errors import UsageError, near_miss
from msrun.planning.tls_spec import CLIENT_PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE

_OF_LAUNCHER = re.compile(
    r"(PMI_|PMIX_(?!MCA_)|PRTE_(?!MCA_)|OMPI_COMM_WORLD_|OMPI_WORLD_|OMPI_MCA_orte_|OMPI_MCA_ess_base_|PET_RDZV_)\w+\Z"
    r"|OMPI_(APP_CTX_NUM_PROCS|ARGV|COMMAND|FILE_LOCATION|FIRST_RANKS|NUM_APP_CTX|TOOL_NAME|UNIVERSE_SIZE)\Z"
    r"|OMPI_MCA_(ess|initial_wdir|num_procs|pmix)\Z"
    r"|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT)\Z"
)


def is_of_launcher(name: str) -> bool:
    """Return whether a variable tells a process its place in mpirun's, PMI's or torchrun's job."""
    return bool(_OF_LAUNCHER.match(name))


COMMAND_LINE = "command line"
VARIABLE_PREFIX = "MSRUN_"
TOKEN_VARIABLE = "MSRUN_TOKEN"  # noqa: S105 - the name of a variable, not a token
"""The secret by which the hosts of a job meet."""
SECRET_VARIABLES = (TOKEN_VARIABLE, SERVER_PASSWORD_VARIABLE, CLIENT_PASSWORD_VARIABLE)
"""For msrun alone: workers do not get them."""
MISSPELLED = 0.8
"""How close a variable must be to one of ours to be taken for it; others may have variables of this prefix, too."""


@dataclass(frozen=True)
class Setting:
    """A value that is not a default, and where it came from; to be shown, so secrets are hidden in it."""

    name: str
    value: Any
    """JSON-able."""
    source: str
    """`command line`, the name of a variable, or the path of a file."""

    @property
    def text(self) -> str:
        """The value for people, on one line."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(_plain(value) for value in values).replace("\n", "\\n").replace("\r", "\\r")


@dataclass(frozen=True)
class FoundSetting(Setting):
    """One that a cluster manager or another launcher has told; said at the start, in a line of its own."""


def _plain(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return shlex.quote(text) if any(letter.isspace() for letter in text) else text


def option_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return option name -> value of every MSRUN_<OPTION> that is set and not empty.

    Inside a worker of a job the variables of the contract, such as MSRUN_LOG_DIR, are that job's: no settings.

    Raises:
        UsageError: a variable that looks like a misspelled option.
    """
    known = {variable_name(name): name for name in names}
    is_in_job = contract.MSRUN_JOB_ID in environ
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or (is_in_job and variable in contract.JOB_VARIABLES):
            continue
        if variable in known:
            if value:
                found[known[variable]] = value
        elif variable not in contract.JOB_VARIABLES | contract.WORKER_SETTINGS and variable not in SECRET_VARIABLES:
            _refuse_misspelled(variable, [*known, *SECRET_VARIABLES, *contract.WORKER_SETTINGS])
    return found


def variable_name(option_name: str) -> str:
    """Return the environment variable of an option: `MSRUN_GRACE` for `grace`."""
    return VARIABLE_PREFIX + option_name.upper()


def _refuse_misspelled(variable: str, known: list[str]) -> None:
    """The prefix is common to all, so only what follows it is compared."""
    bare = [name.removeprefix(VARIABLE_PREFIX) for name in known]
    hint = near_miss(variable.removeprefix(VARIABLE_PREFIX), bare, cutoff=MISSPELLED)
    if hint:
        hint = hint.replace("mean ", f"mean {VARIABLE_PREFIX}")
        raise UsageError(f"{variable}: no such setting{hint}; correct the variable or unset it")


def without_option_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return what workers inherit: settings for this msrun are none for an msrun that a worker starts.

    Nor is its own place in the job of mpirun, PMI or torchrun theirs.
    """
    settings = {*SECRET_VARIABLES, *(variable_name(name) for name in names)} - contract.WORKER_SETTINGS
    if contract.MSRUN_JOB_ID in environ:
        settings -= contract.JOB_VARIABLES
    return {name: value for name, value in environ.items() if name not in settings and not is_of_launcher(name)}


def settings_note(settings: Iterable[Setting]) -> list[str]:
    """Return one line about what was set elsewhere than on the command line, or nothing."""
    set_by_user = (setting for setting in settings if not isinstance(setting, FoundSetting))
    elsewhere = [setting for setting in set_by_user if setting.source != COMMAND_LINE]
    shown = [f"{setting.name}={setting.text} ({setting.source})" for setting in elsewhere]
    return [f"settings: {', '.join(shown)}"] if shown else []


def render_settings(settings: Sequence[Setting]) -> list[str]:
    """Return a table of all settings for people, a line each."""
    if not settings:
        return ["settings     all defaults"]
    shown = [(f"{setting.name}={setting.text}", setting.source) for setting in settings]
    width = max(len(text) for text, _ in shown)
    return ["settings", *(f"  {text:<{width}}  {source}" for text, source in shown)]
