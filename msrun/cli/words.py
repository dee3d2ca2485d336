"""The words of a command line: which are options, where the script begins, and what options of torchrun, mpirun, srun,
accelerate and DeepSpeed with one clear meaning are in msrun's own words; what would mislead is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from msrun.cli.options import GROUPS, LONG_OPTIONS, MOST_USED, OPTIONAL_VALUES, TAKING_VALUE
from msrun.errors import UsageError, near_miss
from msrun.planning.program import COMMANDS, Program, find_program
from msrun.planning.settings import FALSE_WORDS, TRUE_WORDS


def normalise(argv: Sequence[str]) -> list[str]:
    """Give options with an optional value their value, up to the script; --help gets its topic, or the first screen."""
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
    """Return the options before the script with where each stands and its value (None: it has none), and where SCRIPT,
    -m or -- stands, or the number of words. `taking`: options that take the word after them, underscored."""
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
_OF_SCHEDULER = ("srun's", f"{LEAVE_OUT}: it is for srun, salloc or sbatch, which start msrun")
_OF_SCRIPT = ("accelerate's", f"{LEAVE_OUT}: it is for the script to decide")

SHARED = frozenset({"--help", "--version", "--config", "--debug", "--quiet", "--env", "--json"})
"""Options that hardly any script means for its launcher."""

LISTS = ("--hosts", "--include", "--exclude", "--tail_worker_log", "--signals")

FOREIGN_OPTIONS = {  # option of another launcher that has no meaning here -> whose it is and what to write
    "-N": ("mpirun's and srun's", "--local_worker_num (workers on each host) or --hosts (the hosts)"),
    **dict.fromkeys(("--nodes", "--nodelist", "-w"), ("srun's", _HOSTS)),
    "--config_file": ("accelerate's", "--config"),
    "--gpu_ids": ("accelerate's", "CUDA_VISIBLE_DEVICES in the environment"),
    **dict.fromkeys(("--mixed_precision", "--dynamo_backend", "--use_fsdp", "--use_deepspeed"), _OF_SCRIPT),
    "--num_cpu_threads_per_process": ("accelerate's", "OMP_NUM_THREADS in the environment"),
    "--export": ("srun's", "--env NAME or --env NAME=VALUE"),
    **dict.fromkeys(("--bind_to", "--map_by"), ("mpirun's", "--bind_core")),
    "--cpu_bind": ("srun's", "--bind_core"),
    "--output": ("srun's", "--log_dir"),
    **dict.fromkeys(("--gres", "--gpus", "--gpus_per_node", "--gpus_per_task", "--cpus_per_task"), _OF_SCHEDULER),
    **dict.fromkeys(("-c", "--mem", "--partition", "-p", "--time", "--exclusive"), _OF_SCHEDULER),
    "--signals_to_handle": ("torchrun's", f"{LEAVE_OUT}: TERM, INT, HUP and QUIT always end the job in good order"),
    **dict.fromkeys(("--mca", "-mca"), ("mpirun's", LEAVE_OUT)),
}


ALIASES = {  # option, dashes as underscores -> that of msrun, {} its value; none where what it asks for is so anyhow
    **dict.fromkeys(("-n", "-np", "--np", "--ntasks", "--num_processes"), "--worker_num={}"),
    **dict.fromkeys(("-H", "--host"), "--hosts={}"),
    **dict.fromkeys(("-hostfile", "--machinefile", "-machinefile"), "--hostfile={}"),
    "--machine_rank": "--node_rank={}",
    "--main_process_ip": "--master_addr={}",
    "--main_process_port": "--master_port={}",
    "-x": "--env={}",
    **dict.fromkeys(("-wd", "-wdir"), "--chdir={}"),
    "--output_filename": "--log_dir={}",
    "--shutdown_timeout": "--grace={}",
    "--cpu": "--device_target=cpu",
    "--detach": "--join=False",
    **dict.fromkeys(("--tag_output", "-tag-output", "--label", "-l"), "--tail_worker_log=all"),
    **dict.fromkeys(("--standalone", "--no_python", "--run_path", "--use_env", "--multi_gpu"), ""),
    **dict.fromkeys(("--oversubscribe", "--allow_run_as_root", "--report_bindings"), ""),
}
COUNTS = {  # what is counted on each host, or of hosts; of these --nnodes is msrun's, too, for a list of hosts
    **dict.fromkeys(("--nproc_per_node", "--num_gpus", "--ntasks_per_node", "--npernode", "-npernode"), "local"),
    **dict.fromkeys(("--num_machines", "--num_nodes", "--nnodes"), "hosts"),
    "--rdzv_endpoint": "endpoint",
}
WITHOUT_EFFECT = ("--rdzv_id", "--monitor_interval", "--event_log_handler")
"""Taken with their value, and said to change nothing."""
ONLY = {  # option -> the values that have a meaning here, what this is, and what to say to another one
    "--rdzv_backend": (("static", "c10d"), "", "msrun has a store of its own; leave it out, or give c10d or static"),
    "--logs_specs": (("default",), "", "every worker has a log of its own; leave it out, or give default"),
    "--numa_binding": (
        ("node",),
        "--bind_numa=True",
        "msrun binds to nodes; give node, or see --bind_core and --bind_numa",
    ),
}
OF_CONSOLE = {
    "-t": "tee",
    "--tee": "tee",
    "-r": "redirects",
    "--redirects": "redirects",
    "--local_ranks_filter": "only",
}
OF_RENDEZVOUS = {"last_call_timeout": "join_window", "join_timeout": "cluster_time_out"}
"""Of --rdzv_conf, in whole seconds; the others change nothing."""
HOST_LISTS = ("--hosts", "--hostfile", "--rehearse")
_TAKING = TAKING_VALUE.union(
    (name for name, own in ALIASES.items() if "{}" in own),
    (*COUNTS, *WITHOUT_EFFECT, *ONLY, *OF_CONSOLE, "--rdzv_conf"),
)
_COUNT = r"[1-9]\d{0,6}\Z"


def translate(
    argv: Sequence[str], environ: Mapping[str, str], count_devices: Callable[[], int]
) -> tuple[list[str], list[str]]:
    """Return a command line with every alias before the script in msrun's own words, and what of it changes nothing
    (UsageError: what msrun has no meaning for). `environ`: for PET_NNODES; `count_devices`: visible accelerators, asked
    for `auto` and `gpu` only."""
    given, end = read_options(argv, _TAKING)
    words: list[str] = []
    without_effect: list[str] = []
    counts: dict[str, tuple[str, str]] = {}
    console: dict[str, str] = {}
    module: list[str] = []
    for index, name, value in given:
        plain, text = underscored(name), value or ""
        if plain in FOREIGN_OPTIONS:
            whose, here = FOREIGN_OPTIONS[plain]
            answer = here if here.startswith(LEAVE_OUT) else f"did you mean {here}?"
            raise UsageError(f"{name} is {whose}, not an option of msrun; {answer}")
        if value is None and plain in _TAKING:
            raise UsageError(f"{name}: no value after it; msrun --help says what it takes")
        if name in ("--module", "-m"):  # torchrun takes it anywhere among its options
            module = ["-m"]
        elif plain in ALIASES:
            words += [ALIASES[plain].format(text)] if ALIASES[plain] else []
        elif plain in COUNTS:
            counts[COUNTS[plain]] = plain if plain == "--nnodes" else name, text
        elif plain in WITHOUT_EFFECT:
            without_effect.append(name)
        elif plain in OF_CONSOLE:
            console[OF_CONSOLE[plain]] = text
        elif plain in ONLY:
            values, own, why = ONLY[plain]
            if text not in values:
                raise UsageError(f"{name} {text}: {why}")
            words += [own] if own else []
        elif plain == "--rdzv_conf":
            settings = dict(part.split("=", 1) for part in text.strip("'\"").split(",") if "=" in part)
            words += [f"--{own}={settings[key]}" for key, own in OF_RENDEZVOUS.items() if key in settings]
            if settings.keys() - OF_RENDEZVOUS.keys() or not settings:
                without_effect.append(name)
        elif plain == "--start_method" and text in ("spawn", "forkserver"):  # an interpreter for each worker
            words.append("--start_method=exec")
        else:
            words += argv[index : index + (2 if value is not None and "=" not in argv[index] else 1)]
    is_listed = any(underscored(word.partition("=")[0]) in HOST_LISTS for word in words)
    if is_listed and counts.get("hosts", ("",))[0] == "--nnodes":
        words.append(f"--nnodes={counts.pop('hosts')[1]}")
    words += _counts(counts, environ, count_devices, is_listed=is_listed, words=words)
    return [*(_console(console) if console else []), *words, *module, *argv[end:]], without_effect


def _counts(
    given: Mapping[str, tuple[str, str]],
    environ: Mapping[str, str],
    count_devices: Callable[[], int],
    *,
    is_listed: bool,
    words: Sequence[str],
) -> list[str]:
    hosts, least = 1, "1"
    local, where = given.get("local"), given.get("hosts")
    if where is None and local is not None and environ.get("PET_NNODES"):  # else discovery reads it with all the others
        where = ("PET_NNODES", environ["PET_NNODES"])
    if where is not None and not is_listed:
        least, has_most, most = where[1].partition(":")
        hosts = _count(where[0], most if has_most else least)
        if _count(where[0], least) > hosts:
            raise UsageError(f"{where[0]} {where[1]}: give MIN:MAX, such as 2:4, or one number")
    result = [f"--min_hosts={least}"] if int(least) < hosts else []
    endpoint = given.get("endpoint", ("", ""))[1]
    if endpoint and hosts > 1:
        address, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        result += [f"--master_addr={address.strip('[]')}", *([f"--master_port={port}"] if port else [])]
    if local is not None:
        each = workers_here(*local, count_devices)
        return [*result, *([f"--worker_num={hosts * each}"] if hosts > 1 else []), f"--local_worker_num={each}"]
    if hosts == 1 or where is None:
        return result
    total = next((word.partition("=")[2] for word in words if word.startswith("--worker_num=")), "")
    if not total:
        each = max(1, count_devices())
        return [*result, f"--worker_num={hosts * each}", f"--local_worker_num={each}"]
    if _count("--worker_num", total) % hosts:
        raise UsageError(f"{where[0]} {hosts}: does not divide the {total} workers; give another number")
    return [*result, f"--local_worker_num={int(total) // hosts}"]


def workers_here(name: str, value: str, count_devices: Callable[[], int]) -> int:
    """Return the number of workers of a host, by torchrun's rule for its words auto, gpu and cpu (UsageError)."""
    if value == "cpu":
        return count_cpus()
    if value in ("gpu", "auto"):
        count = count_devices()
        if not count and value == "gpu":
            raise UsageError(f"{name} gpu: no accelerator is visible on this host; give a number, auto or cpu")
        return count or count_cpus()
    return _count(name, value)


