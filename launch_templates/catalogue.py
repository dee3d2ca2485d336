"""The placeholders that manifests may use: one table, so that a name means the same in every template. Pure data."""

from __future__ import annotations

from launch_templates import names
from launch_templates.placeholder import (
    REQUIRED,
    Amount,
    Argv,
    Choice,
    Flag,
    Placeholder,
    Table,
    Text,
    Whole,
    is_process_text,
)

DEVICE_RESOURCES: dict[str, str | None] = {"CPU": None, "GPU": "nvidia.com/gpu", "Ascend": "huawei.com/Ascend910"}
"""Extended resource that a pod asks for, by device target; other device plugins: set `device_resource`."""


def _is_name(text: str) -> bool:
    return names.is_service_name(text)


def _is_mount(text: str) -> bool:
    return names.is_absolute_path(text.removesuffix(":ro"))


def _is_secret_source(text: str) -> bool:
    secret, colon, key = text.partition(":")
    return bool(colon) and names.is_subdomain(secret) and names.is_secret_key(key)


def _is_own_variable(name: str) -> bool:
    return names.is_variable(name) and name not in names.RANK_VARIABLES


def _is_log_dir(text: str) -> bool:
    return names.is_absolute_path(text) and text.count("/") >= 2


_NAME = Text(_is_name, "a DNS label: at most 63 of a-z, 0-9 and -, first a letter, last no -")
_SUBDOMAIN = Text(names.is_subdomain, "a DNS name of a-z, 0-9, - and .")
_OWN_VARIABLE = f"a variable name of A-Z, a-z, 0-9 and _, none of {', '.join(names.RANK_VARIABLES)}"

CATALOGUE: tuple[Placeholder, ...] = (
    Placeholder("name", _NAME, REQUIRED, "name of the job; pods and the Service are named after it"),
    Placeholder(
        "image", Text(names.is_image, "an image reference"), REQUIRED, "image with Python, msrun and the script"
    ),
    Placeholder("script", Argv(), REQUIRED, "what msrun starts: SCRIPT ARGS, given after --"),
    Placeholder("namespace", Text(names.is_label, "a DNS label"), None, "namespace; left out: that of kubectl"),
    Placeholder("nodes", Whole(1, 100_000), 2, "number of pods, one msrun each"),
    Placeholder("local_worker_num", Whole(1, 1024), 8, "workers in one pod; with a device target also devices"),
    Placeholder("device_target", Choice(tuple(DEVICE_RESOURCES)), "CPU", "which device each worker gets"),
    Placeholder(
        "device_resource",
        Text(lambda text: "/" in text and names.is_qualified_name(text), "DOMAIN/NAME"),
        None,
        "extended resource of the device plugin; left out: nvidia.com/gpu for GPU, huawei.com/Ascend910 for Ascend",
    ),
    Placeholder("cpu", Amount(), "8", "cores of one pod, request and limit"),
    Placeholder("memory", Amount(), "32Gi", "memory of one pod, request and limit; /dev/shm counts against it"),
    Placeholder("shm_size", Amount(), "8Gi", "limit of the memory volume at /dev/shm"),
    Placeholder("master_port", Whole(1024, 65535), 8118, "rendezvous port of the pod with node rank 0"),
    Placeholder("cluster_time_out", Whole(1), 600, "seconds that msrun waits for all pods to register"),
    Placeholder(
        "log_dir",
        Text(_is_log_dir, "an absolute path below another directory, such as /logs/log_output"),
        "/logs/log_output",
        "log directory; its parent is a volume of the pod unless it lies on a claim",
    ),
    Placeholder("max_restarts", Whole(0, 1000), 0, "how often the whole job starts again after a failure"),
    Placeholder("deadline_s", Whole(1), None, "seconds after which the job is ended; left out: never"),
    Placeholder("grace_s", Whole(1), 120, "seconds between SIGTERM and SIGKILL of a pod: time to save a checkpoint"),
    Placeholder("ttl_s", Whole(60), 86400, "seconds that the finished job, and so its logs, stay"),
    Placeholder("queue", _SUBDOMAIN, None, "queue: Kueue LocalQueue, or the queue of Volcano"),
    Placeholder("network_policy", Flag(), default=True, meaning="only pods of this job may connect to its pods"),
    Placeholder("user_id", Whole(1), 1000, "user and group of the process; 0 (root) is not possible"),
    Placeholder("pull_secret", _SUBDOMAIN, None, "Secret with which to pull the image"),
    Placeholder(
        "node_selector",
        Table(names.is_qualified_name, names.is_label_value, "label keys with label values"),
        {},
        "labels that a node must have: --set node_selector.KEY=VALUE",
    ),
    Placeholder(
        "env",
        Table(_is_own_variable, is_process_text, f"{_OWN_VARIABLE}, with a text in UTF-8 without NUL"),
        {},
        "environment, literally: --set env.NAME=VALUE",
    ),
    Placeholder(
        "secret_env",
        Table(_is_own_variable, _is_secret_source, f"{_OWN_VARIABLE}, with SECRET:KEY"),
        {},
        "environment from a Secret: --set secret_env.NAME=SECRET:KEY",
    ),
    Placeholder(
        "claims",
        Table(names.is_subdomain, _is_mount, "names of PersistentVolumeClaims with an absolute path, :ro at its end"),
        {},
        "volumes that exist already: --set claims.CLAIM=/PATH or /PATH:ro",
    ),
)

BY_NAME: dict[str, Placeholder] = {placeholder.name: placeholder for placeholder in CATALOGUE}
