"""How options are spelled, and what their values may be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
MAX_DIGITS = 10
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86400.0


class Boolean(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """True or False in the spellings that people use."""

    name = "true|false"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        """Return the truth value of a word."""
        word = str(value).strip().lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            self.fail(f"{value!r}: give True or False", param, ctx)
        return word in TRUE_WORDS


COUNT_WORDS = ("auto", "gpu", "cpu")


class WorkerCount(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A number of workers, or one for each of something on this host."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or the word."""
        word = str(value).strip().lower()
        if word in COUNT_WORDS:
            return word
        try:
            return int(word)
        except ValueError:
            self.fail(f"{value!r}: give a number, auto, gpu or cpu", param, ctx)


class PlanForm(click.Choice):  # type: ignore[type-arg]  # generic in newer click only
    """A form of the plan; True means text and False no plan, so that a variable or a file can be overruled."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return `text`, `json` or None."""
        word = str(value).strip().lower()
        if word in FALSE_WORDS:
            return None
        return super().convert("text" if word in TRUE_WORDS else value, param, ctx)


class Warm(click.Choice):  # type: ignore[type-arg]  # generic in newer click only
    """Whether a job starts from a warm server; or that these shall stop."""

    def __init__(self) -> None:
        super().__init__(["True", "False", "stop"], case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return True, False or `stop`."""
        word = str(value).strip().lower()
        if word in TRUE_WORDS + FALSE_WORDS:
            return word in TRUE_WORDS
        return super().convert(value, param, ctx)


class PlanPlace(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """Where a plan goes: text or json on the console, or the page FILE.html. True means text and False no plan."""

    name = "json|FILE.html"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word, the path, or None."""
        word = str(value).strip().lower()
        if word in FALSE_WORDS:
            return None
        if word in TRUE_WORDS or word in ("text", "json"):
            return "json" if word == "json" else "text"
        if not word.endswith(".html"):
            self.fail(f"{value!r} is neither json nor a FILE.html", param, ctx)
        return Path(value)


class Interval(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A number of seconds, or auto."""

    name = "seconds|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds, or the word."""
        if value == "auto":
            return value
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
            self.fail(f"{value!r}: give a number of seconds, {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}", param, ctx)
        return seconds


class OneRank(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A rank; True means rank 0 and False none, so that a variable or a file can be overruled."""

    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the rank, or None."""
        word = str(value).strip().lower()
        if word.isascii() and word.isdecimal() and len(word) < MAX_DIGITS:
            return int(word)
        if word not in TRUE_WORDS + FALSE_WORDS:
            self.fail(f"{value!r}: give the number of a rank", param, ctx)
        return 0 if word in TRUE_WORDS else None


class Option(click.Option):
    """An option that --help shows with one spelling and what follows it: `--grace S`, `--dry_run[=json]`, `--quiet`."""

    def __init__(self, names: list[str], shown: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.shown = shown

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return what stands in the two columns of --help."""
        record = super().get_help_record(ctx)
        return None if record is None else (f"{self.opts[0]}{self.shown}", record[1])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Propose values; after an option that may stand alone, files, for SCRIPT may follow."""
        if not self.shown.startswith(" "):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


def option(name: str, value: str, **settings: Any) -> click.Option:
    """Return a click option that is also spelled with dashes.

    Args:
        value: the word for its value in --help: `N`, or `=False` and `[=json]` for one that may be left out.
    """
    spellings = list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))
    return Option([*spellings, name], value if value.startswith(("=", "[=")) or not value else f" {value}", **settings)
