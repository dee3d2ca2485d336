"""Tables with one `server_list` whose scalars are strings: versions 1.0 to 1.4.

- 1.0: read by HCCL on 910A, A2 and 300I Duo; on A3 it means servers without a super pod. `super_pod_list` and
  `super_device_id` are not read: HCCL goes by the version, so they are reported and kept.
- 1.2: 1.0 with super pods, read by HCCL on A3 with the same parser.
- volcano-job: what Volcano's plugin configmap1980 writes with version 1.3. It counts its writings in `data_version` and
  names the switch above each device. With versions 1.0 and 1.2 it adds the same keys, which are known there too.
- volcano-global: version 1.4, one job over several clusters: 1.2 with `cluster_list[].super_pod_list`.
- cross-cluster: version 1.0 with `cluster_list[].server_list`, for MindSpore, which goes by that key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from ranktable.dialects.servers import SERVER, SUPER_POD, SUPER_POD_SERVER, TableForm, cluster_schema
from ranktable.edit.convert import EXTRAS, join_servers, list_losses
from ranktable.errors import BuildError
from ranktable.kinds import Converted, ConvertWishes, Dialect, Entry, Survey, dialect_of, find_repeats, rule_ids
from ranktable.model import Device, RankTable, Server, SuperPod
from ranktable.problem import Problem
from ranktable.profile import ANY_TARGET, Profile
from ranktable.rules import citations
from ranktable.rules.registry import rule
from ranktable.schema import Count, Field, Members, Schema
from ranktable.text import count_noun
from ranktable.values import parse_address

PLAIN, SUPER_PODS = "1.0", "1.2"
"""The dialects that are generated."""
SERVER_COUNT = Field("server_count", "number", missing="warning", rule="R6", count=Count(("server_list",), "server"))
LISTED_RULES = "R6 R7 R8 R9 R10 R12 R13 R14 R15 R16 R21 R22 R23 R27 P1 P2 P6"
"""What holds for every list of servers and their devices."""
SUPER_POD_RULES = "R24 R25 R26 P3"
_ORDER = "R11"
_OF_910A = "R17 R18 R19 R20"
_OF_MINDIE_LLM = "P10 P11 P12 P13 P14 P15"
_HEAD = (Field("version"), Field("status", missing="error"))
_EXTRAS = frozenset({"cluster_list", "data_version", "hardware_type", "super_pod_list"})
_POD_LIST = Field("super_pod_list", "list", of=SUPER_POD)
_DATA_VERSION = Field("data_version", "integer", missing="warning", rule="R4")
_UNREAD_PODS = Field("super_pod_list", "unread", of=SUPER_POD)
_CLUSTERS = {
    key: Field("cluster_list", "list", missing="error", of=cluster_schema(key))
    for key in ("server_list", "super_pod_list")
}
_KEPT_IN_FAMILY = frozenset({"device_id", "device_ip", "host_ip", "pod_ip", EXTRAS})
_KEPT_FROM_OTHERS = frozenset({"device_id", "device_ip", "pod_name"})
_OWN_EXTRAS = frozenset({"data_version"})
"""Keys at the top that belong to the dialect that is left."""


def _schema(server: Schema, *more: Field) -> Schema:
    servers = Field("server_list", "list", missing="error", role="servers", of=server)
    return Schema((*_HEAD, SERVER_COUNT, servers, *more), _EXTRAS)


def _has_version(version: str) -> Callable[[Members], str]:
    def find_evidence(value: Members) -> str:
        is_it = "server_list" in value and value.get("version") == version
        return f'server_list with version "{version}"' if is_it else ""

    return find_evidence


def _is_super_pod(value: Members) -> str:
    """Version 1.2, or a super pod list without a version. Version 1.0 with one stays 1.0: HCCL goes by the version."""
    found = _has_version(SUPER_PODS)(value)
    return found or ("super_pod_list and no version" if "super_pod_list" in value and "version" not in value else "")


def _is_cross_cluster(value: Members) -> str:
    """Version 1.0 with clusters: MindSpore goes by the key, HCCL skips it."""
    is_it = "server_list" in value and "cluster_list" in value and value.get("version", PLAIN) == PLAIN
    return f'cluster_list with version "{PLAIN}"' if is_it else ""


def _is_plain(value: Members) -> str:
    if "server_list" in value:
        return "server_list"
    return f'version "{PLAIN}"' if value.get("version") == PLAIN else ""


def _to_super_pods(table: RankTable, wishes: ConvertWishes) -> Converted:
    with_pods = _add_super_pods(_read_raw_super_pods(table), wishes)
    return _to_server_list(with_pods, SUPER_PODS, frozenset({"super_device_id", "super_pod_list"}))


def _to_plain(table: RankTable, _wishes: ConvertWishes) -> Converted:
    return _to_server_list(table, PLAIN)


def _to_server_list(table: RankTable, dialect: str, keeps: frozenset[str] = frozenset()) -> Converted:
    """Return the table in a dialect of `server_list[].device[]`."""
    is_family = rule_ids(LISTED_RULES) <= dialect_of(table.dialect).rules
    keeps = keeps | (_KEPT_IN_FAMILY if is_family else _KEPT_FROM_OTHERS)
    own = {key: value for key, value in table.extra.items() if key in _OWN_EXTRAS}
    lost = list_losses(replace(table, status="completed"), keeps)
    lost += tuple(f"{key} of the table" for key in own if is_family)
    extra = {key: value for key, value in table.extra.items() if is_family and key not in own}
    servers = tuple(_plain_server(server, keeps, is_family=is_family) for server in join_servers(table.servers))
    pods = table.super_pods if "super_pod_list" in keeps else ()
    return Converted(RankTable(dialect, servers, table.status, len(servers), pods, extra=extra), lost)


def _plain_server(server: Server, keeps: frozenset[str], *, is_family: bool) -> Server:
    devices = tuple(_plain_device(device, keeps, is_family=is_family) for device in server.devices)
    return replace(server, devices=devices, extra=server.extra if is_family else {})


def _plain_device(device: Device, keeps: frozenset[str], *, is_family: bool) -> Device:
    extra = {key: value for key, value in device.extra.items() if is_family or key in keeps}
    number = device.super_device_id if "super_device_id" in keeps else None
    # Template 2 writes an empty address where there is none.
    return replace(device, device_ip=device.device_ip or None, super_device_id=number, extra=extra)


def _add_super_pods(table: RankTable, wishes: ConvertWishes) -> RankTable:
    """Return the table with super pods and super device ids, its own or those of `wishes`, held to R24 and R25."""
    from ranktable.generate import give_super_device_ids
    from ranktable.validate import hold_to_rules

    if table.super_pods and wishes.super_pods:
        raise BuildError("the table has super pods of its own", "leave --super_pods out")
    if not table.super_pods and not wishes.super_pods:
        message = "the table does not say which servers make a super pod, which version 1.2 is for"
        raise BuildError(message, "give --super_pods ID=SERVERS for each")
    pods = tuple(SuperPod(pod_id, tuple(members)) for pod_id, members in wishes.super_pods)
    servers = give_super_device_ids(table.servers, wishes.super_device_ids)
    missing = sum(device.super_device_id is None for server in servers for device in server.devices)
    if missing:
        what = f"{count_noun(missing, 'device')} of the table have no super_device_id"
        remedy = "give --super_device_ids with what npu-smi info -t spod-info says"
        raise BuildError(f"{what}, which HCCL demands in a super pod", remedy)
    added = replace(table, servers=servers, super_pods=pods or table.super_pods)
    if wishes.super_pods or wishes.super_device_ids:  # a table's own super pods are noted as its own fault
        plain = tuple(replace(server, group=None, extra={}) for server in join_servers(added.servers))
        hold_to_rules(RankTable(SUPER_PODS, plain, super_pods=added.super_pods), ANY_TARGET, only=("R24", "R25"))
    return added


def _read_raw_super_pods(table: RankTable) -> RankTable:
    """Read super pods that stand in a table whose version does not have them: there they are kept, but not read."""
    if "super_pod_list" not in table.extra:
        return table
    from ranktable.tables import encode_document, parse_table
    from ranktable.text import render_json

    value = {**encode_document(table), "version": SUPER_PODS}
    return parse_table(render_json(value), "the table with its super pods")


@rule(
    "P4",
    "cluster_list has unique clusters that cover every server or super pod once, and no others",
    is_whole=True,
    sources=(citations.MINDSPORE, citations.VOLCANO),
)
def check_clusters(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Clusters that name servers must cover all servers, clusters that name super pods all super pods."""
    same, remedy = "the same cluster_id stands at {}", "give each cluster its own id"
    yield from find_repeats(survey.clusters, "cluster_id", "P4", same, remedy)
    servers = [entry for cluster in survey.clusters for entry in cluster.servers]
    pods = [entry for cluster in survey.clusters for entry in cluster.super_pods]
    yield from _check_members(servers, survey.servers, "server_id", "server_list")
    yield from _check_members(pods, survey.super_pods, "super_pod_id", "super_pod_list")


