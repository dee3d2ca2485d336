"""Dialect "mindie-global": `server_group_list[].server_list[]`, the table of an inference service of MindIE.

Group 0 holds the coordinators and group 1 the controllers, which have no devices and often only a `server_ip`; every
other group holds instances, and the ranks start from 0 in each. Version "1.0" for A2, "1.2" for A3, where devices have
a `super_device_id`. In the model a server without a `server_id` goes by its `server_ip`; a version other than 1.0, and
what belongs to a group (`server_count`, `deploy_server`, `super_pod_list`), is kept in `extra`.
Source: the MindCluster documentation of global-ranktable, and what MindIE-Motor's loader reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ranktable.dialects.foreign import has_any
from ranktable.dialects.server_list import LISTED_RULES, SUPER_POD_RULES
from ranktable.dialects.servers import (
    SERVER_EXTRAS,
    SUPER_POD,
    SUPER_POD_DEVICE,
    decode_server,
    encode_server,
    server_fields,
    servers_of_groups,
    survey_holdings,
    survey_servers,
)
from ranktable.errors import BuildError
from ranktable.kinds import Dialect, Entry, ServerEntry, Survey, find_repeats, rule_ids
from ranktable.model import Group, RankTable, Server
from ranktable.problem import Problem, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.registry import declare_rule, rule
from ranktable.schema import (
    Count,
    Field,
    Members,
    Schema,
    check_tree,
    check_version,
    list_objects,
    walk_objects,
)
from ranktable.values import parse_address

DIALECT = "mindie-global"
_MOTOR = ("mindie-motor",)
_SOURCES = (citations.MINDIE_MOTOR,)
_MAX_MOTOR_DEVICES = 128
_MAX_MOTOR_SERVERS = 96
_MAX_COORDINATORS = 2
_HARDWARE = ("800I A2(32G)", "800I A2(64G)", "800I-A2-32G", "800I-A2-64G")
VERSIONS = ("1.0", "1.2")
COORDINATORS, CONTROLLERS = "0", "1"
"""Ids of the two groups without devices."""

_PORTS = frozenset({"predict_port", "mgmt_port", "metric_port", "inter_comm_port"})
_SERVER_IP = Field("server_ip", missing="error")
_SERVER = Schema((_SERVER_IP, *server_fields(SUPER_POD_DEVICE)), (SERVER_EXTRAS - {"server_ip"}) | _PORTS)
_CONTROL = Schema(
    (_SERVER_IP, Field("server_id"), Field("device", "list", of=SUPER_POD_DEVICE)),
    (SERVER_EXTRAS - {"server_ip"}) | _PORTS | {"host_ip", "pod_ip"},
)
"""A server of coordinators or controllers, which has no devices and often no id."""


def _server_of(group: Members) -> Schema:
    return _CONTROL if _is_control(group.get("group_id")) else _SERVER


_GROUP = Schema(
    (
        Field("group_id", missing="error", role="group"),
        Field("server_count", "number", missing="warning", rule="R6", count=Count(("server_list",), "server")),
        # A group whose pods have not started has no servers yet, and MindIE-Motor reads it all the same.
        Field("server_list", "any_list", missing="error", of=_server_of),
        Field("deploy_server"),
        Field("super_pod_list", "list", of=SUPER_POD),
    )
)
_SCHEMA = Schema(
    (
        Field("version"),
        Field("status", missing="error"),
        Field("server_group_list", "list", missing="error", of=_GROUP),
    )
)


@dataclass(frozen=True)
class _Codec:
    """How the dialect is read and written."""

    schema: Schema = _SCHEMA

    def check_structure(self, value: Members) -> list[Problem]:
        """Return every fault of the structure (R2, R4, R5, R31, P5 and malformed numbers)."""
        groups = (Entry(path, group) for path, group in walk_objects(value, "", "server_group_list"))
        otherwise = "the version is not known for a table with server_list"
        return [
            *check_version(value, VERSIONS, otherwise),
            *check_tree(value, _SCHEMA),
            # Groups are told apart by their ids alone.
            *find_repeats(groups, "group_id", "P5", "the same group_id stands at {}", "give each group its own id"),
        ]

    def survey(self, value: Members) -> Survey:
        """Return what can be read of the object; the groups are surveys of their own."""
        groups = tuple(
            Survey(
                path,
                group,
                survey_servers(group, path, "server_list", _SERVER),
                DIALECT,
                survey_holdings(group, path, "super_pod_list"),
            )
            for path, group in walk_objects(value, "", "server_group_list")
        )
        servers = tuple(server for group in groups for server in group.servers)
        return Survey("", value, servers, dialect=DIALECT, groups=groups)

    def decode(self, value: Members) -> RankTable:
        """Return the table. `value` must have passed `check_structure` without an error."""
        rest = dict(value)
        groups, servers = [], []
        for members in list_objects(rest, "server_group_list"):
            others = dict(members)
            name = str(others.pop("group_id"))
            servers += [_decode_server(server, name) for server in list_objects(others, "server_list")]
            del others["server_list"]
            groups.append(Group(name, others))
        del rest["server_group_list"]
        if rest["version"] == VERSIONS[0]:
            del rest["version"]
        return RankTable(DIALECT, tuple(servers), str(rest.pop("status")), groups=tuple(groups), extra=rest)

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the JSON object of `table`, whose servers stand in the order of its groups; decoding it gives `table`.

        Raises BuildError for a server without a group of the table, and for what this dialect has no place for.
        """
        if table.super_pods or table.clusters or table.declared_server_count is not None:
            message = f"super pods, clusters and a server count of the whole table cannot be written in {DIALECT!r}"
            raise BuildError(message, "keep them in the groups")
        members = servers_of_groups(table)
        groups = [
            {
                "group_id": group.name,
                **group.extra,
                "server_list": [_encode_server(server) for server in members[group.name]],
            }
            for group in table.groups
        ]
        return {"version": VERSIONS[0], "status": table.status, "server_group_list": groups, **table.extra}


