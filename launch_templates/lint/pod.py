"""Rules on what a pod asks for and how it is called. Pure.

Sources: the Kubernetes documentation on extended resources, emptyDir and pod names; the memory limit of the default
/dev/shm (64 MiB), which ends data loaders with a bus error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launch_templates.lint.document import Document, dig, mapping, sequence, text
from launch_templates.lint.finding import Problem, Rule, Severity
from launch_templates.lint.gang import ROLES
from launch_templates.lint.invocation import find_invocations
from launch_templates.lint.workload import Container, PodSet, Workload
from launch_templates.names import MAX_LABEL_LENGTH, is_label, is_service_name
from launch_templates.values import find_quantity

_DEVICE = re.compile(r"(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|huawei\.com/(Ascend.*|npu))")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount point inside the pod
_MIN_TTL_S = 60


def _containers(workload: Workload) -> Iterator[Container]:
    for pod_set in workload.pod_sets:
        yield from (container for container in pod_set.containers if not container.is_init)


def check_names(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Names are DNS-1123 labels, those that become Services start with a letter, and the last pod's name fits."""
    name = workload.document.name
    if not is_service_name(name):
        message = f"{name!r} is no DNS label that starts with a letter, which the Service of the job needs"
        yield Problem("metadata.name", message, "use at most 63 of a-z, 0-9 and -")
    elif len(workload.longest_pod_name) > MAX_LABEL_LENGTH:
        longest = workload.longest_pod_name
        message = f"pod {longest} would have {len(longest)} characters, at most {MAX_LABEL_LENGTH} are allowed"
        yield Problem("metadata.name", message, "choose a shorter name")
    namespace = workload.document.namespace
    if namespace and not is_label(namespace):
        yield Problem("metadata.namespace", f"{namespace!r} is no DNS label", "use at most 63 of a-z, 0-9 and -")
    for container in (item for pod_set in workload.pod_sets for item in pod_set.containers):
        if not is_label(text(container.body, "name")):
            message = f"{text(container.body, 'name')!r} is no DNS label"
            yield Problem(f"{container.path}.name", message, "use at most 63 of a-z, 0-9 and -")


