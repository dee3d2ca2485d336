"""A job as `msrun --dry_run=json` printed it, as fields of JobSpec. Pure.

Hosts, addresses, node ranks, log folders and ways to reach hosts are those of this plan; a kind has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from launch_templates.errors import BadFile
from ranktable.bounded_text import load_json

_FIELDS = {
    "max_restarts": "max_restarts",
    "cluster_time_out": "cluster_time_out",
    "master_port": "master_port",
    "spares": "spares",
    "restart_on": "restart_on",
    "no_restart_on": "no_restart_on",
}
"""Options of msrun that are fields of a spec."""
_PLACE = """
worker_num local_worker_num node_rank master_addr hosts hostfile rehearse min_hosts include exclude rank_table_file
log_dir join ssh ssh_client ssh_config ssh_connect_time_out ssh_host_keys ssh_identity ssh_port ssh_user ssh_window ship
discover chdir python config device_target token_file tls_config metrics_file progress quiet
"""
_OF_PLACE = frozenset(_PLACE.split())
"""Options that say where and how this one run takes place."""
_HIDDEN = "********"
_TARGETS = {"gpu": "GPU", "ascend": "Ascend", "cpu": "CPU"}


def read_plan(text: str, path: str) -> dict[str, Any]:
    """Fields of JobSpec that a plan says: nodes, workers, devices, script and options of msrun.

    Raises:
        BadFile: no plan of msrun, hosts of different size, or a word that the plan hides.
    """
    try:
        plan = load_json(text)
        return dict(_fields(plan, path))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        problem = "is no plan of msrun"
        raise BadFile(path, problem, "give the output of msrun --dry_run=json ... SCRIPT") from None


def _fields(plan: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    sizes = {len(host["workers"]) for host in plan["hosts"]}
    size = max(sizes)
    if len(sizes) > 1 or size < 1 or plan["world_size"] % size:
        problem = f"its hosts have {', '.join(map(str, sorted(sizes)))} of {plan['world_size']} workers"
        raise BadFile(path, problem, "plan a job with as many workers on every host")
    yield "nodes", plan["world_size"] // size
    yield "local_worker_num", size
    if plan["device_target"] in _TARGETS:
        yield "device_target", _TARGETS[plan["device_target"]]
    options: list[str] = []
    for setting in plan["settings"]:
        name, value = setting["name"], setting["value"]
        if name in _FIELDS:
            yield _FIELDS[name], value
        elif name == "grace":
            yield "grace_s", max(1, round(value))
        elif name not in _OF_PLACE:
            options += [f"--{name}={_word(item)}" for item in (value if isinstance(value, list) else [value])]
    script = [*options, *_program(plan["hosts"][0])]
    hidden = next((word for word in script if _HIDDEN in word), None)
    if hidden is not None:
        raise BadFile(path, f"hides a secret in {hidden!r}", "leave it out of the plan, and use secret_env")
    yield "script", script


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _program(host: dict[str, Any]) -> list[str]:
    """The program with its path as from the working directory, so that it is found in an image with the same files."""
    program = host["program"]
    target = program["target"]
    folder = PurePosixPath(host["working_directory"])
    if program["kind"] == "module":
        return ["-m", target, *program["args"]]
    if PurePosixPath(target).is_relative_to(folder):
        target = str(PurePosixPath(target).relative_to(folder))
    return [target, *program["args"]]
