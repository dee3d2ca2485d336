"""The options of the command line: those of a job, which `planning.spec` declares with their fields, and those that
only the command knows, in the groups of --help; and the sources of their values. Words of the --config file or of
MSRUN_<OPTION> become click's defaults (`default_map`), converted and checked as any."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from msrun.errors import UsageError, refused_as
from msrun.planning.masking import mask_url, mask_words, masked
from msrun.planning.record import Record
from msrun.planning.settings import (
    COMMAND_LINE,
    JobConfig,
    Option,
    Setting,
    field_options,
    make_option,
    option_variables,
    parse_config,
    read_truth,
    variable_name,
)
from msrun.planning.spec import LaunchSpec, SshSettings
from ranktable.files import read_text

MAX_DIGITS = 10
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86400.0
PATH = click.Path(path_type=Path)


class Converted(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """What a function makes of a word."""

    def __init__(self, name: str, convert: Callable[[str], Any], wanted: str) -> None:
        """`convert` raises ValueError for a word that it does not take; then `wanted` says what to give."""
        self.name = name
        self._convert = convert
        self._wanted = wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._convert(str(value).strip())
        except ValueError:
            self.fail(f"{value!r}: give {self._wanted}", param, ctx)


def _read_plan_form(word: str) -> str | None:
    """True means text and False no plan, so that a variable or a file can be overruled; so with the next ones."""
    return word.lower() if word.lower() in ("text", "json") else "text" if read_truth(word) else None


def _read_rank(word: str) -> int | None:
    if word.isascii() and word.isdecimal() and len(word) < MAX_DIGITS:
        return int(word)
    return 0 if read_truth(word) else None


def _read_interval(word: str) -> float | str:
    seconds = math.inf if word == "auto" else float(word)
    if word != "auto" and not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise ValueError
    return word if word == "auto" else seconds


INTERVAL = Converted("seconds|auto", _read_interval, f"a number of seconds, {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
TYPES: dict[str, click.ParamType] = {  # type: ignore[type-arg]  # generic in newer click only
    "whole number": click.INT,
    "number": click.FLOAT,
    "truth value": Converted("true|false", read_truth, "True or False"),
    "text": click.STRING,
    "JSON": click.STRING,
    "path": PATH,
    "level": click.IntRange(0, 3),
    "count": Converted(
        "number",
        lambda word: word.lower() if word.lower() in ("auto", "gpu", "cpu") else int(word),
        "a number, auto, gpu or cpu",
    ),
    "rank": Converted("rank", _read_rank, "the number of a rank"),
    "interval": INTERVAL,
    "plan form": Converted("text|json", _read_plan_form, "text or json"),
    "warm": Converted(
        "True|False|stop", lambda word: "stop" if word.lower() == "stop" else read_truth(word), "True, False or stop"
    ),
}

_OF_COMMAND = [
    make_option(
        "hosts",
        "LIST  Start the job on these hosts over SSH: h1:8,h2:4 or me@node[01-16]:8. The number after the colon is "
        "that of workers on the host; without it --local_worker_num, else an even share of --worker_num, else 1.",
    ),
    make_option("tail_worker_log", "RANKS  Ranks whose output is shown here: 0,2-3, all (-1) or none.", default="0"),
    make_option(
        "dry_run",
        "[=json]  Print the plan and start nothing. Asks no host: what hosts decide is left out.",
        kind="plan form",
        alone="text",
    ),
    make_option(
        "config",
        "FILE  YAML file with options, script, args and env. Paths in it are relative to the current directory.",
        kind="path",
    ),
    make_option(
        "join",
        "=False  Start the job in the background, also as --detach. The default, --join=True, waits for it.",
        kind="truth value",
        default=True,
    ),
    make_option("chdir", "DIR  Directory that workers start in.  [default: the current one]", kind="path"),
    make_option(
        "env",
        "NAME[=VALUE]  Variable for every worker; {rank}, {local_rank}, {node_rank} in it are its numbers. May be "
        "repeated.",
        is_repeatable=True,
    ),
    make_option("env_file", "FILE  File of NAME=VALUE lines for every worker.", kind="path"),
    make_option("role", "NAME  ROLE_NAME of the workers.", default="default"),
    make_option("rank_args", "Replace {rank}, {local_rank} and {node_rank} in ARGS by the numbers of the worker."),
    make_option("pass_local_rank", "Make --local-rank=N the first of ARGS, for scripts of torch.distributed.launch."),
    make_option(
        "sim_level",
        "LEVEL  Dry run of the script's first training step in one process, on a world that does not exist. 0: the "
        "plan; 1: also memory; 2: also time; 3: run the steps of one rank for real, nothing sent.",
        kind="level",
    ),
    make_option("sim_rank_id", "RANK  Rank that a dry run stands for.", kind="whole number", default=0),
    make_option(
        "sim_device",
        "PROFILE  Device profile of a dry run: ascend910a, ascend910b, a100, h100, h200, cpu, or a JSON file.",
        default="cpu",
    ),
    make_option("hostfile", "FILE  The hosts as a file with lines such as: h1 slots=8.", kind="path"),
    make_option(
        "rehearse",
        "HxW  Start the job on H hosts of W workers that agents on this machine stand for, such as 4x2: without SSH, "
        "all else as on several hosts. H alone: workers as for hosts of --hosts without a number.",
    ),
    make_option("include", "LIST  Use only these hosts and devices of the list: h1@h2:0,2-3."),
    make_option("exclude", "LIST  Use all hosts and devices but these: h1@h2:0."),
    make_option(
        "discover",
        "=False  Do not take hosts, workers and address from Slurm, mpirun, Kubernetes or torchrun's PET_ variables "
        "where they are not given.",
        kind="truth value",
        default=True,
    ),
    make_option("token_file", "FILE  File with the secret that the hosts of a job share.", kind="path"),
    make_option("tls_config", "FILE  JSON file of certificates: hosts and scheduler use TLS.", kind="path"),
    make_option("ssh", "Start on the servers of --rank_table_file."),
    make_option("python", "PATH  Python on the hosts, an absolute path.  [default: that of msrun here]"),
    make_option("quiet", "Print only errors of msrun itself."),
    make_option(
        "spares",
        "N  The last N hosts of the list wait, and take the place of lost ones, as often as --max_restarts says.",
        kind="whole number",
        default=0,
    ),
    make_option(
        "nnodes",
        "MIN:MAX  In torchrun's words: of a list of hosts MAX run the job, the others are spare, and MIN are enough to "
        "start again.",
    ),
    make_option("debug", "Show msrun's own tracebacks."),
    make_option(
        "plan",
        "[=json]  Ask the hosts and print the plan with all that they decide. Starts nothing.",
        kind="plan form",
        alone="text",
    ),
    make_option("check", "Check the hosts for the job, line by line; start nothing."),
    make_option("status", "LOG_DIR  Show the job of this log directory, running or ended.", kind="path"),
    make_option(
        "watch",
        "[=S]  With --status: show it every S seconds until the job has ended.  [default: 1; not on a terminal: 10]",
        kind="interval",
        alone="auto",
    ),
    make_option("json", "With --status: print it as JSON."),
    make_option("stop", "LOG_DIR  End the job of this log directory and wait for its end.", kind="path"),
]
SPEC_OPTIONS = field_options(LaunchSpec) | field_options(SshSettings)  # field -> its option; all names differ
BY_NAME: dict[str, Option] = {one.name: one for one in (*SPEC_OPTIONS.values(), *_OF_COMMAND)}
"""All options but -m, --version and --help."""
OPTIONAL_VALUES = {f"--{name}": one.alone for name, one in BY_NAME.items() if one.alone}
"""Options whose value may be left out; a value is only taken after '='."""
LONG_OPTIONS = frozenset(f"--{name}" for name in BY_NAME)
TAKING_VALUE = LONG_OPTIONS - OPTIONAL_VALUES.keys()  # those that take the word after them, with underscores

HOST_OPTIONS = ("hosts", "hostfile", "rehearse", "include", "exclude", "python", "ssh", "spares", "min_hosts", "nnodes")
"""Each of these makes a job one of hosts that are reached from here, or has a meaning only there."""
EXCLUSIVE = (
    *(("check", name, "give one of the two") for name in ("dry_run", "plan")),
    ("dry_run", "plan", "give one of the two; the second asks the hosts"),
    *(
        ("sim_level", name, f"a dry run starts no job; leave --{name} out")
        for name in ("dry_run", "hosts", "hostfile", "server_num", "trace", "metrics_file", "rank_table_file")
    ),
)
SETTABLE = {name: one for name, one in BY_NAME.items() if name not in ("status", "watch", "json", "stop")}
"""Options that a variable or a file may set, too: not those that are a command of their own."""
OF_PLAN = ("dry_run", "plan", "check")  # options that start nothing, and are no setting of the job


class Sources(Record, frozen=False):
    """What is set beside the command line; filled while the command line is read."""

    variables: dict[str, str] = field(default_factory=dict)
    config: JobConfig = field(default_factory=lambda: JobConfig(""))
    settings: tuple[Setting, ...] = ()
    hint: str = ""  # what the user should know of the words as they were given; empty for nothing

    def read(self, context: click.Context, path: Path | None) -> None:
        """Read environment and --config file, and make what they set the defaults of the other options (UsageError)."""
        self.variables = option_variables(os.environ, SETTABLE)
        if path is not None:
            may_hold = {name: one for name, one in SETTABLE.items() if name not in ("config", "env")}
            self.config = parse_config(read_given("--config", path, "a readable YAML file"), str(path), may_hold)
        context.default_map = dict(self.config.options)
        for name, text in self.variables.items():
            if name != "env":
                context.default_map[name] = _split(name, text) if SETTABLE[name].is_repeatable else text

    def raw(self, name: str) -> str:
        """Return the letters that a variable or the file holds for an option; empty for none."""
        value = self.variables.get(name, self.config.options.get(name, ""))
        return value if isinstance(value, str) else " ".join(value)

    def place(self, name: str) -> str:
        """Return where the value of an option stands that is not on the command line; empty for nowhere."""
        if name in self.variables:
            return f"{variable_name(name)}={self.variables[name]}"
        return self.config.place(name) if name in self.config.options else ""

    def explain(self, message: str) -> str:
        """Return a message with the sources of the options that it names, where these are not the command line."""
        named = dict.fromkeys(re.findall(r"--([a-z_]+)", message))
        places = [(s.name, s.source) for s in self.settings if s.name in named and s.source != COMMAND_LINE]
        if not places:
            return message
        return f"{message} ({', '.join(f'{name} is set by {source}' for name, source in dict(places).items())})"


def read_given(name: str, path: Path, wanted: str = "a readable text file") -> str:
    """Return the text of a file that an option names (UsageError)."""
    with refused_as(f"{name} {path}: cannot be read", f"give {wanted}"):
        return read_text(path)


def _split(name: str, text: str) -> list[str]:
    """Split the value of a repeatable option's variable as a shell would; it is not shown, it may hold secrets."""
    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError(f"{variable_name(name)}: a quote in it does not close; quote as in a shell") from None


