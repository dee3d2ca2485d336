"""Options of torchrun, mpirun, srun, accelerate and DeepSpeed that have one clear meaning here, in msrun's own words.

What would mislead is refused by `words.FOREIGN_OPTIONS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msrun.cli.options import TAKING_VALUE
from msrun.cli.words import underscored
from msrun.errors import UsageError

SAME_VALUE = {
    "-n": "worker_num",
    "-np": "worker_num",
    "--np": "worker_num",
    "--ntasks": "worker_num",
    "--num_processes": "worker_num",
    "-H": "hosts",
    "--host": "hosts",
    "-hostfile": "hostfile",
    "--machinefile": "hostfile",
    "-machinefile": "hostfile",
    "--machine_rank": "node_rank",
    "--main_process_ip": "master_addr",
    "--main_process_port": "master_port",
    "-x": "env",
    "-wd": "chdir",
    "-wdir": "chdir",
    "--output_filename": "log_dir",
    "--shutdown_timeout": "grace",
}
"""Option, dashes as underscores -> that of msrun which takes its value."""
HOST_LISTS = ("--hosts", "--hostfile", "--rehearse")
PER_HOST = ("--nproc_per_node", "--num_gpus", "--ntasks_per_node", "--npernode", "-npernode")
HOST_COUNTS = ("--num_machines", "--num_nodes")
"""Beside torchrun's --nnodes, which is msrun's, too, for a list of hosts."""
SWITCHES = {
    "--cpu": ("--device_target=cpu",),
    "--detach": ("--join=False",),
    "--tag_output": ("--tail_worker_log=all",),
    "-tag-output": ("--tail_worker_log=all",),
    "--label": ("--tail_worker_log=all",),
    "-l": ("--tail_worker_log=all",),
    "--standalone": (),
    "--no_python": (),
    "--run_path": (),
    "--use_env": (),
    "--multi_gpu": (),
    "--oversubscribe": (),
    "--allow_run_as_root": (),
    "--report_bindings": (),
}
"""Switch -> words of msrun; none: what it asks for is so anyhow."""
MODULE = ("--module", "-m")
"""torchrun takes it anywhere among its options; msrun's own stands before the name of the module."""
WITHOUT_EFFECT = ("--rdzv_id", "--monitor_interval", "--event_log_handler")
"""Taken with their value, and said to change nothing."""
OF_CONSOLE = {
    "-t": "tee",
    "--tee": "tee",
    "-r": "redirects",
    "--redirects": "redirects",
    "--local_ranks_filter": "only",
}
OTHERS = ("--rdzv_backend", "--rdzv_endpoint", "--rdzv_conf", "--numa_binding", "--logs_specs")
OF_RENDEZVOUS = {"last_call_timeout": "join_window", "join_timeout": "cluster_time_out"}
"""Of --rdzv_conf, in whole seconds; the others change nothing."""
_COUNT = re.compile(r"[1-9]\d{0,6}\Z")
_OF_TORCH = ("spawn", "forkserver")
"""Start methods of torchrun that give every worker an interpreter of its own, as msrun's exec does."""


@dataclass
class Translation:
    """A command line in msrun's words."""

    words: list[str]
    without_effect: list[str] = field(default_factory=list)
    """Options, as they were typed, that change nothing here."""


@dataclass
class _Found:
    per_host: tuple[str, str] | None = None
    hosts: tuple[str, str] | None = None
    endpoint: str = ""
    console: dict[str, str] = field(default_factory=dict)


def translate(argv: Sequence[str], environ: Mapping[str, str], count_devices: Callable[[], int]) -> Translation:
    """Return a command line with every alias before the script in msrun's own words.

    Args:
        environ: PET_NNODES there stands for a --nnodes that is not given, as for torchrun.
        count_devices: how many accelerators are visible on this host; asked for `auto` and `gpu` only.

    Raises:
        UsageError: a value that its option cannot have, or that msrun has no meaning for.
    """
    end = _end_of_options(argv)
    done = Translation([])
    found = _Found()
    index = 0
    is_module = False
    while index < end:
        name, has_value, value = argv[index].partition("=")
        plain = underscored(name)
        if name in MODULE:
            is_module = True
            index += 1
            continue
        if _takes_value(plain) and not has_value:
            index += 1
            if index >= end:
                raise UsageError(f"{name}: no value after it; msrun --help says what it takes")
            value = argv[index]
        _take(name, plain, value, argv[index], done, found)
        index += 1
    if _is_listed(done.words) and found.hosts is not None and found.hosts[0] == "--nnodes":
        done.words.append(f"--nnodes={found.hosts[1]}")
        found.hosts = None
    counts = _counts(found, environ, count_devices, is_listed=_is_listed(done.words), words=done.words)
    module = ["-m"] if is_module else []
    return Translation([*_console(found.console), *done.words, *counts, *module, *argv[end:]], done.without_effect)