def count_cpus() -> int:
    """Return how many processors msrun may use: those of its mask, and no more than its cgroup's time is worth."""
    from msrun.agent.host.host_facts import read_cgroup_limits

    limit, count = read_cgroup_limits().quota_cores, len(os.sched_getaffinity(0))
    return count if limit is None else max(1, min(count, int(limit)))


def _count(name: str, value: str) -> int:
    if not re.match(_COUNT, value):
        raise UsageError(f"{name} {value}: give a number of 1 or more")
    return int(value)


def _console(given: Mapping[str, str]) -> list[str]:
    """Return which ranks are shown here: every worker has a log of its own in any case."""
    found: dict[str, set[str] | None] = {}  # local ranks of which torchrun would tee or redirect; None = all of them
    for name in ("tee", "redirects"):
        value = given.get(name, "0")
        if re.fullmatch(r"[0-3]", value):
            found[name] = None if value != "0" else set()
        elif re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
            pairs = [part.split(":") for part in value.split(",")]
            found[name] = {str(int(rank)) for rank, streams in pairs if streams != "0"}
        else:
            raise UsageError(f"--{name} {value}: give 0 to 3, or such numbers by local rank, as in 0:3,1:0")
    shown, hidden = found["tee"], found["redirects"]
    if hidden and shown is not None:
        raise UsageError(
            f"--redirects {given['redirects']}: give one number for all ranks, or name those to show with "
            "--tail_worker_log"
        )
    ranks = "all" if shown is None or hidden == set() else ",".join(sorted(shown, key=int)) or "none"
    return [f"--tail_worker_log={given.get('only', ranks) if ranks == 'all' else ranks}"]


