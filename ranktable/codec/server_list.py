"""Tables with one list of servers, every scalar a string: versions 1.0 to 1.4 (`server_list`) and 1.1 (`node_list`).

A dialect is a `TableForm`: its version and the schema of its top.

- 1.0: read by HCCL on 910A, A2 and 300I Duo; on A3 it means servers without a super pod. `super_pod_list` and
  `super_device_id` are not read: HCCL goes by the version, so they are reported and kept.
- 1.2: 1.0 with super pods, read by HCCL on A3 with the same parser.
- volcano-job: what Volcano's plugin configmap1980 writes with version 1.3. It counts its writings in `data_version` and
  names the switch above each device. With versions 1.0 and 1.2 it adds the same keys, which are known there too.
- volcano-global: version 1.4, one job over several clusters: 1.2 with `cluster_list[].super_pod_list`.
- cross-cluster: version 1.0 with `cluster_list[].server_list`, for MindSpore, which goes by that key.
- 1.1: groups of devices and hosts. A rank without a device has number -1, in the file and in the model; a missing
  device_id means that and is written as "-1". HCCL takes an empty rank_ip for the address of the node; with
  heterog_sub_version every rank needs the key. `sdid` is the model's `super_device_id`.
- 1.1-offline: for compiling a model without devices, with node_id and item_id.

Source: the rank table pages of the HCCL and MindSpore documentation, the plugins of Volcano as CCE and ModelArts use
them, and HCCL's parsers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ranktable.codec import Codec
from ranktable.codec.schema import Count, Field, Members, Schema, check_tree, check_version, list_objects, without
from ranktable.codec.servers import (
    SERVER,
    SUPER_POD,
    SUPER_POD_SERVER,
    cluster_schema,
    decode_clusters,
    decode_server,
    decode_super_pods,
    encode_clusters,
    encode_server,
    encode_super_pods,
    survey_holdings,
    survey_servers,
)
from ranktable.errors import BuildError
from ranktable.model import RankTable, Server
from ranktable.problem import Problem
from ranktable.survey import Survey
from ranktable.values import parse_number

SERVER_COUNT = Field("server_count", "number", missing="warning", rule="R6", count=Count(("server_list",), "server"))
_HEAD = (Field("version"), Field("status", missing="error"))
_EXTRAS = frozenset({"cluster_list", "data_version", "hardware_type", "super_pod_list"})
_POD_LIST = Field("super_pod_list", "list", of=SUPER_POD)
_DATA_VERSION = Field("data_version", "integer", missing="warning", rule="R4")
_UNREAD_PODS = Field("super_pod_list", "unread", of=SUPER_POD)
_CLUSTERS = {
    key: Field("cluster_list", "list", missing="error", of=cluster_schema(key))
    for key in ("server_list", "super_pod_list")
}
_RANK_ID = Field("rank_id", "number", missing="error", rule="R9", role="rank_id")
_RANK_IP = Field("rank_ip", role="device_ip", empty_is_none=True)


@dataclass(frozen=True, slots=True)
class TableForm:
    """One dialect of the family."""

    dialect: str
    version: str
    schema: Schema

    def codec(self) -> Codec:
        """Return the functions of this dialect."""
        return Codec(self.schema, self.check_structure, self.survey, self.decode, self.encode)

    def check_structure(self, value: Members) -> list[Problem]:
        """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers); empty when it can be decoded."""
        otherwise = (
            f"the keys are those of version {self.version}, and HCCL goes by this one"
            if self._list == "node_list"
            else "the version is not known for a table with server_list"
        )
        return [*check_version(value, (self.version,), otherwise), *check_tree(value, self.schema)]

    def survey(self, value: Members) -> Survey:
        """Return what can be read of the object, however faulty it is."""
        return Survey(
            "",
            value,
            survey_servers(value, "", self._list, self._server),
            self.dialect,
            survey_holdings(value, "", "super_pod_list") if self._reads("super_pod_list") else (),
            survey_holdings(value, "", "cluster_list") if self._reads("cluster_list") else (),
        )

    def decode(self, value: Members) -> RankTable:
        """Return the table. `value` must have passed `check_structure` without an error."""
        servers = tuple(decode_server(server, self._server) for server in list_objects(value, self._list))
        if "heterog_sub_version" in value:
            servers = tuple(map(_drop_empty_addresses, servers))
        pods = decode_super_pods(value) if self._reads("super_pod_list") else ()
        clusters = decode_clusters(value) if self._reads("cluster_list") else ()
        rest = without(value, "version", "status", self._list)
        for key in ("super_pod_list", "cluster_list"):
            if self._reads(key):
                rest.pop(key, None)
        count = parse_number(rest.pop("server_count", None)) if "server_count" in self.schema.by_name else None
        return RankTable(self.dialect, servers, str(value["status"]), count, pods, clusters, extra=rest)

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the JSON object of `table`; decoding it gives `table` again.

        Raises BuildError for a table with something that this dialect has no place for.
        """
        self._refuse_foreign(table)
        empty = {"device_ip": ""} if "heterog_sub_version" in table.extra else {}
        count = {} if table.declared_server_count is None else {"server_count": str(table.declared_server_count)}
        return {
            "version": self.version,
            **(count if "server_count" in self.schema.by_name else {}),
            self._list: [encode_server(server, self._server, **empty) for server in table.servers],
            **({"super_pod_list": encode_super_pods(table.super_pods)} if table.super_pods else {}),
            **({"cluster_list": encode_clusters(table.clusters)} if table.clusters else {}),
            "status": table.status,
            **table.extra,
        }

    @property
    def _list(self) -> str:
        return self.schema.by_role["servers"].name

    @property
    def _server(self) -> Schema:
        return self.schema.within(self._list)

    def _reads(self, key: str) -> bool:
        field = self.schema.by_name.get(key)
        return field is not None and field.kind == "list"

    def _refuse_foreign(self, table: RankTable) -> None:
        device_roles = self._server.within(self._server.by_role["devices"].name).by_role
        found = {
            "super pods": bool(table.super_pods) and not self._reads("super_pod_list"),
            "clusters": bool(table.clusters) and not self._reads("cluster_list"),
            "groups": bool(table.groups) or any(server.group is not None for server in table.servers),
            "super device ids": "super_device_id" not in device_roles
            and any(device.super_device_id is not None for _, device in table.placements),
            **{
                f"a {role}": role not in self._server.by_role
                and any(getattr(server, role) is not None for server in table.servers)
                for role in ("host_ip", "pod_ip")
            },
        }
        foreign = " and ".join(name for name, is_there in found.items() if is_there)
        if foreign:
            message = f"a table with {foreign} cannot be written in dialect {self.dialect!r}"
            raise BuildError(message, "take them out, or choose a dialect that has them")