def apply_sources(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the program of the file, unless one was given, and with the variables of all sources, by
    name: --env wins over MSRUN_ENV, that over the file's `env`; all over --env_file, but a file's `env` over one of the
    same file only."""
    sources = context.ensure_object(Sources)
    config, given_env = sources.config, options["env"]
    of_config = [f"{name}={value}" for name, value in config.env]
    of_variable = _split("env", sources.variables.get("env", ""))
    given = {name for name in SETTABLE if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    is_file_nearer = "env_file" in {*sources.variables, *given}
    env = [*([] if is_file_nearer else of_config), *of_variable, *given_env]
    options = {**options, "env": env, "env_below_file": of_config if is_file_nearer else []}
    settings = []
    if not options["words"] and config.program:
        options |= {"words": config.program, "module": options["module"] or config.is_module}
        settings.append(Setting("script", mask_words(config.program), config.source))
    for name in SETTABLE:
        variable = variable_name(name)
        if name == "env":
            rows = ((of_config, config.source), (of_variable, variable), (given_env, COMMAND_LINE))
            settings += [Setting("env", _masked(items), source) for items, source in rows if items]
        elif name in given and name not in OF_PLAN:
            settings.append(Setting(name, _shown(options[name]), COMMAND_LINE))
        elif name in {*sources.variables, *config.options} and name not in OF_PLAN:
            source = variable if name in sources.variables else config.source
            settings.append(Setting(name, _shown(options[name]), source))
    sources.settings = tuple(settings)
    return options


def _masked(env: Sequence[str]) -> list[str]:
    pairs = masked(dict(item.partition("=")[::2] for item in env if "=" in item))
    return [*(item for item in env if "=" not in item), *(f"{name}={value}" for name, value in pairs.items())]


def _shown(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else mask_url(str(value))


MOST_USED = "Most used"
_GROUPS = {  # the groups of --help, in its order; --help and --version come after the last
    MOST_USED: "worker_num hosts log_dir tail_worker_log dry_run",
    "Job": "module config join interactive chdir env env_file role rank_args pass_local_rank device_target "
    "virtual_local_rank bind_core bind_numa server_num rank_table_file sim_level sim_rank_id sim_device start_method "
    "mindspore mindspore_semantics preload warm warm_time",
    "Hosts": "local_worker_num hostfile rehearse include exclude master_addr master_port node_rank discover "
    "cluster_time_out heartbeat_time_out token_file tls_config",
    "SSH": "ssh python ship forward_env ssh_config ssh_user ssh_port ssh_identity ssh_host_keys "
    "ssh_connect_time_out ssh_window",
    "Logs": "worker_log_name log_split log_time log_max_bytes log_keep_jobs log_keep raw trace metrics_file "
    "progress quiet",
    "Failure": "keep_going max_restarts restart_on no_restart_on spares min_hosts join_window rescale nnodes "
    "hang_time_out exit_time_out time_limit grace signals debug",
    "Inspect": "plan check status watch json stop",
}


class ClickOption(click.Option):
    """An option that --help shows with one spelling and what follows it: `--grace S`, `--dry_run[=json]`, `--quiet`."""

    def __init__(self, option: Option, **settings: Any) -> None:
        self.option = option
        is_shown = not isinstance(option.default, bool) and option.default not in (None, "", "false")
        super().__init__(
            [*dict.fromkeys([f"--{option.name}", f"--{option.name.replace('_', '-')}"]), option.name],
            type=click.Choice(option.choices) if option.kind == "word" else TYPES[option.kind],
            default=option.default,
            show_default=is_shown and "[default" not in option.help,
            multiple=option.is_repeatable,
            help=option.help,
            **settings,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return None if record is None else (f"{self.opts[0]}{self.option.shown}", record[1])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Propose values; after an option that may stand alone, files, for SCRIPT may follow."""
        if self.option.alone:
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


def _read_sources(context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    context.obj.read(context, path)  # the Sources that the command is called with
    return path


def _make(name: str) -> click.Option:
    if name == "module":
        return click.Option(["-m", name], is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
    of_config = {"envvar": "MSRUN_CONFIG", "is_eager": True, "callback": _read_sources} if name == "config" else {}
    return ClickOption(BY_NAME[name], **of_config)


GROUPS = {title: [_make(name) for name in names.split()] for title, names in _GROUPS.items()}
OPTIONS: list[click.Parameter] = [parameter for group in GROUPS.values() for parameter in group]
