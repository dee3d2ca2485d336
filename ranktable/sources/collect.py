"""Puts together what the generator's sources say: who the hosts are, which devices they have, and their addresses.

Device addresses also come from a pattern with {server} and {device}, or from a YAML or JSON file. A pattern such as
`192.168.{device+1}.{server+10}` suits clusters that were numbered by rule. A file maps each server id to its addresses:
`10.0.0.1: [192.168.1.10, 192.168.2.10]`, in the order of the devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ranktable.bounded_text import TextError, load_yaml
from ranktable.errors import BuildError, HostListError, SourceError
from ranktable.files import read_bytes, read_source
from ranktable.generate import HostInventory, ServerOrder, give_super_device_ids, take_hosts
from ranktable.hosts.host_list import ListedHost, parse_device_ids, parse_hosts, parse_names, select_hosts
from ranktable.hosts.hostfile import MAX_BYTES, Family, parse_hostfile
from ranktable.hosts.slurm import read_slurm_hosts
from ranktable.sources.captures import HostAnswers, find_host_files, read_answers
from ranktable.sources.local_host import Probe
from ranktable.sources.pods import read_pods

_FIELD = re.compile(r"\{(server|device)(?:\+(\d{1,6}))?\}")


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """What the user named. Exactly one source of hosts; a folder of hccn.conf copies is one when it stands alone."""

    hosts: str | None = None
    hostfile: str | None = None
    hostfile_format: Family | None = None
    """None to go by what stands in it."""
    slurm: Mapping[str, str] | None = None
    """The environment of a Slurm job."""
    pod_annotations: str | None = None
    probe: Probe | None = None
    hccn_conf: str | None = None
    devices: str | None = None
    device_ips: str | None = None
    super_device_ids: str | None = None
    include: str | None = None
    exclude: str | None = None
    device_target: str | None = None


@dataclass(frozen=True, slots=True)
class CollectedHosts:
    """The hosts, the order that their source suggests, the target that it knows, and what is worth a word."""

    hosts: tuple[HostInventory, ...]
    order: ServerOrder = "server_id"
    device_target: str | None = None
    notes: tuple[str, ...] = ()


def collect_hosts(request: SourceRequest) -> CollectedHosts:
    """Return the hosts of a request; raises ReadError, SourceError, HostListError, BuildError."""
    _check_sources(request)
    if request.pod_annotations is not None:
        collected = _collect_pods(request.pod_annotations)
    elif request.probe is not None:
        ids = None if request.devices is None else parse_device_ids(request.devices, "--devices")
        probed = request.probe.ask(request.device_target, ids)
        collected = CollectedHosts((probed.host,), "given", probed.device_target, probed.notes)
    elif request.hccn_conf is not None:
        collected = _collect_answers(request, request.hccn_conf)
    else:
        collected = _collect_list(request)
    hosts = collected.hosts
    if request.super_device_ids is not None:
        hosts = give_super_device_ids(hosts, read_super_device_ids(request.super_device_ids))
    return replace(collected, hosts=_choose(hosts, request))


def _check_sources(request: SourceRequest) -> None:
    named = {
        "--hosts": request.hosts,
        "--hostfile": request.hostfile,
        "--slurm": request.slurm,
        "--pod_annotations": request.pod_annotations,
        "--probe": request.probe,
    }
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise BuildError(f"{' and '.join(given)} both name the hosts", "give one of them")
    if not given and request.hccn_conf is None:
        raise BuildError("no source of hosts is named", f"give one of {', '.join(named)}, or --hccn_conf FOLDER")
    tells_devices = request.pod_annotations is not None or request.probe is not None
    _refuse_pair(tells_devices and request.hccn_conf is not None, f"{given[0] if given else ''} and --hccn_conf")
    _refuse_pair(tells_devices and request.device_ips is not None, f"{given[0] if given else ''} and --device_ips")
    _refuse_pair(request.hccn_conf is not None and request.device_ips is not None, "--hccn_conf and --device_ips")
    if request.pod_annotations is not None and request.devices is not None:
        raise BuildError("--devices does not go with --pod_annotations, which list them", "use --include or --exclude")


def _refuse_pair(is_given: bool, pair: str) -> None:
    if is_given:
        raise BuildError(f"{pair} both give the addresses of devices", "give one of them")


def _collect_pods(path: str) -> CollectedHosts:
    pods = read_pods(path)
    has_indices = len(pods.hosts) < 2 or all(host.rank_index is not None for host in pods.hosts)
    order: ServerOrder = "rank_index" if has_indices and pods.hosts[0].rank_index is not None else "given"
    if not has_indices:
        message = f"the {len(pods.hosts)} hosts have no hccl/rankIndex; their order is a guess without it"
        return CollectedHosts(pods.hosts, "server_id", "ascend", (*pods.notes, f"warning: {message}"))
    return CollectedHosts(pods.hosts, order, "ascend", pods.notes)


def _collect_list(request: SourceRequest) -> CollectedHosts:
    listed = _read_list(request)
    pairs = [(host.name, _device_ids_of(host, request.devices)) for host in listed]
    hosts = take_hosts(pairs, _read_addresses(request.device_ips, pairs))
    return CollectedHosts(
        tuple(replace(host, host_ip=entry.address or None) for host, entry in zip(hosts, listed, strict=True))
    )


def _read_list(request: SourceRequest) -> tuple[ListedHost, ...]:
    if request.hosts is not None:
        return parse_hosts(request.hosts, ListedHost)
    if request.hostfile is not None:
        return read_hostfile(request.hostfile, request.hostfile_format)
    return read_slurm_hosts(request.slurm or {})


def read_hostfile(path: str, family: Family | None = None) -> tuple[ListedHost, ...]:
    """Return the hosts of the file at `path` (`-` is standard input); raises ReadError, HostListError."""
    name, data = read_source(path)
    source = f"--hostfile {name}"
    if len(data) > MAX_BYTES:
        raise HostListError(f"has more than {MAX_BYTES} bytes", "write ranges: node[0001-1024] slots=8", source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        fault = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise HostListError(fault, "save it as UTF-8", f"{source}, line {line}") from error
    return parse_hostfile(text, ListedHost, source, family)


def _device_ids_of(host: ListedHost, option: str | None) -> Sequence[int]:
    ids = host.device_ids if option is None else parse_device_ids(option, "--devices")
    if not ids:
        raise BuildError(f"host {host.name!r} has no number of devices", f"write {host.name}:8, or give --devices")
    if host.slots not in (0, len(ids)):
        raise BuildError(f"host {host.name!r} has {host.slots} devices, --devices lists {len(ids)}", "leave one out")
    if 0 < host.max_slots < len(ids):
        fault = f"host {host.name!r} takes {host.max_slots} devices at most (max_slots), --devices lists {len(ids)}"
        raise BuildError(fault, "name fewer")
    return ids


def _read_addresses(option: str | None, pairs: Iterable[tuple[str, Sequence[int]]]) -> dict[str, list[str]] | None:
    if option is None:
        return None
    if "{" in option:
        return expand_pattern(option, pairs)
    return _read_lists(option, "lists of addresses", "192.168.1.1")


def expand_pattern(pattern: str, servers: Iterable[tuple[str, Sequence[int]]]) -> dict[str, list[str]]:
    """Return the addresses of every device of `servers`, ids with device ids in the order of the host list.

    `{server}` is the place of the server in that list from 0, `{device}` the device id; `+N` adds to either.
    Raises BuildError for other fields. The addresses themselves are checked by `build_table`.
    """
    rest = _FIELD.sub("", pattern)
    if "{" in rest or "}" in rest:
        raise BuildError(f"device_ips pattern {pattern!r} has an unknown field", "use {server}, {device}, {device+1}")

    def fill(server: int, device: int) -> str:
        return _FIELD.sub(lambda match: str((server if match[1] == "server" else device) + int(match[2] or 0)), pattern)

    return {
        server_id: [fill(place, device_id) for device_id in device_ids]
        for place, (server_id, device_ids) in enumerate(servers)
    }


def read_super_device_ids(path: str) -> dict[str, list[str]]:
    """Return the SDIDs in a YAML or JSON file that maps server ids to lists, one number per device in their order.

    Raises ReadError, BuildError.
    """
    return _read_lists(path, "lists of SDIDs", "37748736")


def _read_lists(path: str, what: str, example: str) -> dict[str, list[str]]:
    try:
        loaded = load_yaml(read_bytes(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BuildError(f"{path} is not YAML: not UTF-8", f"write lines such as  host-a: [{example}]") from error
    except TextError as error:
        raise BuildError(f"{path}: {error.place}{error.problem}", error.remedy) from error
    kinds = (str, int) if example.isdecimal() else (str,)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(items, list) and all(type(item) in kinds for item in items)
        for name, items in loaded.items()
    ):
        raise BuildError(f"{path} does not map server ids to {what}", f"write  host-a: [{example}]")
    return {server_id: [str(item) for item in items] for server_id, items in loaded.items()}


def parse_super_pods(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the server ids of each super pod; raises BuildError, HostListError.

    >>> parse_super_pods(["0=node[1-2];1=node3"])
    {'0': ('node1', 'node2'), '1': ('node3',)}
    """
    pods: dict[str, tuple[str, ...]] = {}
    for part in (part.strip() for text in texts for part in text.split(";")):
        pod_id, equals, hosts = part.partition("=")
        if not equals or not pod_id.strip():
            raise BuildError(f"--super_pods: {part!r} has no id before its hosts", "write --super_pods 0=node[1-2]")
        if pod_id.strip() in pods:
            raise BuildError(f"--super_pods: super pod {pod_id.strip()!r} is given twice", "name all its hosts at once")
        pods[pod_id.strip()] = tuple(parse_names(hosts, f"--super_pods {part!r}"))
    return pods


