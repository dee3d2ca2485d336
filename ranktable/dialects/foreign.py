"""Kinds of files that are found where a rank table is looked for, are known by name, and have no schema here."""

from __future__ import annotations

from ranktable.kinds import Dialect, has_any
from ranktable.rules import citations
from ranktable.schema import Members, list_objects

_TRAINING = "make a table for training with ranktable generate"


def _is_draft(value: Members) -> str:
    keys = {
        key for rank in list_objects(value, "rank_list") for level in list_objects(rank, "level_list") for key in level
    }
    return next((key for key in ("rank_addrs", "fabric_type", "rank_addr_type") if key in keys), "")


def _is_oxc(value: Members) -> str:
    if "oxc_group_list" in value:
        return "oxc_group_list"
    return 'server_list with version "2.0"' if "server_list" in value and value.get("version") == "2.0" else ""


def _is_local(value: Members) -> str:
    if "endpoint_list" in value:
        return "endpoint_list"
    keys = {key.replace("_", "").lower() for key in _device_keys(value)}  # `rankId` is a misspelt rank_id
    is_local = len(list_objects(value, "server_list")) == 1 and keys and "rankid" not in keys
    return "one server and no rank_id" if is_local and value.get("version") in ("1.2", "1.3") else ""


def _is_tor(value: Members) -> str:
    keys = _device_keys(value)
    is_it = "tor_ip" in keys and "rank_id" not in keys and "version" not in value
    return "tor_ip in its devices and no rank_id" if is_it else ""


def _device_keys(value: Members) -> set[str]:
    servers = list_objects(value, "server_list")
    return {key for server in servers for device in list_objects(server, "device") for key in device}


DIALECTS = (
    Dialect(
        name="configmap",
        title="a Kubernetes ConfigMap",
        consumer="kubectl; a pod sees each of its keys as a file",
        recognise=lambda value: "kind ConfigMap" if value.get("kind") == "ConfigMap" else "",
        instead="write the value of that key to a file of its own",
    ),
    Dialect(
        name="vllm-pd",
        title="a vLLM-Ascend prefill and decode table",
        consumer="the LLMDataDist connector, for inference",
        recognise=has_any("prefill_device_list", "decode_device_list"),
        keys=("prefill_device_list", "decode_device_list"),
        sources=(citations.VLLM_ASCEND,),
        instead=f"it is no rank table of HCCL's: keep it for vLLM, and {_TRAINING}",
    ),
    Dialect(
        name="2.0-draft",
        title="a pre-release draft of the version 2.0 rank table",
        consumer="no released reader",
        recognise=_is_draft,
        instead="let the present tools of the cluster write it again: the released version has net_layer and "
        "rank_addr_list",
    ),
    Dialect(
        name="2.0-oxc",
        title="an optical-switch rank table (2.0 OXC variant)",
        consumer="HCCL, experimental",
        recognise=_is_oxc,
        instead="give it to HCCL as it is, or write the job as version 1.2",
    ),
    Dialect(
        name="local-comm-res",
        title="a LocalCommRes description of one server",
        consumer="llm_datadist and HIXL, for inference",
        recognise=_is_local,
        instead=f"it is no rank table: pass it as the option of that name, and {_TRAINING}",
    ),
    Dialect(
        name="volcano-global",
        title="a Volcano global table (version 1.4)",
        consumer="HyperJob over several clusters",
        recognise=lambda value: 'version "1.4"' if value.get("version") == "1.4" and "server_list" in value else "",
        sources=(citations.VOLCANO,),
        instead="HCCL refuses the version (EI0014): take the tables of its jobs, of version 1.0 or 1.2",
    ),
    Dialect(
        name="1.1",
        title="a heterogeneous rank table (version 1.1)",
        consumer="HCCL groups of hosts and devices",
        recognise=has_any("node_list", "collective_id"),
        keys=("node_list", "collective_id"),
        sources=(citations.HETEROGENEOUS, citations.OFFLINE),
        instead=f"give it to HCCL as it is; for devices alone {_TRAINING}",
    ),
    Dialect(
        name="roles",
        title="a parameter-server role table",
        consumer="HCCL heterogeneous groups",
        recognise=has_any("Servers", "Clients"),
        sources=(citations.ROLES,),
        instead="it lists servers and clients and has no ranks; give it to HCCL as it is",
    ),
    Dialect(
        name="tor-list",
        title="a TOR list",
        consumer="ModelArts, beside jobstart_hccl.json",
        recognise=_is_tor,
        sources=(citations.VOLCANO,),
        instead="it names switches, not ranks: use the file jobstart_hccl.json that stands beside it",
    ),
)
