"""What --help prints: options in groups, each once, the most used first; and the values that options may leave out."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem

from msrun.cli.foreign_words import reject_foreign_options
from msrun.cli.options import GROUPS
from msrun.cli.words import normalise, underscored

COLUMN = 28
"""Width of the options; the help of a wider one begins on the next line."""


class LaunchCommand(click.Command):
    """The command msrun: its options in groups, words of the command line in msrun's own rules."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; shell completion comes this way, too."""
        if not ctx.resilient_parsing:
            reject_foreign_options(args)
        return super().parse_args(ctx, normalise(args))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Propose options in one spelling: with dashes when the word has begun so."""
        found = super().shell_complete(ctx, incomplete)
        values = {item.value for item in found}
        return [
            item for item in found if item.value == underscored(item.value) or underscored(item.value) not in values
        ]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group."""
        grouped = {parameter for group in GROUPS.values() for parameter in group}
        rest = [one for one in self.get_params(ctx) if one not in grouped and isinstance(one, click.Option)]
        last = list(GROUPS)[-1]
        for title, group in GROUPS.items():
            records = [parameter.get_help_record(ctx) for parameter in [*group, *(rest if title == last else [])]]
            with formatter.section(_styled(title, fg="yellow", bold=True)):
                rows = [
                    (_styled(f"{record[0]:<{COLUMN}}", fg="cyan"), record[1])
                    for record in records
                    if record is not None
                ]
                formatter.write_dl(rows, col_max=COLUMN)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the line that begins with Usage."""
        pieces = self.collect_usage_pieces(ctx)
        formatter.write_usage(ctx.command_path, " ".join(pieces), prefix=_styled("Usage: ", fg="yellow", bold=True))


class ScriptWords(click.Argument):
    """SCRIPT and its arguments, which a shell completes as files."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Leave it to the shell."""
        return [CompletionItem(incomplete, type="file")]


def _styled(text: str, **style: object) -> str:
    """Return the text with colours, which click leaves out where it does not print to a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)  # type: ignore[arg-type]