def _collect_answers(request: SourceRequest, path: str) -> CollectedHosts:
    """Take devices and addresses from what each host says; without a list of hosts they are those of the folder."""
    lists_hosts = request.hosts is not None or request.hostfile is not None or request.slurm is not None
    listed = _read_list(request) if lists_hosts else None
    if not Path(path).is_dir() and Path(path).exists():
        if listed is None or len(listed) != 1:
            message = f"{path} is one file, so it can speak for one host only"
            raise BuildError(message, "give --hosts with one host, or a folder with HOST.conf for each")
        said = {listed[0].name: read_answers(Path(path))}
        files: Mapping[str, object] = {listed[0].name: path}
    else:
        files = find_host_files(path)
        listed = tuple(ListedHost(name, source=path) for name in files) if listed is None else listed
        said = {host.name: read_answers(*_files_of(host, files, path)) for host in listed}
    ids = None if request.devices is None else parse_device_ids(request.devices, "--devices")
    hosts = tuple(_answered_host(host, said[host.name], ids) for host in listed)
    strangers = len(files.keys() - said.keys())
    notes = (f"{path}: {strangers} hosts that are not asked for are left out",) if strangers else ()
    return CollectedHosts(hosts, notes=notes)


def _files_of(host: ListedHost, files: Mapping[str, list[Path]], path: str) -> list[Path]:
    if host.name not in files:
        message = f"host {host.name!r} ({host.source}) has no {host.name}.conf, .txt, .log or {host.name}/hccn.conf"
        raise SourceError(path, None, message, f"copy /etc/hccn.conf of the host to {path}/{host.name}.conf")
    return files[host.name]