def _decode_server(members: Members, group: str) -> Server:
    if "server_id" in members:
        return decode_server(members, _SERVER, group)
    named = {key: value for key, value in members.items() if key != "server_ip"}
    return decode_server({"server_id": members["server_ip"], **named}, _SERVER, group)


def _encode_server(server: Server) -> dict[str, object]:
    encoded = encode_server(server, _SERVER)
    if _is_control(server.group):
        if not server.devices:
            del encoded["device"]
        if "server_ip" not in server.extra:
            encoded = {"server_ip": encoded.pop("server_id"), **encoded}
    return encoded


def _is_control(group_id: object) -> bool:
    return group_id in (COORDINATORS, CONTROLLERS)


declare_rule("P5", "every group has a group_id of its own", sources=_SOURCES)


@rule(
    "P20",
    "server_id and server_ip are addresses, and server_ip is unique in its group",
    readers=_MOTOR,
    sources=_SOURCES,
)
def check_motor_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """server_id is the address of the host, server_ip that of the pod; instances are told apart by the latter."""
    for server in survey.servers:
        for key in ("server_id", "server_ip"):
            yield from _check_motor_address(server, key)
    same = "the same server_ip stands at {}"
    yield from find_repeats(survey.servers, "server_ip", "P20", same, "write the address of each pod")


def _check_motor_address(server: ServerEntry, key: str) -> Iterator[Problem]:
    text = server.text(key)
    if text is None:
        return
    address = parse_address(text)
    if address is None or address.is_unspecified or address.is_multicast:
        remedy = f"write the address of the {'host' if key == 'server_id' else 'pod'}"
        yield server.complain(key, "P20", "error", "the value is not the address of a host or a pod", remedy)


@rule("P21", "a server of an instance has 1 to 128 devices", readers=_MOTOR, sources=_SOURCES)
def check_motor_devices(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A server without devices is found by R5; coordinators and controllers have none."""
    for server in survey.servers:
        if len(server.devices) > _MAX_MOTOR_DEVICES:
            message = f"the server has {len(server.devices)} devices, at most {_MAX_MOTOR_DEVICES} are read"
            yield Problem(join_key(server.path, "device"), "P21", "error", message, "check that the server is not two")


@rule("P22", "a group has at most 96 servers", readers=_MOTOR, sources=_SOURCES)
def check_group_sizes(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Larger groups are refused as a whole."""
    if len(survey.servers) > _MAX_MOTOR_SERVERS:
        message = f"the group has {len(survey.servers)} servers, at most {_MAX_MOTOR_SERVERS} are read"
        yield Problem(join_key(survey.path, "server_list"), "P22", "error", message, "divide the group")


@rule(
    "P23",
    "group 0 has at most two coordinators, and there are instances",
    readers=_MOTOR,
    sources=_SOURCES,
    is_whole=True,
)
def check_roles(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The groups are known by their ids: 0 coordinators, 1 controllers, all others instances."""
    groups = {group.text("group_id"): group for group in survey.groups}
    coordinators = groups.get(COORDINATORS)
    path = "server_group_list"
    if coordinators is None:
        message = "there is no group 0, which holds the coordinator"
        yield Problem(path, "P23", "error", message, 'add a group with "group_id": "0"')
    elif len(coordinators.servers) > _MAX_COORDINATORS:
        message = f"group 0 has {len(coordinators.servers)} servers, at most {_MAX_COORDINATORS} coordinators are read"
        remedy = "keep a coordinator and its backup"
        yield Problem(join_key(coordinators.path, "server_list"), "P23", "error", message, remedy)
    if not any(group_id not in (COORDINATORS, CONTROLLERS) for group_id in groups):
        message = "there is no group of instances: only those of coordinators and controllers"
        yield Problem(path, "P23", "error", message, 'add a group with "group_id": "2"')


@rule("P24", "hardware_type is one that MindIE-Motor knows", severity="warning", readers=_MOTOR, sources=_SOURCES)
def check_hardware(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """It is read for services of mixed hardware, so an unknown name is a warning."""
    for server in survey.servers:
        name = server.text("hardware_type")
        if name is not None and name not in _HARDWARE:
            remedy = f"write one of {', '.join(show_value(known) for known in _HARDWARE)}"
            message = "the name is not known; a service of mixed hardware is refused"
            yield server.complain("hardware_type", "P24", "warning", message, remedy)


DIALECTS = (
    Dialect(
        name=DIALECT,
        title="a MindIE global table",
        consumer="MindIE-Motor, for inference",
        recognise=has_any("server_group_list"),
        keys=("server_group_list",),
        sources=_SOURCES,
        codec=_Codec(),
        rules=rule_ids(LISTED_RULES, SUPER_POD_RULES, "P5 P20 P21 P22 P23 P24"),
        readers=frozenset(_MOTOR),
        own_reader=_MOTOR[0],
        ranks_per_group=True,
        reads_super_pods=True,
        refusal="the groups of an inference service cannot be made up; take the table of MindIE-Motor",
    ),
)