def _take(name: str, plain: str, value: str, word: str, done: Translation, found: _Found) -> None:
    """Take one option, with its value where it has one."""
    if plain in SAME_VALUE:
        done.words.append(f"--{SAME_VALUE[plain]}={value}")
    elif plain in SWITCHES:
        done.words += SWITCHES[plain]
    elif plain in PER_HOST:
        found.per_host = name, value
    elif plain in (*HOST_COUNTS, "--nnodes"):
        found.hosts = plain if plain == "--nnodes" else name, value
    elif plain in WITHOUT_EFFECT:
        done.without_effect.append(name)
    elif plain in OF_CONSOLE:
        found.console[OF_CONSOLE[plain]] = value
    elif plain == "--rdzv_backend":
        if value not in ("static", "c10d"):
            raise UsageError(f"{name} {value}: msrun has a store of its own; leave it out, or give c10d or static")
    elif plain == "--rdzv_conf":
        given = dict(part.split("=", 1) for part in value.strip("'\"").split(",") if "=" in part)
        done.words += [f"--{own}={given[key]}" for key, own in OF_RENDEZVOUS.items() if key in given]
        if given.keys() - OF_RENDEZVOUS.keys() or not given:
            done.without_effect.append(name)
    elif plain == "--logs_specs":
        if value != "default":
            raise UsageError(f"{name} {value}: every worker has a log of its own; leave it out, or give default")
    elif plain == "--rdzv_endpoint":
        found.endpoint = value
    elif plain == "--numa_binding":
        if value != "node":
            raise UsageError(f"{name} {value}: msrun binds to nodes; give node, or see --bind_core and --bind_numa")
        done.words.append("--bind_numa=True")
    elif plain == "--start_method" and value in _OF_TORCH:
        done.words.append("--start_method=exec")
    elif plain in TAKING_VALUE and word == value:  # of msrun's own
        done.words += [name, value]
    else:
        done.words.append(word)


def _takes_value(plain: str) -> bool:
    foreign = (*SAME_VALUE, *PER_HOST, *HOST_COUNTS, *WITHOUT_EFFECT, *OF_CONSOLE, *OTHERS)
    return plain in foreign or plain in TAKING_VALUE


def _end_of_options(words: Sequence[str]) -> int:
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        if words[index] == "-m" and not "".join(words[index + 1 : index + 2]).startswith("-"):
            break
        index += 2 if "=" not in words[index] and _takes_value(underscored(words[index])) else 1
    return min(index, len(words))


def _is_listed(words: Sequence[str]) -> bool:
    """Return whether hosts are given by a list."""
    return any(underscored(word.partition("=")[0]) in HOST_LISTS for word in words)


def _counts(
    found: _Found,
    environ: Mapping[str, str],
    count_devices: Callable[[], int],
    *,
    is_listed: bool,
    words: Sequence[str],
) -> list[str]:
    """Return how many workers there are, from the number on each host and the number of hosts."""
    hosts, least = 1, "1"
    is_told = found.per_host is not None and environ.get("PET_NNODES")  # else discovery reads it with all the others
    where = found.hosts or (("PET_NNODES", environ["PET_NNODES"]) if is_told else None)
    if where is not None and not is_listed:
        least, has_most, most = where[1].partition(":")
        hosts = _count(where[0], most if has_most else least)
        if _count(where[0], least) > hosts:
            raise UsageError(f"{where[0]} {where[1]}: give MIN:MAX, such as 2:4, or one number")
    result = [f"--min_hosts={least}"] if int(least) < hosts else []
    if found.endpoint and hosts > 1:
        address, _, port = found.endpoint.rpartition(":") if ":" in found.endpoint else (found.endpoint, "", "")
        result += [f"--master_addr={address.strip('[]')}", *([f"--master_port={port}"] if port else [])]
    if found.per_host is not None:
        each = workers_here(*found.per_host, count_devices)
        if hosts > 1:
            result.append(f"--worker_num={hosts * each}")
        result.append(f"--local_worker_num={each}")
    elif hosts > 1 and found.hosts is not None and not is_listed:
        total = next((w.partition("=")[2] for w in words if w.startswith("--worker_num=")), "")
        if not total:
            each = max(1, count_devices())
            result += [f"--worker_num={hosts * each}", f"--local_worker_num={each}"]
        elif _count("--worker_num", total) % hosts:
            raise UsageError(f"{found.hosts[0]} {hosts}: does not divide the {total} workers; give another number")
        else:
            result.append(f"--local_worker_num={int(total) // hosts}")
    return result


def workers_here(name: str, value: str, count_devices: Callable[[], int]) -> int:
    """Return the number of workers of a host, by torchrun's rule for its words auto, gpu and cpu.

    Raises:
        UsageError: neither such a word nor a number, or gpu where there is none.
    """
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
    from msrun.agent.host.cgroups import read_cgroup_limits

    limit, count = read_cgroup_limits().quota_cores, len(os.sched_getaffinity(0))
    return count if limit is None else max(1, min(count, int(limit)))


def _count(name: str, value: str) -> int:
    if not _COUNT.match(value):
        raise UsageError(f"{name} {value}: give a number of 1 or more")
    return int(value)


def _console(given: Mapping[str, str]) -> list[str]:
    """Return which ranks are shown here: every worker has a log of its own in any case."""
    if not given:
        return []
    shown, hidden = _streams(given, "tee"), _streams(given, "redirects")
    if hidden not in (set(), None) and shown is not None:
        raise UsageError(
            f"--redirects {given['redirects']}: give one number for all ranks, or name those to show with "
            "--tail_worker_log"
        )
    ranks = "all" if shown is None or hidden == set() else ",".join(map(str, sorted(shown))) or "none"
    if "only" in given and ranks == "all":
        ranks = given["only"]
    return [f"--tail_worker_log={ranks}"]


def _streams(given: Mapping[str, str], name: str) -> set[int] | None:
    """Return the local ranks of which torchrun would redirect, or tee, a stream; None = all of them."""
    value = given.get(name, "0")
    if re.fullmatch(r"[0-3]", value):
        return None if value != "0" else set()
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        raise UsageError(f"--{name} {value}: give 0 to 3, or such numbers by local rank, as in 0:3,1:0")
    pairs = [part.split(":") for part in value.split(",")]
    return {int(rank) for rank, streams in pairs if streams != "0"}
