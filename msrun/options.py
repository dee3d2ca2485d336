"""The words of the command line: every option declared once, and all of them translated into a LaunchSpec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from msrun.errors import UsageError
from msrun.option_types import Boolean, PlanForm, option
from msrun.planning.hosts.ssh_settings import CONNECT_TIME_OUT_S, HOST_KEY_POLICIES, NO_CONFIG, WINDOW, SshSettings
from msrun.planning.log_size import parse_size
from msrun.planning.placement.bind_options import parse_bind_core, parse_bind_numa
from msrun.planning.private_file import check_private
from msrun.planning.program import parse_program
from msrun.planning.settings import TOKEN_VARIABLE
from msrun.planning.spec import LaunchSpec, parse_env, parse_env_file, parse_signals, parse_tail
from msrun.planning.tls_spec import TlsSpec, parse_tls_config
from msrun.sources import read_sources

OPTIONAL_VALUES = {"--join": "true", "--bind_core": "true", "--bind_numa": "true", "--dry_run": "text"}
OPTIONAL_VALUES |= {"--ssh": "true", "--ship": "true", "--check": "true", "--quiet": "true", "--debug": "true"}
OPTIONAL_VALUES |= {"--discover": "true", "--raw": "true"}
"""Options whose value may be left out; a value is only taken after '='."""


HOST_OPTIONS = ("hosts", "hostfile", "include", "exclude", "python", "ssh")
"""Each of these makes a job one of hosts that are reached from here, or has a meaning only there."""

OPTIONS: list[click.Parameter] = [
    option("worker_num", type=int, default=8, show_default=True, help="Workers of the job, over all hosts."),
    option("local_worker_num", type=int, help="Workers on this host, or on each of --hosts.  [default: worker_num]"),
    option("master_addr", default="127.0.0.1", show_default=True, help="Address of the scheduler."),
    option(
        "master_port",
        type=int,
        default=0,
        help="Port on master_addr; 0: a free one.  [default: 0; several hosts: 8118]",
    ),
    option("node_rank", type=int, default=-1, help="Index of this host of several.  [default: by address]"),
    option(
        "discover",
        type=Boolean(),
        default=True,
        metavar="[=True|False]",
        help="Take what is not given of the above from Slurm, mpirun, Kubernetes or torchrun's PET_ variables.  "
        "[default: True]",
    ),
    option(
        "hosts",
        metavar="LIST",
        help="Start the job on these hosts: h1:8,h2:4, me@node[01-16]:8; the number is that of workers. Without it: "
        "--local_worker_num, else an even share of --worker_num, else 1.",
    ),
    option("hostfile", type=click.Path(path_type=Path), help="The same as a file of lines such as h1 slots=8."),
    option("include", metavar="LIST", help="Only these hosts and devices of the list: h1@h2:0,2-3."),
    option("exclude", metavar="LIST", help="All but these: h1@h2:0."),
    option(
        "ssh",
        type=Boolean(),
        default=False,
        metavar="[=True|False]",
        help="Start the job on the servers of --rank_table_file.",
    ),
    option("python", metavar="PATH", help="Python on the hosts, an absolute path.  [default: that of msrun here]"),
    option(
        "ship",
        type=Boolean(),
        default=False,
        metavar="[=True|False]",
        help="Send msrun's own code to the hosts, which then need none installed.",
    ),
    option(
        "forward_env",
        multiple=True,
        metavar="PATTERN",
        help="Variables that the hosts get from here, e.g. 'FOO_*', beside the usual (PATH, PYTHONPATH, OMP_*, NCCL_*, "
        "...; see --dry_run); none: not the usual; may be repeated.",
    ),
    option(
        "ssh_config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read in place of ~/.ssh/config and /etc/ssh/ssh_config; none: no such file.",
    ),
    option("ssh_user", metavar="NAME", default="", help="User on the hosts.  [default: that of ssh_config, or yours]"),
    option("ssh_port", type=int, default=0, help="Port of their sshd.  [default: that of ssh_config, or 22]"),
    option(
        "ssh_identity",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        help="Private key to try first; may be repeated.",
    ),
    option(
        "ssh_host_keys",
        type=click.Choice(HOST_KEY_POLICIES),
        help="What to do with a host whose key is not in known_hosts: refuse it, write it there once, or check no key. "
        "[default: StrictHostKeyChecking of ssh_config, or strict]",
    ),
    option(
        "ssh_connect_time_out",
        type=float,
        default=CONNECT_TIME_OUT_S,
        show_default=True,
        help="Seconds for a host to let the agent in, with all tries.",
    ),
    option("ssh_window", type=int, default=WINDOW, show_default=True, help="Hosts that are connected at a time."),
    option("token_file", type=click.Path(path_type=Path), help="File with the secret by which several hosts meet."),
    option(
        "tls_config",
        type=click.Path(path_type=Path),
        help="JSON file of certificates: several hosts and their scheduler talk through TLS.",
    ),
    option(
        "heartbeat_time_out",
        type=float,
        default=15.0,
        show_default=True,
        help="Seconds without a sign of life, or stopped, after which a host or a process of msrun is given up.",
    ),
    option("log_dir", default="log_output", show_default=True, help="Folder of all logs, the plan and the events."),
    option("join", type=Boolean(), default=True, help="Wait for the job; only --join=False detaches.  [default: True]"),
    option(
        "cluster_time_out",
        type=int,
        default=600,
        show_default=True,
        help="Seconds for all hosts to come, and for all workers to start; < 0: no limit.",
    ),
    option(
        "worker_log_name",
        default="worker",
        show_default=True,
        help="Stem of worker logs; {ip} and {hostname} are filled in.",
    ),
    option("tail_worker_log", default="0", show_default=True, help="Ranks to show here: 0,2-3, all (-1) or none."),
    option(
        "raw",
        type=Boolean(),
        default=False,
        metavar="[=True|False]",
        help="Show their lines byte for byte, with the control sequences in them, which can do much to a terminal.",
    ),
    option(
        "log_max_bytes",
        default="0",
        metavar="SIZE",
        help="Rotate a worker's log at this size, e.g. 100M or 1G; 0: never.  [default: 0]",
    ),
    option("log_keep", type=int, default=5, show_default=True, help="Rotated files that stay, per worker."),
    option("rank_table_file", type=click.Path(path_type=Path), help="Rank table of the job; generated when not given."),
    option("env", multiple=True, metavar="NAME[=VALUE]", help="Variable for every worker; may be repeated."),
    option("env_file", type=click.Path(path_type=Path), help="File of NAME=VALUE lines for every worker."),
    option("chdir", type=click.Path(path_type=Path), help="Directory that workers start in.  [default: this one]"),
    option(
        "signals",
        default="USR1,USR2",
        show_default=True,
        help="Signals that are passed on to the workers and do not end the job; none.",
    ),
    option(
        "hang_time_out",
        type=float,
        default=0.0,
        show_default=True,
        help="Seconds without progress after which stacks are written and the job is ended; 0: no limit.",
    ),
    option(
        "max_restarts",
        type=int,
        default=0,
        show_default=True,
        help="How often the whole job is started again after a failure.",
    ),
    option("grace", type=float, default=10.0, show_default=True, help="Seconds between TERM and KILL."),
    option(
        "start_method",
        type=click.Choice(["auto", "fork", "exec"]),
        default="auto",
        show_default=True,
        help="How workers start.",
    ),
    option("preload", multiple=True, metavar="MODULE", help="Import before forking, beside what the script imports."),
    option(
        "device_target",
        type=click.Choice(["auto", "cpu", "gpu", "ascend"]),
        default="auto",
        show_default=True,
        help="Devices.",
    ),
    option(
        "bind_core",
        default="false",
        metavar="[=True|False|DICT]",
        help="Give each worker cores of its own, near its device; or a JSON object {'device0': ['0-3'], ...}.",
    ),
    option(
        "bind_numa",
        default="false",
        metavar="[=True|False]",
        help="Keep each worker and its memory on one NUMA node.",
    ),
    option(
        "dry_run",
        type=PlanForm(["text", "json"]),
        help="Print the plan and start nothing; --dry_run=json for JSON.",
    ),
    option(
        "check",
        type=Boolean(),
        default=False,
        metavar="[=True|False]",
        help="Check this host for the job, line by line; start nothing.",
    ),
    option(
        "status",
        type=click.Path(path_type=Path),
        metavar="LOG_DIR",
        help="Show the job of this log directory, running or ended; start nothing.",
    ),
    option(
        "stop",
        type=click.Path(path_type=Path),
        metavar="LOG_DIR",
        help="End the job of this log directory and wait until it is gone.",
    ),
    option(
        "config",
        type=click.Path(path_type=Path),
        envvar="MSRUN_CONFIG",
        is_eager=True,
        callback=read_sources,
        help="YAML file of options, script, args and env; its paths, too, count from the current directory.",
    ),
    option("quiet", type=Boolean(), default=False, metavar="[=True|False]", help="Only errors from msrun itself."),
    option("debug", type=Boolean(), default=False, metavar="[=True|False]", help="Show msrun's own tracebacks."),
    click.Option(["-m", "module"], is_flag=True, help="SCRIPT is a module name, as for python -m."),
]
"""All options, in the order of --help."""


def normalise(argv: Sequence[str]) -> list[str]:
    """Give options with an optional value their value, up to the script, so that they never swallow its name."""
    words = list(argv)
    for index in own_options(words):
        plain = _underscored(words[index])
        if plain in OPTIONAL_VALUES:
            words[index] = f"{plain}={OPTIONAL_VALUES[plain]}"
    return words


def own_options(words: Sequence[str]) -> list[int]:
    """Return where msrun's own options stand: all before the script, values of options left out."""
    takes_value = _options_with_value() - set(OPTIONAL_VALUES)
    found: list[int] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("--", "-m"):
        found.append(index)
        index += 2 if _underscored(words[index]) in takes_value else 1
    return found


