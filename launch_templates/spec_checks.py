"""Rules that concern more than one field of a spec. Pure."""

from __future__ import annotations

from collections.abc import Container
from difflib import get_close_matches
from pathlib import PurePosixPath

from launch_templates import names
from launch_templates.errors import BadValue
from launch_templates.msrun_options import NAMES, read_options
from launch_templates.pod import TABLE_FILE, log_dir
from launch_templates.spec import JobSpec
from launch_templates.values import parse_quantity

OWNED_OPTIONS: dict[str, str] = {
    "worker_num": "nodes and local_worker_num",
    "local_worker_num": "local_worker_num",
    "master_addr": "name",
    "master_port": "master_port",
    "node_rank": "nodes",
    "cluster_time_out": "cluster_time_out",
    "log_dir": "log_dir",
    "rank_table_file": "rank_table",
    "spares": "spares",
    "restart_on": "restart_on",
    "no_restart_on": "no_restart_on",
    **dict.fromkeys(("hosts", "hostfile", "include", "exclude", "min_hosts", "rehearse"), "nodes"),
}
"""Options of msrun that a manifest gives itself, with the field that decides them."""

_OWN_PATHS = ("/dev/shm", str(PurePosixPath(TABLE_FILE).parent))  # noqa: S108 - a mount point inside the pod


def check_together(spec: JobSpec, taken: Container[str]) -> None:
    """Check the rules across fields.

    Args:
        taken: names of the fields that the kind has a place for.

    Raises:
        BadValue: the first rule that is broken.
    """
    _check_script(spec.script)
    if "shm_size" in taken:
        _check_shared_memory(spec)
    _check_device_resource(spec)
    if spec.spares and not spec.max_restarts:
        constraint = "0 with max_restarts=0, because a spare host joins when the job starts again"
        raise BadValue("spares", spec.spares, constraint, "set max_restarts to 1 or more")
    _check_restarts(spec)
    _check_environment(spec)
    _check_mounts(spec)
    if spec.topology and "podAffinity" in spec.affinity:
        raise BadValue("topology", spec.topology, "left out, because affinity has a podAffinity", "give one of the two")


def _check_restarts(spec: JobSpec) -> None:
    both = {*spec.restart_on} & {*spec.no_restart_on}
    if both:
        raise BadValue("no_restart_on", min(both), "another status than in restart_on", "give it in one of the two")
    if spec.restart_on and not spec.max_restarts:
        constraint = "left out with max_restarts=0, because nothing starts again"
        raise BadValue("restart_on", ",".join(map(str, spec.restart_on)), constraint, "set max_restarts to 1 or more")


def _check_script(script: tuple[str, ...]) -> None:
    """Options of msrun may stand before SCRIPT (`-- --bind_core=true train.py`), but not those the manifest gives."""
    line = read_options(script)
    for option, word in line.words.items():
        if option in OWNED_OPTIONS:
            remedy = f"remove it and set {OWNED_OPTIONS[option]}"
            raise BadValue("script", word, f"without --{option}, which the manifest gives itself", remedy)
        if option not in NAMES:
            near = get_close_matches(option, NAMES, n=1)
            remedy = f"did you mean --{near[0]}?" if near else "see msrun --help; options of the script follow its name"
            raise BadValue("script", word, "an option of msrun, as it stands before the script", remedy)
    if line.words and line.rest[:1] in (["true"], ["false"]):
        last = list(line.words.values())[-1]
        constraint = f"the script to start, and would be taken for it: {last} takes a value after = only"
        raise BadValue("script", line.rest[0], constraint, f"write {last}={line.rest[0]}")


def _check_shared_memory(spec: JobSpec) -> None:
    if parse_quantity(spec.shm_size) >= parse_quantity(spec.memory):
        constraint = f"below memory={spec.memory}, because /dev/shm counts against it"
        raise BadValue("shm_size", spec.shm_size, constraint, "lower shm_size or raise memory")


def _check_device_resource(spec: JobSpec) -> None:
    if spec.device_resource and spec.device_target == "CPU":
        constraint = "left out with device_target=CPU"
        raise BadValue("device_resource", spec.device_resource, constraint, "add --set device_target=GPU or Ascend")


def _check_environment(spec: JobSpec) -> None:
    for name in spec.env:
        if name in spec.secret_env:
            raise BadValue(f"env.{name}", "...", "set once, but secret_env has it too", "remove one of the two")
        if names.is_secret_variable(name):
            remedy = f"create a Secret and use --set secret_env.{name}=SECRET:KEY"
            raise BadValue(f"env.{name}", "...", "no secret, because anyone who reads the manifest reads it", remedy)


def _check_mounts(spec: JobSpec) -> None:
    mounts = {f"claims.{claim}": path for claim, path in spec.claims.items()}
    for path, source in spec.volumes.items():
        if not names.is_absolute_path(path) or not isinstance(source, dict) or not source or "name" in source:
            constraint = "an absolute path with a volume source, such as {nfs: {...}}, without a name"
            raise BadValue(f"volumes.{path}", source, constraint)
        mounts[f"volumes.{path}"] = path
    places = [path.removesuffix(":ro") for path in mounts.values()]
    log_place = log_dir(spec)
    for name, path in mounts.items():
        place = path.removesuffix(":ro")
        if place in _OWN_PATHS or places.count(place) > 1:
            raise BadValue(name, path, "a path that nothing else is mounted at", "choose another path")
        if path.endswith(":ro") and PurePosixPath(place) in PurePosixPath(log_place).parents:
            remedy = "drop :ro or set another log_dir"
            raise BadValue(name, path, f"writable, because log_dir={log_place} is on it", remedy)