def _answered_host(host: ListedHost, answers: HostAnswers, ids: Sequence[int] | None) -> HostInventory:
    devices = answers.devices(ids, host.name)
    origin = next(iter(answers.addresses.values()), None)
    source = origin.source if origin else host.source
    # Inside one super pod devices need no address, so a host that tells SDIDs only is complete.
    needs_addresses = answers.addresses or not answers.super_device_ids
    unknown = next((device for device in devices if device.device_ip is None and needs_addresses), None)
    if unknown is not None:
        message = f"there is no address of device {unknown.device_id} of {host.name!r}"
        raise SourceError(source, None, message, "complete it, or leave the device out with --devices")
    if host.slots not in (0, len(devices)):
        message = f"it has {len(devices)} devices of {host.name!r}, {host.source} says {host.slots}"
        raise SourceError(source, None, message, "choose the devices with --devices, or correct the list of hosts")
    pod = answers.super_pod_id
    return HostInventory(host.name, devices, super_pod_id=pod.value if pod else None, origin=source)


def _choose(hosts: tuple[HostInventory, ...], request: SourceRequest) -> tuple[HostInventory, ...]:
    """Leave out what --include and --exclude leave out."""
    if request.include is None and request.exclude is None:
        return hosts
    listed = [
        ListedHost(host.server_id, len(ids), ids)
        for host in hosts
        for ids in (tuple(device.device_id for device in host.devices),)
    ]
    left = {entry.name: entry.device_ids for entry in select_hosts(listed, request.include, request.exclude)}
    return tuple(
        replace(host, devices=tuple(device for device in host.devices if device.device_id in left[host.server_id]))
        for host in hosts
        if host.server_id in left
    )