def check_limits(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """cpu and memory have limits, and every amount is a quantity."""
    for container in _containers(workload):
        path = f"{container.path}.resources.limits"
        limits = mapping(container.body, "resources", "limits")
        missing = [name for name in ("cpu", "memory") if name not in limits]
        if missing:
            message = f"no limit for {' and '.join(missing)}: one job can starve its host"
            yield Problem(path, message, "set limits, and requests equal to them")
        for name, amount in limits.items():
            if find_quantity(amount) is None:
                yield Problem(f"{path}.{name}", f"{amount!r} is no quantity", "write 8, 500m or 32Gi")


def check_extended_resources(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Extended resources: whole numbers, limit present, request equal to it (the API server refuses others)."""
    for container in _containers(workload):
        limits = mapping(container.body, "resources", "limits")
        requests = mapping(container.body, "resources", "requests")
        for name in [key for key in {**limits, **requests} if "/" in str(key)]:
            limit, request = find_quantity(limits.get(name)), find_quantity(requests.get(name, limits.get(name)))
            if limit is None or limit != request or limit != int(limit):
                message = f"{name}: limit {limits.get(name)}, request {requests.get(name)}; must be one whole number"
                yield Problem(
                    f"{container.path}.resources", message, "set the same whole number in both, or the limit only"
                )


def check_device_count(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """As many devices as workers in the pod."""
    for _, call in find_invocations(workload):
        workers = call.whole_number("local_worker_num")
        for name, amount in mapping(call.container.body, "resources", "limits").items():
            devices = find_quantity(amount)
            if _DEVICE.fullmatch(str(name)) and workers is not None and devices is not None and devices != workers:
                message = f"{devices} of {name} for --local_worker_num={workers}"
                path = f"{call.container.path}.resources.limits"
                yield Problem(path, message, "give each worker one device")


def check_shared_memory(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The shared memory directory is a memory volume with a size limit below the memory limit."""
    for pod_set in workload.pod_sets:
        for container in pod_set.containers:
            if not container.is_init:
                yield from _shared_memory_problems(pod_set, container)


def _shared_memory_problems(pod_set: PodSet, container: Container) -> Iterator[Problem]:
    mounts = [item for item in sequence(container.body, "volumeMounts") if text(item, "mountPath") == _SHARED_MEMORY]
    path = f"{container.path}.volumeMounts"
    if not mounts:
        message = "nothing is mounted at /dev/shm: its 64 MiB end data loaders and collectives with a bus error"
        yield Problem(path, message, "mount an emptyDir with medium: Memory and a sizeLimit there")
        return
    name = text(mounts[0], "name")
    volume = next((item for item in sequence(pod_set.spec, "volumes") if text(item, "name") == name), None)
    limit = find_quantity(dig(volume, "emptyDir", "sizeLimit"))
    memory = find_quantity(dig(container.body, "resources", "limits", "memory"))
    if text(volume, "emptyDir", "medium") != "Memory" or limit is None:
        message = f"volume {name!r} at /dev/shm is no emptyDir in memory with a sizeLimit"
        yield Problem(path, message, "set emptyDir: {medium: Memory, sizeLimit: 8Gi}")
    elif memory is not None and limit >= memory:
        message = "the sizeLimit of /dev/shm is not below the memory limit, which it counts against"
        yield Problem(path, message, "lower the sizeLimit or raise the memory limit")


def check_image(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """An image has a tag other than latest, or a digest: all pods, also later ones, run the same code."""
    for container in _containers(workload):
        image = text(container.body, "image")
        name, at, _ = image.partition("@")
        tag = name.rpartition("/")[2].partition(":")[2]
        if not at and tag in ("", "latest"):
            message = f"image {image!r} has no fixed version: pods may run different code"
            yield Problem(f"{container.path}.image", message, "add a tag other than latest, or a digest")


def check_environment(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """Values of variables are texts: 1 and true without quotes are refused by the API server."""
    for pod_set in workload.pod_sets:
        for container in pod_set.containers:
            for position, item in enumerate(sequence(container.body, "env")):
                value = mapping(item).get("value", "")
                if not isinstance(value, str):
                    written = str(value).lower() if isinstance(value, bool) else value
                    message = f"value {written} of {text(item, 'name')} is no text"
                    yield Problem(f"{container.path}.env[{position}].value", message, f'write value: "{written}"')


def check_shell(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """A shell as process 1 keeps SIGTERM to itself: no checkpoint is saved before the pod is killed."""
    for _, call in find_invocations(workload):
        if call.is_under_shell:
            message = "a shell stands before msrun and does not pass SIGTERM on"
            yield Problem(call.path, message, "write exec msrun ..., or run msrun without a shell")


def check_time_to_live(workload: Workload, _documents: Sequence[Document]) -> Iterator[Problem]:
    """The finished job stays long enough to read its logs, and not for ever."""
    if workload.kind == "TrainJob":
        return  # it stands in the runtime, which other jobs may share
    path = "spec.runPolicy.ttlSecondsAfterFinished" if workload.kind in ROLES else "spec.ttlSecondsAfterFinished"
    seconds = dig(workload.document.body, *path.split("."))
    if type(seconds) is not int or seconds < _MIN_TTL_S:
        message = "left out: finished jobs pile up" if seconds is None else f"{seconds}: the logs go with the job"
        yield Problem(path, message, "set hours to days, such as 86400")


RULES = (
    Rule("names", Severity.ERROR, check_names),
    Rule("limits", Severity.ERROR, check_limits),
    Rule("extended-resources", Severity.ERROR, check_extended_resources),
    Rule("device-count", Severity.WARNING, check_device_count),
    Rule("shared-memory", Severity.WARNING, check_shared_memory),
    Rule("image-version", Severity.WARNING, check_image),
    Rule("environment-text", Severity.ERROR, check_environment),
    Rule("shell", Severity.WARNING, check_shell),
    Rule("time-to-live", Severity.WARNING, check_time_to_live),
)