def _check_members(members: list[Entry], listed: Collection[Entry], key: str, where: str) -> Iterator[Problem]:
    known, named = {entry.text(key) for entry in listed}, {entry.text(key) for entry in members}
    for entry in members:
        if entry.text(key) is not None and entry.text(key) not in known:
            remedy = f"write the id as it stands in {where}"
            yield entry.complain(key, "P4", "error", f"the id is not in {where}", remedy)
    inside = (entry for entry in members if entry.text(key) in known)
    yield from find_repeats(inside, key, "P4", "it stands at {} already", "list it once")
    for entry in listed if members else ():
        if entry.text(key) is not None and entry.text(key) not in named:
            message = f"the {key.removesuffix('_id').replace('_', ' ')} is in no cluster of cluster_list"
            yield entry.complain(key, "P4", "error", message, "list it in its cluster")


@rule(
    "P7",
    "over clusters every server has a server_ip, and every device a dpu_ip and a numa_id",
    severity="warning",
    sources=(citations.MINDSPORE,),
)
def check_cluster_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """MindSpore's documentation lists them for each server and device of such a table."""
    for server in survey.servers:
        yield from _check_addresses(server, "server_ip", "the host's address in the network of the clusters")
        for device in server.devices:
            yield from _check_addresses(device, "dpu_ip", "the address of the DPU that serves the device")
            if not device.has("numa_id"):
                remedy = "write the number of the device's NUMA node"
                yield device.complain("numa_id", "P7", "warning", "the key is missing in a table with clusters", remedy)