def _drop_empty_addresses(server: Server) -> Server:
    """Leave out rank_ip where it is empty: it is written for every rank without an address."""
    devices = tuple(
        replace(device, extra=without(device.extra, "rank_ip")) if device.device_ip is None else device
        for device in server.devices
    )
    return replace(server, devices=devices)


def _concise(server: Schema, *more: Field) -> Schema:
    servers = Field("server_list", "list", missing="error", role="servers", of=server)
    return Schema((*_HEAD, SERVER_COUNT, servers, *more), _EXTRAS)


def _hybrid(id_key: str, ranks_key: str, ranks: tuple[Field, ...], *more: Field) -> Schema:
    node = Schema(
        (
            Field(id_key, missing="error", role="server_id"),
            Field(ranks_key, "list", missing="error", role="devices", of=Schema(ranks)),
        )
    )
    nodes = Field("node_list", "list", missing="error", role="servers", of=node)
    return Schema((*_HEAD, *more, Field("mode"), nodes))


FORMS = tuple(
    TableForm(*form)
    for form in (
        ("1.0", "1.0", _concise(SERVER, _UNREAD_PODS)),
        ("1.2", "1.2", _concise(SUPER_POD_SERVER, _POD_LIST)),
        ("volcano-job", "1.3", _concise(SUPER_POD_SERVER, _POD_LIST, _DATA_VERSION)),
        (
            "volcano-global",
            "1.4",
            _concise(SUPER_POD_SERVER, _POD_LIST, _CLUSTERS["super_pod_list"], _DATA_VERSION),
        ),
        ("cross-cluster", "1.0", _concise(SERVER, _UNREAD_PODS, _CLUSTERS["server_list"])),
        (
            "1.1",
            "1.1",
            _hybrid(
                "node_addr",
                "ranks",
                (
                    _RANK_ID,
                    Field("device_id", "device_number", rule="R8", role="device_id"),
                    _RANK_IP,
                    Field("port", "number", rule="R33"),
                    Field("sdid", "number", rule="R33", role="super_device_id"),
                    Field("bind_device_id", "device_number", rule="R8"),
                ),
                Field("collective_id", missing="error"),
                Field("heterog_sub_version"),
            ),
        ),
        (
            "1.1-offline",
            "1.1",
            _hybrid(
                "node_id",
                "rank_list",
                (
                    _RANK_ID,
                    Field("item_id", "device_number", missing="error", rule="R8", role="device_id"),
                    _RANK_IP,
                ),
                Field("collective_id"),
            ),
        ),
    )
)
CODECS = {form.dialect: form.codec() for form in FORMS}
