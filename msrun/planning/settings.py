"""Settings of a job and where they came from: the command line, MSRUN_<OPTION> in the environment, a file, a default.

What is nearer wins: command line > environment > `--config` file > what a cluster manager tells > default.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
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


KINDS = {
    "int": "whole number",
    "float": "number",
    "bool": "truth value",
    "str": "text",
    "Path | None": "path",
    "tuple[str, ...]": "text",
    "tuple[Path, ...]": "path",
}
"""Type of a field -> what its option takes."""
_MAX = 1e9


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting as it is asked for: --name, MSRUN_<NAME>, `name:` in a --config file, and its line in --help."""

    name: str
    shown: str
    """The word for its value in --help: ` N`, or `[=json]` for one that may be left out; empty for a switch."""
    help: str
    kind: str = "text"
    """What it takes: one of `KINDS`, `word` for one of `choices`, or a kind of its own."""
    default: Any = None
    """As the command line has it."""
    alone: str = ""
    """What it means without a value; empty = it takes the word after it."""
    choices: tuple[str, ...] = ()
    is_repeatable: bool = False
    least: float = 0
    most: float = _MAX
    must: str = ""
    """The range, with what to do, in words; empty = any number is taken."""
    parse: Callable[[Any], Any] | None = None
    """From what the command line has to what the spec has."""


def make_option(name: str, text: str, **settings: Any) -> Option:
    """Return an option.

    Args:
        text: its line in --help: the word for its value, two blanks, and what it does; the latter alone for a switch.
    """
    word, what = text.split("  ", 1) if "  " in text else ("", text)
    may_be_alone = not word or word.startswith(("=", "[="))
    usual = {
        "kind": "word" if "choices" in settings else "text" if word else "truth value",
        "alone": "true" if may_be_alone else "",
        "default": None if word else False,
    }
    return Option(name=name, shown=word if may_be_alone else f" {word}", help=what, **{**usual, **settings})


def option(default: Any, text: str, **settings: Any) -> Any:
    """Return a field of a spec with its option, see `make_option`.

    Args:
        default: of the field; `asked`: what the command line has in its place.
        name: of the option, where it is not that of the field without its unit.
    """
    return field(default=default, metadata={"text": text, "settings": {"asked": default, **settings}})


@cache
def field_options(spec: type) -> dict[str, Option]:
    """Return name of a field -> option, for those of a spec that have one."""
    found = {}
    for one in fields(spec):
        if one.metadata:
            kind, settings = str(one.type), dict(one.metadata["settings"])
            is_repeatable, asked = kind in ("tuple[str, ...]", "tuple[Path, ...]"), settings.pop("asked")
            usual = {"name": one.name.removesuffix("_s"), "default": None if is_repeatable else asked}
            usual |= {"kind": KINDS[kind]} if kind in KINDS else {}
            given = {**usual, "is_repeatable": is_repeatable, **settings}
            found[one.name] = make_option(text=one.metadata["text"], **given)
    return found


def check_ranges(spec: Any) -> None:
    """Refuse numbers out of the range that their options say (UsageError)."""
    for name, one in field_options(spec.__class__).items():
        value = getattr(spec, name)
        if one.must and not one.least <= value <= one.most:
            raise UsageError(f"--{one.name} {_plain(value)}: must be {one.must}")


def refuse_together(given: Collection[str], exclusive: Iterable[tuple[str, str, str]]) -> None:
    """Refuse options of which one takes away the other's meaning.

    Raises:
        UsageError: two of a row's are given; the third is why, or what to do.
    """
    for first, second, why in exclusive:
        if first in given and second in given:
            raise UsageError(f"--{first} and --{second}: {why}")


def option_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return option name -> value of every MSRUN_<OPTION> that is set and not empty.

    Inside a worker of a job the variables of the contract, such as MSRUN_LOG_DIR, are that job's: no settings.
    UsageError: a variable that looks like a misspelled option.
    """
    known = {variable_name(name): name for name in names}
    others = {*SECRET_VARIABLES, *contract.WORKER_SETTINGS}
    found = {}
    for variable, value in environ.items():
        is_ours = variable.startswith(VARIABLE_PREFIX)
        if not is_ours or (contract.MSRUN_JOB_ID in environ and variable in contract.JOB_VARIABLES):
            continue
        if variable in known and value:
            found[known[variable]] = value
        elif variable not in contract.JOB_VARIABLES | others | known.keys():
            bare = [name.removeprefix(VARIABLE_PREFIX) for name in (*known, *others)]  # all have the prefix in common
            hint = near_miss(variable.removeprefix(VARIABLE_PREFIX), bare, cutoff=MISSPELLED)
            if hint:
                hint = hint.replace("mean ", f"mean {VARIABLE_PREFIX}")
                raise UsageError(f"{variable}: no such setting{hint}; correct the variable or unset it")
    return found


def variable_name(option_name: str) -> str:
    """Return the environment variable of an option: `MSRUN_GRACE` for `grace`."""
    return VARIABLE_PREFIX + option_name.upper()


def without_option_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return what workers inherit: settings for this msrun are none for an msrun that a worker starts.

    Nor is its own place in the job of mpirun, PMI or torchrun theirs.
    """
    settings = {*SECRET_VARIABLES, *map(variable_name, names)} - contract.WORKER_SETTINGS
    if contract.MSRUN_JOB_ID in environ:
        settings -= contract.JOB_VARIABLES
    return {name: value for name, value in environ.items() if name not in settings and not is_of_launcher(name)}


def settings_note(settings: Iterable[Setting]) -> list[str]:
    """Return one line about what was set elsewhere than on the command line, or nothing."""
    elsewhere = (one for one in settings if not isinstance(one, FoundSetting) and one.source != COMMAND_LINE)
    shown = [f"{one.name}={one.text} ({one.source})" for one in elsewhere]
    return [f"settings: {', '.join(shown)}"] if shown else []


def render_settings(settings: Sequence[Setting]) -> list[str]:
    """Return a table of all settings for people, a line each."""
    shown = [(f"{setting.name}={setting.text}", setting.source) for setting in settings]
    width = max((len(text) for text, _ in shown), default=0)
    return ["settings" if shown else "settings     all defaults", *(f"  {text:<{width}}  {of}" for text, of in shown)]