def _check_addresses(entry: Entry, key: str, what: str) -> Iterator[Problem]:
    text = entry.text(key)
    if not entry.has(key):
        yield entry.complain(key, "P7", "warning", "the key is missing in a table with clusters", f"write {what}")
    elif text is None or parse_address(text) is None:
        yield entry.complain(key, "P7", "warning", "the value is not an IPv4 or IPv6 address", f"write {what}")


DIALECTS = (
    Dialect(
        name="volcano-job",
        title="a Volcano job table (version 1.3)",
        consumer="the configmap1980 plugin of Volcano",
        recognise=_has_version("1.3"),
        sources=(citations.VOLCANO,),
        codec=TableForm("volcano-job", "1.3", _schema(SUPER_POD_SERVER, _POD_LIST, _DATA_VERSION)),
        rules=rule_ids(LISTED_RULES, _ORDER, _OF_910A, SUPER_POD_RULES),
        refused_version="1.3",
        reads_super_pods=True,
        refusal="Volcano writes this table itself; give it to HCCL as version 1.0 or 1.2",
    ),
    Dialect(
        name="volcano-global",
        title="a Volcano global table (version 1.4)",
        consumer="HyperJob over several clusters",
        recognise=_has_version("1.4"),
        sources=(citations.VOLCANO,),
        codec=TableForm(
            "volcano-global",
            "1.4",
            _schema(SUPER_POD_SERVER, _POD_LIST, _CLUSTERS["super_pod_list"], _DATA_VERSION),
        ),
        rules=rule_ids(LISTED_RULES, _ORDER, SUPER_POD_RULES, "P4"),
        refused_version="1.4",
        has_super_pods=True,
        reads_super_pods=True,
        refusal="Volcano writes this table itself out of those of its jobs",
    ),
    Dialect(
        name=SUPER_PODS,
        title="a super pod rank table (version 1.2)",
        consumer="HCCL on A3 super pods",
        recognise=_is_super_pod,
        keys=("super_pod_list",),
        sources=(citations.CONCISE, citations.A3_PAGE, citations.OPERATOR),
        codec=TableForm(SUPER_PODS, "1.2", _schema(SUPER_POD_SERVER, _POD_LIST)),
        rules=rule_ids(LISTED_RULES, _ORDER, SUPER_POD_RULES, _OF_MINDIE_LLM),
        readers=frozenset({"hccl", "mindspore", "mindie-llm"}),
        has_super_pods=True,
        reads_super_pods=True,
        is_generated=True,
        convert=_to_super_pods,
        wishes=frozenset({"super_pods", "super_device_ids"}),
    ),
    Dialect(
        name="cross-cluster",
        title="a rank table over several clusters (version 1.0 with cluster_list)",
        consumer="MindSpore on Ascend",
        recognise=_is_cross_cluster,
        sources=(citations.MINDSPORE,),
        codec=TableForm("cross-cluster", "1.0", _schema(SERVER, _UNREAD_PODS, _CLUSTERS["server_list"])),
        rules=rule_ids(LISTED_RULES, _ORDER, _OF_910A, "P4 P7"),
        readers=frozenset({"hccl", "mindspore"}),
        has_super_pods=False,
        refusal="the clusters of the servers cannot be made up; write cluster_list into a version 1.0 table",
    ),
    Dialect(
        name=PLAIN,
        title="a version 1.0 rank table",
        consumer="HCCL on 910A, A2 and 300I Duo",
        recognise=_is_plain,
        keys=("server_list", "server_count"),
        sources=(citations.CONCISE, citations.MINDSPORE),
        codec=TableForm(PLAIN, "1.0", _schema(SERVER, _UNREAD_PODS)),
        rules=rule_ids(LISTED_RULES, _ORDER, _OF_910A, _OF_MINDIE_LLM),
        readers=frozenset({"hccl", "mindspore", "mindie-llm"}),
        has_super_pods=False,
        is_generated=True,
        convert=_to_plain,
    ),
)
