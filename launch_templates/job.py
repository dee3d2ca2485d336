"""From the values a user gave to everything a manifest needs: derived values and rules across values. Pure.

A manifest may use a placeholder of the catalogue or a name of DERIVED. Each derived name says which placeholders it
is made of, so that `show` can list what a template really takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

from launch_templates.catalogue import DEVICE_RESOURCES
from launch_templates.errors import BadValue
from launch_templates.msrun_options import NAMES, read_options
from launch_templates.names import is_secret_variable
from launch_templates.quantity import parse_quantity
from launch_templates.reference import escape_references

Values = Mapping[str, Any]

OWNED_OPTIONS: dict[str, str] = {
    "worker_num": "nodes and local_worker_num",
    "local_worker_num": "local_worker_num",
    "master_addr": "name",
    "master_port": "master_port",
    "node_rank": "nodes",
    "cluster_time_out": "cluster_time_out",
    "log_dir": "log_dir",
}
"""Options of msrun that every manifest gives itself, with the placeholder that decides them."""


@dataclass(frozen=True)
class Derived:
    """A value made of placeholders."""

    needs: tuple[str, ...]
    build: Callable[[Values], Any]
    """Value; None, an empty list or an empty mapping = what it stands for is left out."""


def _argv(values: Values) -> list[str]:
    return [escape_references(argument) for argument in values["script"]]


def _resources(values: Values) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": values["cpu"], "memory": values["memory"]}
    device = values["device_resource"] or DEVICE_RESOURCES[values["device_target"]]
    if device and values["device_target"] != "CPU":
        amounts[device] = values["local_worker_num"]
    return amounts


def _user_env(values: Values) -> list[dict[str, Any]]:
    literal = [{"name": name, "value": escape_references(value)} for name, value in values["env"].items()]
    return literal + [_secret_variable(name, source) for name, source in values["secret_env"].items()]


def _secret_variable(name: str, source: str) -> dict[str, Any]:
    secret, _, key = source.partition(":")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _env(values: Values) -> list[dict[str, Any]]:
    if "PYTHONUNBUFFERED" in values["env"] or "PYTHONUNBUFFERED" in values["secret_env"]:
        return _user_env(values)
    return [{"name": "PYTHONUNBUFFERED", "value": "1"}, *_user_env(values)]


def _claim_volumes(values: Values) -> list[dict[str, Any]]:
    return [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(values["claims"])
    ]


def _claim_mounts(values: Values) -> list[dict[str, Any]]:
    return [
        {"name": f"claim-{number}", "mountPath": path.removesuffix(":ro"), "readOnly": path.endswith(":ro")}
        for number, path in enumerate(values["claims"].values())
    ]


def _log_mount(values: Values) -> str | None:
    """Where the pod's own log volume goes: the parent, so that msrun itself creates (and owns) the log directory."""
    parent = PurePosixPath(values["log_dir"]).parent
    claimed = {PurePosixPath(path.removesuffix(":ro")) for path in values["claims"].values()}
    return None if claimed & {parent, *parent.parents} else str(parent)


DERIVED: dict[str, Derived] = {
    "argv": Derived(("script",), _argv),
    "worker_num": Derived(("nodes", "local_worker_num"), lambda values: values["nodes"] * values["local_worker_num"]),
    "other_nodes": Derived(("nodes",), lambda values: values["nodes"] - 1),
    "resources": Derived(("cpu", "memory", "device_target", "device_resource", "local_worker_num"), _resources),
    "user_env": Derived(("env", "secret_env"), _user_env),
    "container_env": Derived(("env", "secret_env"), _env),
    "claim_volumes": Derived(("claims",), _claim_volumes),
    "claim_mounts": Derived(("claims",), _claim_mounts),
    "log_mount": Derived(("log_dir", "claims"), _log_mount),
    "pull_secrets": Derived(
        ("pull_secret",), lambda values: [{"name": values["pull_secret"]}] if values["pull_secret"] else []
    ),
    # Volcano fails the job when its retry count, raised before each restart, reaches maxRetry; 0 means its default, 3.
    "max_retry": Derived(("max_restarts",), lambda values: values["max_restarts"] + 1),
    "failure_action": Derived(
        ("max_restarts",), lambda values: "RestartJob" if values["max_restarts"] else "TerminateJob"
    ),
    "no_network_policy": Derived(("network_policy",), lambda values: not values["network_policy"]),
}


def build_values(values: Values) -> dict[str, Any]:
    """The given values and all derived ones that can be made of them.

    Raises:
        BadValue: two values contradict each other.
    """
    check_together(values)
    derived = {name: rule.build(values) for name, rule in DERIVED.items() if all(need in values for need in rule.needs)}
    return {**values, **derived}


def check_together(values: Values) -> None:
    """Check the rules that concern more than one placeholder.

    Raises:
        BadValue: the first rule that is broken.
    """
    _check_script(values["script"])
    _check_shared_memory(values)
    _check_device_resource(values)
    _check_environment(values["env"], values["secret_env"])
    _check_claims(values)


def _check_script(script: list[str]) -> None:
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


def _check_shared_memory(values: Values) -> None:
    if parse_quantity(values["shm_size"]) >= parse_quantity(values["memory"]):
        constraint = f"below memory={values['memory']}, because /dev/shm counts against it"
        raise BadValue("shm_size", values["shm_size"], constraint, "lower shm_size or raise memory")


def _check_device_resource(values: Values) -> None:
    if values["device_resource"] and values["device_target"] == "CPU":
        constraint = "left out with device_target=CPU"
        raise BadValue(
            "device_resource", values["device_resource"], constraint, "add --set device_target=GPU or Ascend"
        )


def _check_environment(env: Mapping[str, str], secret_env: Mapping[str, str]) -> None:
    for name in env:
        if name in secret_env:
            raise BadValue(f"env.{name}", "...", "set once, but secret_env has it too", "remove one of the two")
        if is_secret_variable(name):
            remedy = f"create a Secret and use --set secret_env.{name}=SECRET:KEY"
            raise BadValue(f"env.{name}", "...", "no secret, because anyone who reads the manifest reads it", remedy)


def _check_claims(values: Values) -> None:
    paths = [path.removesuffix(":ro") for path in values["claims"].values()]
    for claim, path in values["claims"].items():
        place = path.removesuffix(":ro")
        if place == "/dev/shm" or paths.count(place) > 1:  # noqa: S108 - a mount point inside the pod
            constraint = "a path that nothing else is mounted at"
            raise BadValue(f"claims.{claim}", path, constraint, "choose another path")
        if path.endswith(":ro") and PurePosixPath(place) in PurePosixPath(values["log_dir"]).parents:
            remedy = "drop :ro or set another log_dir"
            raise BadValue(f"claims.{claim}", path, f"writable, because log_dir={values['log_dir']} is on it", remedy)