def _underscored(word: str) -> str:
    return "--" + word[2:].replace("-", "_") if word.startswith("--") else word


def _options_with_value() -> set[str]:
    return {
        _underscored(spelling)
        for parameter in OPTIONS
        if isinstance(parameter, click.Option) and not parameter.is_flag
        for spelling in parameter.opts
        if spelling.startswith("--")
    }


def build_spec(options: dict[str, Any], caller: dict[str, str]) -> LaunchSpec:
    """Translate the command line's words into a LaunchSpec.

    Raises:
        UsageError: a word that cannot be understood.
    """
    working_directory = Path(options["chdir"] or ".").absolute()
    if not working_directory.is_dir():
        raise UsageError(f"--chdir {options['chdir']}: no such directory; workers have to start somewhere")
    worker_num = options["worker_num"]
    env_file = options["env_file"]
    file_env = parse_env_file(_read_text("--env_file", env_file), str(env_file)) if env_file else ()
    return LaunchSpec(
        program=parse_program(options["words"], is_module=options["module"], working_directory=working_directory),
        worker_num=worker_num,
        local_worker_num=worker_num if options["local_worker_num"] is None else options["local_worker_num"],
        working_directory=working_directory,
        log_dir=Path(options["log_dir"]).absolute(),
        master_addr=options["master_addr"],
        master_port=options["master_port"],
        node_rank=options["node_rank"],
        cluster_time_out_s=options["cluster_time_out"],
        grace_s=options["grace"],
        forward_signals=parse_signals(options["signals"]),
        hang_time_out_s=options["hang_time_out"],
        max_restarts=options["max_restarts"],
        start_method=options["start_method"],
        device_target=options["device_target"],
        preload=tuple(options["preload"]),
        env=(*parse_env(options["env_below_file"], caller), *file_env, *parse_env(options["env"], caller)),
        token=_read_token(options["token_file"], caller),
        heartbeat_time_out_s=options["heartbeat_time_out"],
        tls=_read_tls(options["tls_config"], caller),
        forward_env=tuple(options["forward_env"]),
        ship=options["ship"],
        ssh=_ssh_settings(options),
        rank_table_file=options["rank_table_file"].absolute() if options["rank_table_file"] else None,
        worker_log_name=options["worker_log_name"],
        log_max_bytes=parse_size("--log_max_bytes", options["log_max_bytes"]),
        log_keep=options["log_keep"],
        bind_core=parse_bind_core(options["bind_core"]),
        bind_numa=parse_bind_numa(options["bind_numa"]),
        tail_ranks=parse_tail(options["tail_worker_log"], worker_num) if worker_num > 0 else (),
        is_raw_tail=options["raw"],
    )


