"""From what the user gives to a checked spec: `--set` texts, values files and plans of `msrun --dry_run=json`.

A plan gives hosts, workers, devices, the script and options of msrun. Addresses, node ranks, log folders and ways to
reach hosts are those of that plan; a kind has its own.
"""

import errno
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from launch_templates import names
from launch_templates.errors import BadFile, BadValue, MissingValue, UnknownName
from launch_templates.kinds import NO_SPARES, Kind, takers
from launch_templates.msrun_options import NAMES, hint_of_option, read_options
from launch_templates.pod import TABLE_FILE, log_dir
from launch_templates.spec import DEVICE_RESOURCES, JobSpec, settings_of_spec
from launch_templates.values import parse_quantity
from ranktable.bounded_text import TextError, load_json, load_yaml
from ranktable.files import decode_text
from ranktable.files import read_text as file_text

MAX_BYTES = 16_000_000
"""Largest file of values or manifests; Kubernetes takes no object above 1.5 MB."""
_REMEDIES = {errno.EILSEQ: "save it as UTF-8", errno.EFBIG: "give a file of values or manifests"}


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Settings from `KEY=VALUE` and `TABLE.KEY=VALUE` texts, else BadValue; the last one of a key wins.

    >>> parse_settings(["nodes=4", "env.LEVEL=a=b"])
    {'nodes': '4', 'env': {'LEVEL': 'a=b'}}
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name, dot, entry = key.partition(".")
        if not equals:
            raise BadValue("--set", text, "KEY=VALUE", f"write --set {key}=VALUE")
        settings = merge_settings(settings, {name.replace("-", "_"): {entry: value} if dot else value})
    return settings


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `over`; two tables are merged key by key."""
    merged = dict(base)
    for name, value in over.items():
        before = merged.get(name)
        merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def read_values_file(path: str) -> dict[str, Any]:
    """Settings from a YAML file: one mapping of field names to values; raises BadFile when it is none."""
    try:
        content = load_yaml(read_text(path))
    except TextError as error:
        raise BadFile(path, f"{error.place}{error.problem}", error.remedy) from None
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise BadFile(path, "must be one YAML mapping of field names to values", "write lines such as nodes: 4")
    return content


def read_text(path: str) -> str:
    """Content of a UTF-8 file of at most `MAX_BYTES`, else BadFile; - is standard input."""
    try:
        if path == "-":
            return decode_text(sys.stdin.buffer.read(MAX_BYTES + 1), MAX_BYTES)
        return file_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = _REMEDIES.get(getattr(error, "errno", 0), "check the path and its permissions")
        raise BadFile(path, f"cannot be read: {reason}", remedy) from None


def read_spec(kind: Kind, given: Mapping[str, Any]) -> JobSpec:
    """The checked spec, defaults filled in.

    Raises:
        UnknownName: `given` has a name that no spec has.
        MissingValue: a field that the kind requires is not given.
        BadValue: a value breaks its constraint, or the kind has no place for it.
    """
    known = settings_of_spec()
    own = {setting.name: setting for setting in kind.settings}
    for name in given:
        if name not in known:
            raise UnknownName("setting", name, own)
    values: dict[str, Any] = {name: known[name].read(value) for name, value in given.items()}
    for name, value in values.items():
        if name not in own and value != known[name].default and name not in ("name", "image", "script"):
            why = NO_SPARES.get(kind.name) if name == "spares" else None
            constraint = f"left out: {why or f'a job of the kind {kind.name} has no place for it'}"
            raise BadValue(name, given[name], constraint, f"remove it, or choose {', '.join(takers(name))}")
    if missing := [name for name, setting in own.items() if setting.is_required and name not in given]:
        raise MissingValue(kind.name, missing)
    spec = JobSpec(**values)
    check_together(spec, own)
    if "device_target" in own and spec.device_target not in kind.device_targets:
        targets = " or ".join(kind.device_targets)
        remedy = f"add --set device_target={kind.device_targets[0]}"
        raise BadValue("device_target", spec.device_target, f"{targets} with {kind.name}", remedy)
    return spec


_SAME = ("local_worker_num", "master_port", "cluster_time_out", "log_dir", "spares", "restart_on", "no_restart_on")
OWNED_OPTIONS: dict[str, str] = {
    **{name: name for name in _SAME},
    **dict.fromkeys(("node_rank", "hosts", "hostfile", "include", "exclude", "min_hosts", "rehearse"), "nodes"),
    "worker_num": "nodes and local_worker_num",
    "master_addr": "name",
    "rank_table_file": "rank_table",
}
"""Options of msrun that a manifest gives itself, with the field that decides them."""


def check_together(spec: JobSpec, taken: Container[str]) -> None:
    """Raise BadValue for the first broken rule across fields; the kind has a place for the fields in `taken`."""
    _check_script(spec.script)
    _check_restarts(spec)
    _check_mounts(spec)
    if "shm_size" in taken and parse_quantity(spec.shm_size) >= parse_quantity(spec.memory):
        constraint = f"below memory={spec.memory}, because /dev/shm counts against it"
        raise BadValue("shm_size", spec.shm_size, constraint, "lower shm_size or raise memory")
    if spec.device_resource and spec.device_target == "CPU":
        constraint = "left out with device_target=CPU"
        raise BadValue("device_resource", spec.device_resource, constraint, "add --set device_target=GPU or Ascend")
    if both := {one["name"] for one in spec.init_containers} & {one["name"] for one in spec.sidecars}:
        raise BadValue("sidecars", min(both), "a name that no init container has", "call it otherwise")
    if spec.min_nodes and spec.min_nodes > spec.nodes:
        raise BadValue("min_nodes", spec.min_nodes, f"at most nodes={spec.nodes}", "lower it, or raise nodes")
    for name in spec.env:
        if name in spec.secret_env:
            raise BadValue(f"env.{name}", "...", "set once, but secret_env has it too", "remove one of the two")
        if names.is_secret_variable(name):
            remedy = f"create a Secret and use --set secret_env.{name}=SECRET:KEY"
            raise BadValue(f"env.{name}", "...", "no secret, because anyone who reads the manifest reads it", remedy)
    if spec.topology and "podAffinity" in spec.affinity:
        raise BadValue("topology", spec.topology, "left out, because affinity has a podAffinity", "give one of the two")


def _check_restarts(spec: JobSpec) -> None:
    if both := {*spec.restart_on} & {*spec.no_restart_on}:
        raise BadValue("no_restart_on", min(both), "another status than in restart_on", "give it in one of the two")
    if spec.spares and spec.rank_table:
        constraint = "0 with rank_table=true, because the table names the hosts of all workers"
        raise BadValue("spares", spec.spares, constraint, "give one of the two")
    if spec.max_restarts:
        return
    remedy = "set max_restarts to 1 or more"
    if spec.restart_on:
        constraint = "left out with max_restarts=0, because nothing starts again"
        raise BadValue("restart_on", ",".join(map(str, spec.restart_on)), constraint, remedy)
    if spec.spares:
        constraint = "0 with max_restarts=0, because a spare host joins when the job starts again"
        raise BadValue("spares", spec.spares, constraint, remedy)


def _check_script(script: tuple[str, ...]) -> None:
    """Options of msrun may stand before SCRIPT (`-- --bind_core=true train.py`), but not those the manifest gives."""
    line = read_options(script)
    for option, word in line.words.items():
        if option in OWNED_OPTIONS:
            remedy = f"remove it and set {OWNED_OPTIONS[option]}"
            raise BadValue("script", word, f"without --{option}, which the manifest gives itself", remedy)
        if option not in NAMES:
            remedy = hint_of_option(option, "options of the script follow its name")
            raise BadValue("script", word, "an option of msrun, as it stands before the script", remedy)
    if line.words and line.rest[:1] in (["true"], ["false"]):
        last = list(line.words.values())[-1]
        constraint = f"the script to start, and would be taken for it: {last} takes a value after = only"
        raise BadValue("script", line.rest[0], constraint, f"write {last}={line.rest[0]}")


def _check_mounts(spec: JobSpec) -> None:
    mounts = {f"claims.{claim}": path for claim, path in spec.claims.items()}
    for path, source in spec.volumes.items():
        if not names.fits(names.PATH, path) or not isinstance(source, dict) or not source or "name" in source:
            constraint = "an absolute path with a volume source, such as {nfs: {...}}, without a name"
            raise BadValue(f"volumes.{path}", source, constraint)
        mounts[f"volumes.{path}"] = path
    places = [path.removesuffix(":ro") for path in mounts.values()]
    own = ("/dev/shm", str(PurePosixPath(TABLE_FILE).parent))  # noqa: S108 - inside the pod
    log_place = PurePosixPath(log_dir(spec))
    for (name, path), place in zip(mounts.items(), places, strict=True):
        if place in own or places.count(place) > 1:
            raise BadValue(name, path, "a path that nothing else is mounted at", "choose another path")
        if path != place and PurePosixPath(place) in log_place.parents:
            constraint = f"writable, because log_dir={log_place} is on it"
            raise BadValue(name, path, constraint, "drop :ro or set another log_dir")


_FIELDS = ("max_restarts", "cluster_time_out", "master_port", "spares", "restart_on", "no_restart_on")
"""Options of msrun that are fields of a spec, of the same names."""
_PLACE = """
worker_num local_worker_num node_rank master_addr hosts hostfile rehearse min_hosts include exclude rank_table_file
log_dir join ssh ssh_config ssh_connect_time_out ssh_host_keys ssh_identity ssh_port ssh_user ssh_window ship
discover chdir python config device_target token_file tls_config metrics_file progress quiet
"""
_OF_PLACE = frozenset(_PLACE.split())
"""Options that say where and how this one run takes place."""
_HIDDEN = "********"


def read_plan(text: str, path: str) -> dict[str, Any]:
    """Fields of JobSpec that a plan says: nodes, workers, devices, script and options of msrun.

    Raises:
        BadFile: no plan of msrun, hosts of different size, or a word that the plan hides.
    """
    try:
        return dict(_fields(load_json(text), path))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise BadFile(path, "is no plan of msrun", "give the output of msrun --dry_run=json ... SCRIPT") from None


def _fields(plan: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    sizes = {len(host["workers"]) for host in plan["hosts"]}
    size = max(sizes)
    if len(sizes) > 1 or size < 1 or plan["world_size"] % size:
        problem = f"its hosts have {', '.join(map(str, sorted(sizes)))} of {plan['world_size']} workers"
        raise BadFile(path, problem, "plan a job with as many workers on every host")
    yield "nodes", plan["world_size"] // size
    yield "local_worker_num", size
    targets = {target.lower(): target for target in DEVICE_RESOURCES}
    if plan["device_target"] in targets:
        yield "device_target", targets[plan["device_target"]]
    script: list[str] = []
    for setting in plan["settings"]:
        name, value = setting["name"], setting["value"]
        if name in _FIELDS:
            yield name, value
        elif name == "grace":
            yield "grace_s", max(1, round(value))
        elif name not in _OF_PLACE:
            values = value if isinstance(value, list) else [value]
            script += [f"--{name}={str(one).lower() if isinstance(one, bool) else one}" for one in values]
    host = plan["hosts"][0]
    program, folder = host["program"], PurePosixPath(host["working_directory"])
    target = program["target"]
    if program["kind"] == "module":
        script.append("-m")
    elif PurePosixPath(target).is_relative_to(folder):  # so it is found in an image with the same files
        target = str(PurePosixPath(target).relative_to(folder))
    script += [target, *program["args"]]
    hidden = next((word for word in script if _HIDDEN in word), None)
    if hidden is not None:
        raise BadFile(path, f"hides a secret in {hidden!r}", "leave it out of the plan, and use secret_env")
    yield "script", script
