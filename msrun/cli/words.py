"""The words of a command line: which are msrun's own options, and where the script begins."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from msrun.cli.options import FALSE_WORDS, GROUPS, LONG_OPTIONS, MOST_USED, OPTIONAL_VALUES, TAKING_VALUE, TRUE_WORDS
from msrun.errors import UsageError, near_miss
from msrun.planning.program import COMMANDS, Program


def normalise(argv: Sequence[str]) -> list[str]:
    """Give options with an optional value their value, up to the script, so that they never swallow its name.

    --help, where it is msrun's, gets the topic that follows it, or the first screen.
    """
    words = list(argv)
    for index, name, value in read_options(words)[0]:
        if value is None and (alone := OPTIONAL_VALUES.get(underscored(name))):
            words[index] = f"{underscored(name)}={alone}"
        elif value is None and name in HELP_WORDS:
            topic = words[index + 1].lower() if index + 1 < len(words) else ""
            known = [topic] if topic in TOPICS else []
            return [*words[:index], f"--help={topic if known else FIRST_SCREEN}", *words[index + 1 + len(known) :]]
    return words


def read_options(
    words: Sequence[str], taking: Collection[str] = TAKING_VALUE
) -> tuple[list[tuple[int, str, str | None]], int]:
    """Return the options before the script with where each stands and its value, and where the script begins.

    That is the place of SCRIPT, of -m or of --, or the number of words. No value is None.

    Args:
        taking: the options that take the word after them, dashes as underscores.
    """
    found: list[tuple[int, str, str | None]] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        name, has_value, value = words[index].partition("=")
        if name == "-m" and not "".join(words[index + 1 : index + 2]).startswith("-"):
            break
        takes_next = not has_value and underscored(name) in taking
        after = words[index + 1] if takes_next and index + 1 < len(words) else None
        found.append((index, name, value if has_value else after))
        index += 2 if takes_next else 1
    return found, min(index, len(words))


def underscored(word: str) -> str:
    """Return an option as it is declared: --log-dir as --log_dir, a single dash as it is."""
    return "--" + word[2:].replace("-", "_") if word.startswith("--") else word


_HOSTS = "--hosts h1:8,h2:8 (with the number of workers on each)"
LEAVE_OUT = "leave it out"
_OF_SCHEDULER = "leave it out: it is for srun, salloc or sbatch, which start msrun"
_OF_SCRIPT = "leave it out: it is for the script to decide"

SHARED = frozenset({"--help", "--version", "--config", "--debug", "--quiet", "--env", "--json"})
"""Options that hardly any script means for its launcher."""

LISTS = ("--hosts", "--include", "--exclude", "--tail_worker_log", "--signals")
"""Options with values between commas."""

FOREIGN_OPTIONS = {
    "-N": ("mpirun's and srun's", "--local_worker_num (workers on each host) or --hosts (the hosts)"),
    "--nodes": ("srun's", _HOSTS),
    "--nodelist": ("srun's", _HOSTS),
    "-w": ("srun's", _HOSTS),
    "--config_file": ("accelerate's", "--config"),
    "--gpu_ids": ("accelerate's", "CUDA_VISIBLE_DEVICES in the environment"),
    "--mixed_precision": ("accelerate's", _OF_SCRIPT),
    "--dynamo_backend": ("accelerate's", _OF_SCRIPT),
    "--use_fsdp": ("accelerate's", _OF_SCRIPT),
    "--use_deepspeed": ("accelerate's", _OF_SCRIPT),
    "--num_cpu_threads_per_process": ("accelerate's", "OMP_NUM_THREADS in the environment"),
    "--export": ("srun's", "--env NAME or --env NAME=VALUE"),
    "--bind_to": ("mpirun's", "--bind_core"),
    "--map_by": ("mpirun's", "--bind_core"),
    "--cpu_bind": ("srun's", "--bind_core"),
    "--output": ("srun's", "--log_dir"),
    "--gres": ("srun's", _OF_SCHEDULER),
    "--gpus": ("srun's", _OF_SCHEDULER),
    "--gpus_per_node": ("srun's", _OF_SCHEDULER),
    "--gpus_per_task": ("srun's", _OF_SCHEDULER),
    "--cpus_per_task": ("srun's", _OF_SCHEDULER),
    "-c": ("srun's", _OF_SCHEDULER),
    "--mem": ("srun's", _OF_SCHEDULER),
    "--partition": ("srun's", _OF_SCHEDULER),
    "-p": ("srun's", _OF_SCHEDULER),
    "--time": ("srun's", _OF_SCHEDULER),
    "--exclusive": ("srun's", _OF_SCHEDULER),
    "--signals_to_handle": ("torchrun's", "leave it out: TERM, INT, HUP and QUIT always end the job in good order"),
    "--mca": ("mpirun's", LEAVE_OUT),
    "-mca": ("mpirun's", LEAVE_OUT),
}
"""Option of another launcher that msrun does not take (see `aliases` for those that it does), dashes as underscores ->
whose it is and what to write here."""


def reject_foreign_options(words: Sequence[str]) -> None:
    """Answer an option of another launcher, before the script, with what to write here (UsageError: there is one)."""
    for _, name, _ in read_options(words)[0]:
        if underscored(name) in FOREIGN_OPTIONS:
            whose, here = FOREIGN_OPTIONS[underscored(name)]
            answer = here if here.startswith(LEAVE_OUT) else f"did you mean {here}?"
            raise UsageError(f"{name} is {whose}, not an option of msrun; {answer}")


def describe_separate_value(words: Sequence[str]) -> str:
    """Return a hint when what is taken for SCRIPT looks like a value of the option before it, else nothing."""
    index = read_options(words)[1]
    if not 0 < index < len(words):
        return ""
    option, word = words[index - 1], words[index]
    listed = words[index - 2] if index > 1 else ""
    if underscored(listed) in LISTS and not Path(word).exists() and not shutil.which(word):
        return f"{listed} {option} {word}: {word} is taken for SCRIPT; a list is one word: {listed} {option},{word}"
    is_plan = underscored(option) in ("--dry_run", "--plan")
    is_page = underscored(option) == "--plan" and word.lower().endswith(".html")
    values = ("text", "json") if is_plan else TRUE_WORDS + FALSE_WORDS
    is_value = is_page or (underscored(option) in OPTIONAL_VALUES and word.lower() in values)
    if not is_value or Path(word).exists():
        return ""
    return f"{option} {word}: {word} is taken for SCRIPT; write {option}={word} if it is the value"


def describe_late_options(program: Program) -> str:
    """Return a hint when options of msrun's stand after a script that does not speak of them, else nothing."""
    names = [underscored(word.partition("=")[0]) for word in program.args if word.startswith("--") and word != "--"]
    late = [name for name in dict.fromkeys(names) if name in LONG_OPTIONS - SHARED]
    if not late or program.kind != "script":
        return ""
    try:
        text = Path(program.target).read_text(encoding="utf-8", errors="replace").replace("-", "_")
    except OSError:
        return ""
    unknown = [name for name in late if name[2:] not in text]
    if not unknown:
        return ""
    one = "it" if len(unknown) == 1 else "they"
    belongs = "belongs" if len(unknown) == 1 else "belong"
    return (
        f"{', '.join(unknown)} after {Path(program.target).name} {belongs} to the script; "
        f"{one} must stand before it to be msrun's"
    )


