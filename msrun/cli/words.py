"""The words of a command line: which are msrun's own options, and where the script begins."""

from __future__ import annotations

from collections.abc import Sequence

import click

from msrun.cli.options import OPTIONAL_VALUES, OPTIONS


def normalise(argv: Sequence[str]) -> list[str]:
    """Give options with an optional value their value, up to the script, so that they never swallow its name."""
    words = list(argv)
    for index in own_options(words):
        plain = underscored(words[index])
        if plain in OPTIONAL_VALUES:
            words[index] = f"{plain}={OPTIONAL_VALUES[plain]}"
    return words


def own_options(words: Sequence[str]) -> list[int]:
    """Return where msrun's own options stand: all before the script, values of options left out."""
    return _walk(words)[0]


def script_index(words: Sequence[str]) -> int:
    """Return where the options end: the place of SCRIPT, of -m or of --, or the number of words."""
    return _walk(words)[1]


def _walk(words: Sequence[str]) -> tuple[list[int], int]:
    takes_value = _options_with_value() - set(OPTIONAL_VALUES)
    found: list[int] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("--", "-m"):
        found.append(index)
        index += 2 if underscored(words[index]) in takes_value else 1
    return found, index


def underscored(word: str) -> str:
    """Return an option as it is declared: --log-dir as --log_dir, a single dash as it is."""
    return "--" + word[2:].replace("-", "_") if word.startswith("--") else word


def long_options() -> set[str]:
    """Return the long options, spelled with underscores."""
    return {underscored(spelling) for parameter in OPTIONS for spelling in parameter.opts if spelling.startswith("--")}


def _options_with_value() -> set[str]:
    return {
        underscored(spelling)
        for parameter in OPTIONS
        if isinstance(parameter, click.Option) and not parameter.is_flag
        for spelling in parameter.opts
        if spelling.startswith("--")
    }
