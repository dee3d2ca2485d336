"""What is set beside the command line, MSRUN_<OPTION> and the --config file, brought together with it by click.

Words of a file or of a variable become click's defaults (`default_map`), so they are converted and checked as those
of the command line are, which win over them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from msrun.cli.options import SETTABLE
from msrun.errors import UsageError
from msrun.planning.config import JobConfig, parse_config
from msrun.planning.masking import mask_url, mask_words, masked
from msrun.planning.settings import COMMAND_LINE, Setting, option_variables, variable_name
from ranktable.files import read_text


@dataclass
class Sources:
    """What is set beside the command line; filled while the command line is read."""

    variables: dict[str, str] = field(default_factory=dict)
    """Option name -> value of its MSRUN_ variable."""
    config: JobConfig = field(default_factory=lambda: JobConfig(""))
    settings: tuple[Setting, ...] = ()
    """What holds in the end, and where it came from."""
    hint: str = ""
    """What the user should know of the words as they were given; empty for nothing."""

    def read(self, context: click.Context, path: Path | None) -> None:
        """Read environment and --config file, and make what they set the defaults of the other options.

        Raises:
            UsageError: a misspelled variable, or a file that is wrong.
        """
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
    try:
        return read_text(path)
    except OSError as error:
        raise UsageError(f"{name} {path}: cannot be read ({error.strerror}); give {wanted}") from None


def _split(name: str, text: str) -> list[str]:
    """Split the value of a repeatable option's variable as a shell would; it is not shown, it may hold secrets."""
    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError(f"{variable_name(name)}: a quote in it does not close; quote as in a shell") from None


def apply_sources(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with what is no plain default: the program of the file, and variables from all sources.

    A script on the command line replaces that of the file with its arguments. Variables are collected by name: --env
    wins over MSRUN_ENV, that over the file's `env`. All win over --env_file, but a file's `env` over one of the same
    file only.
    """
    sources = context.ensure_object(Sources)
    config = sources.config
    env_file_is_nearer = "env_file" in sources.variables or _is_given(context, "env_file")
    config_env = [f"{name}={value}" for name, value in config.env]
    applied = {
        **options,
        "env": [
            *([] if env_file_is_nearer else config_env),
            *_split("env", sources.variables.get("env", "")),
            *options["env"],
        ],
        "env_below_file": config_env if env_file_is_nearer else [],
    }
    if not options["words"] and config.program:
        applied.update(words=config.program, module=options["module"] or config.is_module)
    sources.settings = tuple(_settings(context, applied, options["env"], sources))
    return applied


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _settings(
    context: click.Context, options: dict[str, Any], given_env: Sequence[str], sources: Sources
) -> Iterator[Setting]:
    config = sources.config
    if config.program and options["words"] is config.program:
        yield Setting("script", mask_words(config.program), config.source)
    for name in SETTABLE:
        variable = variable_name(name)
        if name == "env":
            yield from _env_setting([f"{key}={value}" for key, value in config.env], config.source)
            yield from _env_setting(_split(name, sources.variables.get(name, "")), variable)
            yield from _env_setting(given_env, COMMAND_LINE)
        elif name in ("dry_run", "plan", "check"):
            continue
        elif _is_given(context, name):
            yield Setting(name, _shown(options[name]), COMMAND_LINE)
        elif name in sources.variables or name in config.options:
            yield Setting(name, _shown(options[name]), variable if name in sources.variables else config.source)


def _env_setting(items: Sequence[str], source: str) -> Iterator[Setting]:
    if items:
        pairs = masked(dict(item.partition("=")[::2] for item in items if "=" in item))
        names = [item for item in items if "=" not in item]
        yield Setting("env", [*names, *(f"{name}={value}" for name, value in pairs.items())], source)


def _shown(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else mask_url(str(value))