def _ssh_settings(options: dict[str, Any]) -> SshSettings:
    config = options["ssh_config"]
    return SshSettings(
        config_file=config if config is None or str(config) == NO_CONFIG else _home("--ssh_config", config),
        user=options["ssh_user"],
        port=options["ssh_port"],
        identity_files=tuple(_home("--ssh_identity", path) for path in options["ssh_identity"]),
        host_keys=options["ssh_host_keys"],
        connect_time_out_s=options["ssh_connect_time_out"],
        window=options["ssh_window"],
    )


def _home(name: str, path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise UsageError(f"{name} {path}: there is no user {path.parts[0].removeprefix('~')!r}") from None


def _read_token(path: Path | None, caller: dict[str, str]) -> str:
    """Return the token of the file, else that of the environment; a line break at its end does not count."""
    if path is None:
        return caller.get(TOKEN_VARIABLE, "").strip()
    token = _read_text("--token_file", path).strip()
    check_private(path.stat().st_mode, f"--token_file {path}", path)
    if not token:
        raise UsageError(f"--token_file {path}: is empty; put some random letters into it, e.g. openssl rand -hex 32")
    return token


def _read_tls(path: Path | None, caller: dict[str, str]) -> TlsSpec | None:
    if path is None:
        return None
    return parse_tls_config(_read_text("--tls_config", path), str(path), str(path.absolute().parent), caller)


def _read_text(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{name} {path}: cannot be read ({reason}); give a readable text file") from None
