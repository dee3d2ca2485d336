"""How options are spelled, and what their values may be."""

from __future__ import annotations

from typing import Any

import click

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")


class Boolean(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """True or False in the spellings that people use."""

    name = "true|false"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        """Return the truth value of a word."""
        word = str(value).strip().lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            self.fail(f"{value!r}: give True or False", param, ctx)
        return word in TRUE_WORDS


class PlanForm(click.Choice):  # type: ignore[type-arg]  # generic in newer click only
    """A form of the plan; True means text and False no plan, so that a variable or a file can be overruled."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return `text`, `json` or None."""
        word = str(value).strip().lower()
        if word in FALSE_WORDS:
            return None
        return super().convert("text" if word in TRUE_WORDS else value, param, ctx)


def option(name: str, **settings: Any) -> click.Option:
    """Return a click option that is also spelled with dashes."""
    spellings = list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))
    return click.Option([*spellings, name], **settings)
