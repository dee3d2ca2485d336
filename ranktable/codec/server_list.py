"""Tables with one `server_list[].device[]`, every scalar a string: the codec that versions 1.0 to 1.4 share.

Source of the rules: the rank table pages of the HCCL and MindSpore documentation, and what HCCL's parser refuses.
A dialect is a `TableForm`: its version, and what it has beyond servers and devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ranktable.codec.codec import Codec
from ranktable.codec.holdings import (
    check_clusters,
    check_super_pods,
    decode_clusters,
    decode_super_pods,
    encode_clusters,
    encode_super_pods,
    survey_holdings,
)
from ranktable.codec.servers import (
    SUPER_DEVICE_ID,
    ServerForm,
    check_server,
    decode_server,
    encode_server,
    objects_of,
    survey_servers,
)
from ranktable.codec.shape import Key, check_shape, parse_number
from ranktable.errors import BuildError
from ranktable.model import RankTable
from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, join_key, show_value
from ranktable.survey import Survey

_TABLE_KEYS = (
    Key("version"),
    Key("status", missing="error"),
    Key("server_count", "number", missing="warning", rule="R6"),
    Key("server_list", "list", missing="error"),
)
_POD_LIST_KEY = Key("super_pod_list", "list")
_CLUSTER_LIST_KEY = Key("cluster_list", "list", missing="error")
_TABLE_EXTRAS = frozenset({"cluster_list", "data_version", "hardware_type", "super_pod_list"})


@dataclass(frozen=True, slots=True)
class TableForm:
    """One dialect of the family."""

    dialect: str
    version: str
    servers: ServerForm
    has_super_pods: bool = False
    """True when `super_pod_list` is read, False when it is reported and kept."""
    cluster_members: str = ""
    """The list that each entry of `cluster_list` must have; empty when `cluster_list` is kept and not read."""
    counts_data: bool = False
    """True when the producer numbers its writings in `data_version`, a JSON integer."""

    def codec(self) -> Codec:
        """Return the functions of this dialect."""
        return Codec(self.check_structure, self.survey, self.decode, self.encode)

    def check_structure(self, value: Mapping[str, object]) -> list[Problem]:
        """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers); empty when it can be decoded."""
        problems = [*check_version(value, (self.version,)), *self._check_top(value)]
        for path, server in objects_of(value, "", "server_list"):
            problems += check_server(server, path, self.servers)
        if self.has_super_pods:
            problems += check_super_pods(value, "")
        if self.cluster_members:
            problems += check_clusters(value, "", self.cluster_members)
        if not self.has_super_pods:
            problems += _check_misplaced(value)
        return problems

    def _check_top(self, value: Mapping[str, object]) -> Iterator[Problem]:
        pods = (_POD_LIST_KEY,) if self.has_super_pods else ()
        clusters = (_CLUSTER_LIST_KEY,) if self.cluster_members else ()
        yield from check_shape(value, "", (*_TABLE_KEYS, *pods, *clusters), _TABLE_EXTRAS)
        if self.counts_data:
            yield from _check_data_version(value)

    def survey(self, value: Mapping[str, object]) -> Survey:
        """Return what can be read of the object, however faulty it is."""
        return Survey(
            "",
            value,
            survey_servers(value, ""),
            parse_number(value.get("server_count")),
            self.dialect,
            survey_holdings(value, "", "super_pod_list") if self.has_super_pods else (),
            survey_holdings(value, "", "cluster_list") if self.cluster_members else (),
        )

    def decode(self, value: Mapping[str, object]) -> RankTable:
        """Return the table. `value` must have passed `check_structure` without an error."""
        rest = dict(value)
        servers = tuple(decode_server(server, self.servers) for _, server in objects_of(rest, "", "server_list"))
        pods = decode_super_pods(rest) if self.has_super_pods else ()
        clusters = decode_clusters(rest) if self.cluster_members else ()
        for key in ("version", "server_list", *self._lists()):
            rest.pop(key, None)
        status, count = str(rest.pop("status")), parse_number(rest.pop("server_count", None))
        return RankTable(self.dialect, servers, status, count, pods, clusters, extra=rest)

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the JSON object of `table`; decoding it gives `table` again.

        Raises BuildError for a table with something that this dialect has no place for.
        """
        self._refuse_foreign(table)
        count = {} if table.declared_server_count is None else {"server_count": str(table.declared_server_count)}
        return {
            "version": self.version,
            **count,
            "server_list": [encode_server(server) for server in table.servers],
            **({"super_pod_list": encode_super_pods(table.super_pods)} if table.super_pods else {}),
            **({"cluster_list": encode_clusters(table.clusters)} if table.clusters else {}),
            "status": table.status,
            **table.extra,
        }

    def _lists(self) -> Iterator[str]:
        if self.has_super_pods:
            yield "super_pod_list"
        if self.cluster_members:
            yield "cluster_list"

    def _refuse_foreign(self, table: RankTable) -> None:
        found = {
            "super pods": bool(table.super_pods) and not self.has_super_pods,
            "clusters": bool(table.clusters) and not self.cluster_members,
            "groups": bool(table.groups) or any(server.group is not None for server in table.servers),
            "super device ids": not self.servers.has_super_devices
            and any(device.super_device_id is not None for _, device in table.placements),
        }
        foreign = " and ".join(name for name, is_there in found.items() if is_there)
        if foreign:
            message = f"a table with {foreign} cannot be written in dialect {self.dialect!r}"
            raise BuildError(message, "take them out, or choose a dialect that has them")


def check_version(value: Mapping[str, object], versions: tuple[str, ...]) -> Iterator[Problem]:
    """Yield what is wrong with the version: rule R2."""
    path, remedy = "version", f'write "version": "{versions[0]}"'
    version = value.get("version")
    if "version" not in value:
        yield Problem(path, "R2", "error", "the key is missing, so HCCL takes the table for an older kind", remedy)
    elif isinstance(version, str) and version not in versions:
        what = name_placeholder(version)
        message = f"the version is {what}" if what else "the version is not known for a table with server_list"
        yield Problem(path, "R2", "error", message, remedy, show_value(version))


def _check_data_version(value: Mapping[str, object]) -> Iterator[Problem]:
    """The producer counts its writings up from 1; readers of the plugin's table compare the numbers."""
    path, version = "data_version", value.get("data_version")
    if "data_version" not in value:
        message = "the key is missing; the producer counts its writings in it"
        yield Problem(path, "R5", "warning", message, "take the table as its producer wrote it")
    elif isinstance(version, bool) or not isinstance(version, int) or version < 0:
        message = "the value must be a JSON integer from 0 on"
        yield Problem(path, "R4", "error", message, "write a number without quotes", show_value(version), is_form=True)


def _check_misplaced(value: Mapping[str, object]) -> Iterator[Problem]:
    remedy = 'write "version": "1.2" for a super pod, or remove the key'
    message = "the key is read in version 1.2 only"
    if "super_pod_list" in value:
        yield Problem("super_pod_list", "R31", "warning", message, remedy)
    for path, server in objects_of(value, "", "server_list"):
        for device_path, device in objects_of(server, path, "device"):
            if SUPER_DEVICE_ID in device:
                yield Problem(join_key(device_path, SUPER_DEVICE_ID), "R31", "warning", message, remedy)
