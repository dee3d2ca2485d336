"""From the words of the command line to what was asked: all options translated into a LaunchSpec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrun.cli.programs import build_program
from msrun.errors import UsageError
from msrun.planning.placement.bind_options import parse_bind_core, parse_bind_numa
from msrun.planning.program import parse_program
from msrun.planning.settings import TOKEN_VARIABLE
from msrun.planning.simulation import Simulation
from msrun.planning.spec import (
    NO_CONFIG,
    LaunchSpec,
    SshSettings,
    check_env,
    parse_env,
    parse_env_file,
    parse_signals,
    parse_size,
    parse_statuses,
    parse_tail,
)
from msrun.planning.tls_spec import TlsSpec, check_private, parse_tls_config
from ranktable.files import read_text

MINDSPORE_WORKER_NUM = 8
"""Where nobody says it. Source: mindspore/python/mindspore/parallel/cluster/run.py."""
TERM = "TERM"
"""The variable that names the kind of a terminal."""


def build_spec(options: dict[str, Any], caller: dict[str, str]) -> LaunchSpec:
    """Translate the command line's words into a LaunchSpec.

    Raises:
        UsageError: a word that cannot be understood.
    """
    working_directory = read_directory(options)
    worker_num = 1 if options["worker_num"] is None else options["worker_num"]
    tail_ranks = parse_tail(options["tail_worker_log"], worker_num) if worker_num > 0 else ()
    is_interactive = options["interactive"] is not None
    has_terminal = is_interactive and os.isatty(0)
    of_terminal = ((TERM, caller[TERM]),) if has_terminal and TERM in caller else ()
    env_file = options["env_file"]
    file_env = parse_env_file(_read_text("--env_file", env_file), str(env_file)) if env_file else ()
    return LaunchSpec(
        program=build_program(options, working_directory),
        script_source=options.get("source", ""),
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
        exit_time_out_s=options["exit_time_out"],
        time_limit_s=options["time_limit"],
        server_num=options["server_num"],
        max_restarts=options["max_restarts"],
        keep_going=options["keep_going"],
        restart_on=parse_statuses("--restart_on", options["restart_on"]),
        no_restart_on=parse_statuses("--no_restart_on", options["no_restart_on"]),
        min_hosts=options["min_hosts"] or 0,
        join_window_s=options["join_window"],
        rescale_now=options["rescale"] == "now",
        start_method=options["start_method"],
        mindspore=options["mindspore"],
        mindspore_semantics=options["mindspore_semantics"],
        device_target=options["device_target"],
        virtual_local_rank=options["virtual_local_rank"],
        is_warm=options["warm"],
        warm_time_s=options["warm_time"],
        preload=tuple(options["preload"]),
        env=(
            *of_terminal,
            *parse_env(options["env_below_file"], caller),
            *file_env,
            *parse_env(options["env"], caller),
        ),
        token=_read_token(options["token_file"], caller),
        heartbeat_time_out_s=options["heartbeat_time_out"],
        tls=_read_tls(options["tls_config"], caller),
        forward_env=tuple(options["forward_env"]),
        ship=options["ship"],
        ssh=_ssh_settings(options),
        rank_table_file=options["rank_table_file"].absolute() if options["rank_table_file"] else None,
        worker_log_name=options["worker_log_name"],
        splits_logs=options["log_split"],
        has_times=options["log_time"],
        merges_lines=options["log_once"],
        log_max_bytes=parse_size("--log_max_bytes", options["log_max_bytes"]),
        log_keep=options["log_keep"],
        log_keep_jobs=options["log_keep_jobs"],
        bind_core=parse_bind_core(options["bind_core"]),
        bind_numa=parse_bind_numa(options["bind_numa"]),
        tail_ranks=tail_ranks if not is_interactive else () if has_terminal else (options["interactive"],),
        interactive_rank=options["interactive"],
        has_terminal=has_terminal,
        is_raw_tail=options["raw"] or is_interactive,
        has_progress_line=options["progress"],
        has_trace=options["trace"],
        metrics_file=options["metrics_file"].absolute() if options["metrics_file"] else None,
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
        client=options["ssh_client"],
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
        return read_text(path)
    except OSError as error:
        raise UsageError(f"{name} {path}: cannot be read ({error.strerror}); give a readable text file") from None


_NEEDS_A_JOB = ("dry_run", "hosts", "hostfile", "server_num", "trace", "metrics_file", "rank_table_file")


def read_directory(options: Mapping[str, Any]) -> Path:
    """Return the directory in which the program starts.

    Raises:
        UsageError: there is none.
    """
    directory = Path(options["chdir"] or ".").absolute()
    if not directory.is_dir():
        raise UsageError(f"--chdir {options['chdir']}: no such directory; workers have to start somewhere")
    return directory


def build_simulation(options: dict[str, Any], caller: dict[str, str]) -> Simulation:
    """Translate the command line's words into a dry run.

    Raises:
        UsageError: a word that cannot be understood, or that only a job can obey.
    """
    for name in _NEEDS_A_JOB:
        if options[name]:
            raise UsageError(f"--sim_level and --{name}: a dry run starts no job; leave --{name} out")
    working_directory = read_directory(options)
    env = parse_env(options["env"], caller)
    for name, value in env:
        check_env(name, value)
    if options["others"]:
        raise UsageError("--sim_level and several programs: a dry run stands for a rank of one; name that one")
    worker_num = MINDSPORE_WORKER_NUM if options["worker_num"] is None else options["worker_num"]
    if isinstance(worker_num, str):
        raise UsageError(f"--sim_level and --worker_num {worker_num}: no host is looked at; give a number")
    return Simulation(
        program=parse_program(options["words"], is_module=options["module"], working_directory=working_directory),
        level=options["sim_level"],
        worker_num=worker_num,
        local_worker_num=options["local_worker_num"] or min(8, worker_num),
        global_rank=options["sim_rank_id"],
        device=options["sim_device"],
        working_directory=working_directory,
        log_dir=Path(options["log_dir"]).absolute(),
        env=env,
    )
