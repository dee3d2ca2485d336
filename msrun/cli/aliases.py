"""Options of torchrun, mpirun, srun, accelerate and DeepSpeed that have one clear meaning here, in msrun's own words.

What would mislead is refused by `words.FOREIGN_OPTIONS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence

from msrun.cli.options import TAKING_VALUE
from msrun.cli.words import read_options, underscored
from msrun.errors import UsageError

ALIASES = {
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
"""Option, dashes as underscores -> that of msrun, {} its value; none where what it asks for is so anyhow."""
PER_HOST = ("--nproc_per_node", "--num_gpus", "--ntasks_per_node", "--npernode", "-npernode")
HOST_COUNTS = ("--num_machines", "--num_nodes", "--nnodes")
"""Of these --nnodes is msrun's, too, for a list of hosts."""
WITHOUT_EFFECT = ("--rdzv_id", "--monitor_interval", "--event_log_handler")
"""Taken with their value, and said to change nothing."""
ONLY = {
    "--rdzv_backend": (("static", "c10d"), "", "msrun has a store of its own; leave it out, or give c10d or static"),
    "--logs_specs": (("default",), "", "every worker has a log of its own; leave it out, or give default"),
    "--numa_binding": (
        ("node",),
        "--bind_numa=True",
        "msrun binds to nodes; give node, or see --bind_core and --bind_numa",
    ),
}
"""Option -> the values that have a meaning here, what this is, and what to say to another one."""
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
    (*PER_HOST, *HOST_COUNTS, *WITHOUT_EFFECT, *ONLY, *OF_CONSOLE, "--rdzv_endpoint", "--rdzv_conf"),
)
_COUNT = re.compile(r"[1-9]\d{0,6}\Z")


def translate(
    argv: Sequence[str], environ: Mapping[str, str], count_devices: Callable[[], int]
) -> tuple[list[str], list[str]]:
    """Return a command line with every alias before the script in msrun's own words, and what of it changes nothing.

    Args:
        environ: PET_NNODES there stands for a --nnodes that is not given, as for torchrun.
        count_devices: how many accelerators are visible on this host; asked for `auto` and `gpu` only.

    Raises:
        UsageError: a value that its option cannot have, or that msrun has no meaning for.
    """
    given, end = read_options(argv, _TAKING)
    words: list[str] = []
    without_effect: list[str] = []
    counts: dict[str, tuple[str, str]] = {}
    console: dict[str, str] = {}
    module: list[str] = []
    for index, name, value in given:
        plain = underscored(name)
        if value is None and plain in _TAKING:
            raise UsageError(f"{name}: no value after it; msrun --help says what it takes")
        text = value or ""
        if name in ("--module", "-m"):  # torchrun takes it anywhere among its options
            module = ["-m"]
        elif plain in ALIASES:
            words += [ALIASES[plain].format(text)] if ALIASES[plain] else []
        elif plain in PER_HOST:
            counts["local"] = name, text
        elif plain in HOST_COUNTS:
            counts["hosts"] = plain if plain == "--nnodes" else name, text
        elif plain == "--rdzv_endpoint":
            counts["endpoint"] = name, text
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
    if is_listed and "hosts" in counts and counts["hosts"][0] == "--nnodes":
        words.append(f"--nnodes={counts.pop('hosts')[1]}")
    words += _counts(counts, environ, count_devices, is_listed=is_listed, words=words)
    shown = _console(console) if console else []
    return [*shown, *words, *module, *argv[end:]], without_effect


def _counts(
    given: Mapping[str, tuple[str, str]],
    environ: Mapping[str, str],
    count_devices: Callable[[], int],
    *,
    is_listed: bool,
    words: Sequence[str],
) -> list[str]:
    """Return how many workers there are, from the number on each host and the number of hosts."""
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
    from msrun.agent.host.host_facts import read_cgroup_limits

    limit, count = read_cgroup_limits().quota_cores, len(os.sched_getaffinity(0))
    return count if limit is None else max(1, min(count, int(limit)))


def _count(name: str, value: str) -> int:
    if not _COUNT.match(value):
        raise UsageError(f"{name} {value}: give a number of 1 or more")
    return int(value)


def _console(given: Mapping[str, str]) -> list[str]:
    """Return which ranks are shown here: every worker has a log of its own in any case."""
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