def describe_separate_value(words: Sequence[str]) -> str:
    """Return a hint when what is taken for SCRIPT looks like a value of the option before it, else nothing."""
    index = read_options(words)[1]
    if not 0 < index < len(words):
        return ""
    option, word = words[index - 1], words[index]
    listed = words[index - 2] if index > 1 else ""
    if underscored(listed) in LISTS and not Path(word).exists() and not find_program(word):
        return f"{listed} {option} {word}: {word} is taken for SCRIPT; a list is one word: {listed} {option},{word}"
    values = ("text", "json") if underscored(option) in ("--dry_run", "--plan") else TRUE_WORDS + FALSE_WORDS
    if underscored(option) not in OPTIONAL_VALUES or word.lower() not in values or Path(word).exists():
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
    belongs, one = ("belongs", "it") if len(unknown) == 1 else ("belong", "they")
    hint = f"{', '.join(unknown)} after {Path(program.target).name} {belongs} to the script; {one} must stand before it"
    return f"{hint} to be msrun's" if unknown else ""


HELP_WORDS = ("-h", "--help")
FIRST_SCREEN = "short"
TOPICS = ("all", *(title.lower() for title in GROUPS if title != MOST_USED))
_TOPIC = "msrun.help"
_REST = r"(?s)(?<=[.;])\s.*"
COLUMN = 28  # width of the options; the help of a wider one begins on the next line


class LaunchCommand(click.Command):
    """The command msrun: its options in groups, words of the command line in msrun's own rules."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
        grouped = {parameter for group in GROUPS.values() for parameter in group}
        rest = [one for one in self.get_params(ctx) if one not in grouped and isinstance(one, click.Option)]
        options = [*GROUPS[title], *(rest if title == list(GROUPS)[-1] else [])]
        records = [record for one in options if (record := one.get_help_record(ctx)) is not None]
        with formatter.section(_styled(title, fg="yellow", bold=True)):
            rows = [
                (_styled(f"{names:<{COLUMN}}", fg="cyan"), re.sub(_REST, "", text).rstrip(";") if is_short else text)
                for names, text in records
            ]
            formatter.write_dl(rows, col_max=COLUMN)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title in GROUPS:
            self._write_group(ctx, formatter, title)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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


def a_file(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have a shell complete files, as for SCRIPT and its arguments."""
    return [CompletionItem(incomplete, type="file")]


def _styled(text: str, **style: object) -> str:
    """Return the text with colours, which click leaves out where it does not print to a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)  # type: ignore[arg-type]
