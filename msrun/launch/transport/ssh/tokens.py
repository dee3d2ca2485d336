"""The % tokens, ~ and ${VARIABLE} of values of ssh_config, and what a host name may hold that is put into a command."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from msrun.errors import UsageError

_TOKEN = re.compile(r"%(.?)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_SHELL_TEXT = re.compile(r"[\s\x00-\x20\x7f'`\"$\\;&<>|(){}]")
"""What no host name holds; ssh itself refuses these before it gives a name to a ProxyCommand."""


def check_command_word(what: str, word: str) -> None:
    """Refuse a host or user name that a shell, or an option parser, would take for something else.

    Raises:
        UsageError: naming it.
    """
    if word.startswith("-") or _SHELL_TEXT.search(word):
        raise UsageError(f"{what} {word!r}: starts with '-' or holds shell text; correct the name")


def expand_tokens(text: str, tokens: Mapping[str, Callable[[], str]], place: str) -> str:
    """Fill in % tokens; %% is a %.

    Raises:
        UsageError: a token that does not belong here.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        if match[1] not in tokens:
            known = " ".join(f"%{name}" for name in sorted(tokens))
            raise UsageError(f"{place} {text}: {match[0]} is not known here; msrun knows {known} and %%")
        return tokens[match[1]]()

    return _TOKEN.sub(value, text)


def expand_path(text: str, tokens: Mapping[str, Callable[[], str]], place: str) -> Path:
    """Fill in % tokens and ${VARIABLE}s, and ~ at the beginning.

    Raises:
        UsageError: a token that does not belong here, or a variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UsageError(f"{place} {text}: {match[1]} is not set in the environment")
        return os.environ[match[1]]

    return expand_home(_VARIABLE.sub(value, expand_tokens(text, tokens, place)), f"{place} {text}")


def expand_home(text: str, place: str) -> Path:
    """Return a path in which ~ and ~user are homes.

    Raises:
        UsageError: there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{place}: there is no user {text.partition('/')[0].removeprefix('~')!r}") from None


def local_tokens(local_user: str) -> dict[str, Callable[[], str]]:
    """Return the tokens that say something of this side."""
    return {
        "d": lambda: str(Path("~").expanduser()),
        "i": lambda: str(os.getuid()),
        "L": lambda: socket.gethostname().partition(".")[0],
        "l": socket.gethostname,
        "u": lambda: local_user,
    }
