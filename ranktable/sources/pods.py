"""Reads hosts and devices out of the annotations of Kubernetes pods: what `kubectl get pods -o json|yaml` prints.

The Ascend device plugin writes `ascend.kubectl.kubernetes.io/ascend-910-configuration` on each pod (server id and
devices with addresses), the schedulers `hccl/rankIndex` (place of the pod) and `super_pod_id`. A list of pods, one
pod, or a list of the annotation's values will do.

Source: the annotations that the Ascend device plugin and its operator write, and Volcano's reports of two ranks 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ranktable.bounded_text import TextError, load_json, load_yaml_documents
from ranktable.errors import SourceError
from ranktable.files import read_source
from ranktable.generate import HostInventory
from ranktable.model import Device
from ranktable.values import parse_number

CONFIGURATION = "ascend.kubectl.kubernetes.io/ascend-910-configuration"
RANK_INDEX = "hccl/rankIndex"
SUPER_POD_ID = "super_pod_id"

_ENDED = ("Succeeded", "Failed")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class PodHosts:
    """The hosts of the pods in the order of the file, and what was left out."""

    hosts: tuple[HostInventory, ...]
    notes: tuple[str, ...] = ()


def read_pods(path: str) -> PodHosts:
    """Return the hosts of the pods in the file at `path` (`-` is standard input); raises ReadError, SourceError."""
    name, data = read_source(path)
    return parse_pods(data, name)


def parse_pods(data: bytes, source: str = "<pods>") -> PodHosts:
    """Return the hosts of the pods in JSON or YAML text.

    Pods on one host are put together when their rank indices follow each other. Pods that have ended, and pods
    without devices and rank index, are left out with a note. Raises SourceError that names the pod.
    """
    pods, notes = [], []
    for number, value in enumerate(_find_pods(_load(data, source), source)):
        if CONFIGURATION not in _annotations(value) and "metadata" not in value:
            pods.append(_read_configuration(value, source, f"entry {number}"))
            continue
        pod, note = _read_pod(value, source, number)
        pods += [pod] if pod else []
        notes += [note] if note else []
    if not pods:
        raise SourceError(source, None, "no pod with Ascend devices is in it", "give kubectl get pods -o json")
    _check_indices(pods, source)
    return PodHosts(_join_hosts(pods, source), tuple(notes))


def _load(data: bytes, source: str) -> list[object]:
    """Return the documents of the text: JSON first, which is faster than YAML and much the same."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(source, None, f"byte 0x{data[error.start]:02x} is not UTF-8", "save it as UTF-8") from error
    try:
        return [load_json(text)]
    except TextError:
        pass
    try:
        return load_yaml_documents(text)
    except TextError as error:
        message = f"it is neither JSON nor YAML that can be read: {error.problem}"
        raise SourceError(source, error.line, message, "give what kubectl get pods -o json prints") from error


def _find_pods(documents: Iterable[object], source: str) -> Iterator[Mapping[str, object]]:
    """Yield the pods, and the annotation's values, of lists, of lists of Kubernetes (`items`) and of single ones."""
    for document in documents:
        items = document.get("items") if isinstance(document, dict) and "items" in document else document
        for item in items if isinstance(items, list) else [items]:
            value = _parse_text(item, source) if isinstance(item, str) else item
            if value is None:
                continue
            if not isinstance(value, dict):
                shown = type(value).__name__
                raise SourceError(source, None, f"a pod is an object, not {shown}", "give kubectl get pods -o json")
            yield value


def _read_pod(value: Mapping[str, object], source: str, number: int) -> tuple[HostInventory | None, str | None]:
    annotations = _annotations(value)
    name = _text(_member(value, "metadata"), "name") or f"number {number}"
    status = _member(value, "status")
    if status.get("phase") in _ENDED:
        return None, f"pod {name} has ended ({status['phase']}): left out"
    text = annotations.get(CONFIGURATION)
    if text is None:
        if RANK_INDEX not in annotations:
            return None, f"pod {name} has no Ascend devices and no rank index: left out"
        message = f"pod {name} has {RANK_INDEX} but no annotation {CONFIGURATION}"
        raise SourceError(source, None, message, "wait until the device plugin has written it, and ask again")
    parsed = _parse_text(text, source, name) if isinstance(text, str) else text
    if not isinstance(parsed, dict):
        raise SourceError(source, None, f"the configuration of pod {name} is no object", "ask kubectl again")
    host = _read_configuration(parsed, source, f"pod {name}")
    index = annotations.get(RANK_INDEX)
    if index is not None and not _INDEX.fullmatch(str(index)):
        raise SourceError(source, None, f"pod {name} has {RANK_INDEX} {index!r}", "it is to be a number from 0 on")
    pod_id = annotations.get(SUPER_POD_ID, host.super_pod_id)
    return (
        replace(
            host,
            host_ip=_text(status, "hostIP"),
            pod_ip=_text(status, "podIP"),
            rank_index=None if index is None else int(str(index)),
            super_pod_id=None if pod_id is None else str(pod_id),
        ),
        None,
    )