HELP_WORDS = ("-h", "--help")
FIRST_SCREEN = "short"
TOPICS = ("all", *(title.lower() for title in GROUPS if title != MOST_USED))
"""What may follow --help."""
_TOPIC = "msrun.help"
_SENTENCE = re.compile(r"(?<=[.;])\s.*", re.DOTALL)
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

    def get_help_option(self, ctx: click.Context) -> click.Option:
        """Return --help, which may be followed by a topic."""
        return click.Option(
            [*ctx.help_option_names],
            is_eager=True,
            expose_value=False,
            callback=_show_help,
            metavar="[all|GROUP]",
            help=f"Show the most used options, all, or one group of them: {', '.join(TOPICS)}.",
        )

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first screen, all, or one group of options."""
        topic = ctx.meta.get(_TOPIC, "all")
        if topic == "all":
            super().format_help(ctx, formatter)
        elif topic == FIRST_SCREEN:
            self.format_usage(ctx, formatter)
            formatter.write_paragraph()
            formatter.write_text(" ".join(str(self.help).split()))
            self._write_group(ctx, formatter, MOST_USED, is_short=True)
            with formatter.section(_styled("Examples", fg="yellow", bold=True)):
                for line in str(self.epilog).split("Examples:\n")[1].splitlines()[:4]:
                    formatter.write(f"{line}\n")
            formatter.write_paragraph()
            formatter.write_text(
                f"msrun --help all shows every option, --help GROUP one group: {', '.join(TOPICS[1:])}."
            )
            formatter.write_text(f"Commands, each with a --help of its own: msrun {', '.join(COMMANDS)}.")
        else:
            self._write_group(ctx, formatter, next(title for title in GROUPS if title.lower() == topic))

    def _write_group(
        self, ctx: click.Context, formatter: click.HelpFormatter, title: str, *, is_short: bool = False
    ) -> None:
        """Write the section of one group; short: the first sentence about each option."""
        grouped = {parameter for group in GROUPS.values() for parameter in group}
        rest = [one for one in self.get_params(ctx) if one not in grouped and isinstance(one, click.Option)]
        options = [*GROUPS[title], *(rest if title == list(GROUPS)[-1] else [])]
        records = [record for one in options if (record := one.get_help_record(ctx)) is not None]
        with formatter.section(_styled(title, fg="yellow", bold=True)):
            rows = [
                (_styled(f"{names:<{COLUMN}}", fg="cyan"), _SENTENCE.sub("", text).rstrip(";") if is_short else text)
                for names, text in records
            ]
            formatter.write_dl(rows, col_max=COLUMN)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group."""
        for title in GROUPS:
            self._write_group(ctx, formatter, title)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the line that begins with Usage."""
        pieces = self.collect_usage_pieces(ctx)
        formatter.write_usage(ctx.command_path, " ".join(pieces), prefix=_styled("Usage: ", fg="yellow", bold=True))


def _show_help(ctx: click.Context, _option: click.Parameter, topic: str | None) -> None:
    if topic is None:
        return
    if topic not in (FIRST_SCREEN, *TOPICS):
        raise UsageError(f"--help={topic}: no such group{near_miss(topic, TOPICS)}; the groups are {', '.join(TOPICS)}")
    ctx.meta[_TOPIC] = topic
    click.echo(ctx.get_help(), color=ctx.color)
    ctx.exit()


class ScriptWords(click.Argument):
    """SCRIPT and its arguments, which a shell completes as files."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Leave it to the shell."""
        return [CompletionItem(incomplete, type="file")]


def _styled(text: str, **style: object) -> str:
    """Return the text with colours, which click leaves out where it does not print to a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)  # type: ignore[arg-type]
