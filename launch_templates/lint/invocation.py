"""The msrun command inside a container: its options, however the container spells it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from launch_templates.lint.document import dig, sequence, text
from launch_templates.lint.workload import Container, Workload
from launch_templates.msrun_options import read_options
from launch_templates.names import find_reference

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_STARTERS = frozenset({"mpirun", "mpiexec"})
"""Commands that start another one, which stands somewhere among their words."""
_KUBELET_REFERENCE = re.compile(r"\$\(([^()]+)\)")


@dataclass(frozen=True)
class Invocation:
    """One msrun command line."""

    container: Container
    path: str
    """Where its options stand."""
    options: dict[str, str]
    """Option names (with underscores) to texts; the last one wins."""
    is_under_shell: bool
    """A shell stands between the container and msrun: SIGTERM stops there."""
    words: dict[str, str]
    """Option names to the words that gave them."""

    def value(self, name: str) -> str | None:
        """Text of an option with literal variables of the container put in; None when absent or still unknown."""
        given = self.options.get(name)
        if given is None:
            return None
        variables = literal_variables(self.container)
        whole = find_reference(given)
        if whole in variables:
            return variables[whole]
        known = _KUBELET_REFERENCE.sub(lambda match: variables.get(match[1], match[0]), given)
        return None if "$" in known else known

    def whole_number(self, name: str) -> int | None:
        """Integer of an option; None when absent, unknown or no integer."""
        given = self.value(name)
        return int(given) if given is not None and re.fullmatch(r"[0-9]{1,9}", given) else None


def literal_variables(container: Container) -> dict[str, str]:
    """Environment variables of a container that have a literal text value."""
    return {
        text(item, "name"): text(item, "value")
        for item in sequence(container.body, "env")
        if isinstance(dig(item, "value"), str)
    }


def find_invocations(workload: Workload) -> Iterator[tuple[int, Invocation]]:
    """Each msrun command of a workload with the position of its pod set."""
    for position, pod_set in enumerate(workload.pod_sets):
        for container in pod_set.containers:
            invocation = None if container.is_init else read_invocation(container)
            if invocation is not None:
                yield position, invocation


def read_invocation(container: Container) -> Invocation | None:
    """The msrun command of a container: as argument list or inside `sh -c TEXT`; None when it runs something else."""
    command = [str(word) for word in sequence(container.body, "command")]
    words = command + [str(word) for word in sequence(container.body, "args")]
    is_shell = bool(words) and words[0].rpartition("/")[2] in _SHELLS
    if is_shell:
        words = _shell_words(words)
    start = _find_msrun(words)
    if start is None:
        return None
    path = f"{container.path}.{'args' if 'args' in container.body else 'command'}"
    line = read_options(words[start:])
    return Invocation(container, path, line.options, is_shell and "exec" not in words[:start], line.words)


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


def _find_msrun(words: list[str]) -> int | None:
    """Position after the command name."""
    for position, word in enumerate(words):
        if word.rpartition("/")[2] == "msrun":
            is_command = (
                position == 0
                or words[position - 1] in ("exec", "&&", ";", "-m", "--")
                or "=" in words[position - 1]
                or words[0].rpartition("/")[2] in _STARTERS
            )
            if is_command:
                return position + 1
    return None