def _read_configuration(value: Mapping[str, object], source: str, what: str) -> HostInventory:
    """Return the host of the annotation's value: {pod_name, server_id, devices: [{device_id, device_ip}]}."""
    server_id, devices = value.get("server_id"), value.get("devices")
    if not isinstance(server_id, str) or not isinstance(devices, list) or not devices:
        message = f"{what} has no server_id with devices in its configuration"
        raise SourceError(source, None, message, "wait until the device plugin has written it, and ask again")
    found = tuple(_read_device(device, source, what) for device in devices)
    pod_id = value.get(SUPER_POD_ID)
    name = value.get("pod_name")
    origin = f"{source}: pod {name}" if what.startswith("entry") and isinstance(name, str) else f"{source}: {what}"
    return HostInventory(server_id, found, super_pod_id=None if pod_id is None else str(pod_id), origin=origin)


def _read_device(device: object, source: str, what: str) -> Device:
    members = device if isinstance(device, dict) else {}
    device_id = parse_number(members.get("device_id"))
    if device_id is None:
        message = f"a device of {what} has device_id {members.get('device_id')!r}"
        raise SourceError(source, None, message, "it is to be a number from 0 on")
    address, number = members.get("device_ip"), members.get("super_device_id")
    return Device(
        device_id,
        device_ip=str(address) if address else None,
        super_device_id=None if number in (None, "") else str(number),
    )


def _check_indices(pods: list[HostInventory], source: str) -> None:
    """Refuse doubled rank indices, and some pods with and some without."""
    owners: dict[int, HostInventory] = {}
    for pod in pods:
        if pod.rank_index is None:
            continue
        first = owners.setdefault(pod.rank_index, pod)
        if first is not pod:
            message = f"{_name(first)} and {_name(pod)} both have {RANK_INDEX} {pod.rank_index}"
            remedy = (
                "the tasks of a Volcano job (master, worker) each count from 0: number the pods over all tasks with "
                f"the hcclrank plugin or the annotation {RANK_INDEX}"
            )
            raise SourceError(source, None, message, remedy)
    without = [pod for pod in pods if pod.rank_index is None]
    if owners and without:
        message = f"{_name(without[0])} has no {RANK_INDEX}, others have"
        raise SourceError(source, None, message, "wait until the scheduler has written it on every pod")


def _join_hosts(pods: list[HostInventory], source: str) -> tuple[HostInventory, ...]:
    """Put pods on one host together; their ranks are to follow each other, or the host could not have one row."""
    has_indices = pods[0].rank_index is not None
    ordered = sorted(pods, key=lambda pod: pod.rank_index or 0) if has_indices else pods
    joined: list[HostInventory] = []
    places: dict[str, int] = {}
    for pod in ordered:
        place = places.setdefault(pod.server_id, len(joined))
        if place == len(joined):
            joined.append(pod)
            continue
        if place != len(joined) - 1:
            message = f"{_name(pod)} and {_name(joined[place])} are both on {pod.server_id}, with pods of other hosts"
            remedy = "number the pods of one host one after the other: ranks of a host stand in one row (R10)"
            raise SourceError(source, None, f"{message} between them", remedy)
        joined[place] = _join_pods(joined[place], pod, source)
    return tuple(joined)


def _join_pods(first: HostInventory, second: HostInventory, source: str) -> HostInventory:
    if first.super_pod_id != second.super_pod_id:
        message = f"{_name(first)} and {_name(second)} are on {first.server_id}, but in two super pods"
        raise SourceError(source, None, message, "ask the scheduler: a host is in one super pod")
    # Each pod has its own address; the host has none that stands for both.
    return replace(first, devices=first.devices + second.devices, pod_ip=None)


def _name(pod: HostInventory) -> str:
    return pod.origin.partition(": ")[2] or pod.server_id


def _annotations(value: Mapping[str, object]) -> Mapping[str, object]:
    return _member(_member(value, "metadata"), "annotations")


def _member(value: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _text(value: Mapping[str, object], key: str) -> str | None:
    found = value.get(key)
    return found if isinstance(found, str) and found else None


def _parse_text(text: str, source: str, name: str = "") -> object:
    try:
        return load_json(text)
    except TextError as error:
        message = f"the configuration{f' of pod {name}' if name else ''} is not JSON: {text[:40]!r}"
        raise SourceError(source, None, message, "ask kubectl again") from error
