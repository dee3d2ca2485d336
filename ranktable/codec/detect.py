"""Tells which kind of table a JSON object is, by its keys first and its version second.

Keys come first because several files carry a version of HCCL's tables and are none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ranktable.codec.schema import Members, find_near, list_objects
from ranktable.errors import JsonTextError
from ranktable.reading.document import parse_document
from ranktable.reading.foreign import name_compression

_MAX_KEYS, _MAX_KEY = 100, 64
"""How many keys of a strange object, and of what length at most, are looked at."""
TELLING_KEYS = (
    "server_list",
    "server_count",
    "group_list",
    "group_count",
    "node_list",
    "collective_id",
    "rank_list",
    "rank_count",
    "super_pod_list",
    "server_group_list",
    "prefill_device_list",
    "decode_device_list",
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of table: a short name, what to call it in a sentence, and who reads it."""

    name: str
    title: str
    consumer: str
    instead: str = ""
    """What to do with it, for kinds that are no rank tables of HCCL's or have no codec here."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The dialect of an object and the keys that gave it away."""

    dialect: Dialect
    evidence: str


V1_0 = Dialect("1.0", "a version 1.0 rank table", "HCCL on 910A, A2 and 300I Duo")
V1_1 = Dialect("1.1", "a heterogeneous rank table (version 1.1)", "HCCL groups of hosts and devices")
V1_1_OFFLINE = Dialect(
    "1.1-offline", "a heterogeneous rank table for offline compilation (version 1.1)", "HCCL without devices"
)
V1_2 = Dialect("1.2", "a super pod rank table (version 1.2)", "HCCL on A3 super pods")
V2_0 = Dialect("2.0", "a version 2.0 rank table", "HCCL on Ascend 950")
V2_0_DRAFT = Dialect(
    "2.0-draft",
    "a pre-release draft of the version 2.0 rank table",
    "no released reader",
    "let the present tools of the cluster write it again: the released version has net_layer and rank_addr_list",
)
V2_0_OXC = Dialect(
    "2.0-oxc",
    "an optical-switch rank table (2.0 OXC variant)",
    "HCCL, experimental",
    "give it to HCCL as it is, or write the job as version 1.2",
)
CLOUD = Dialect("template2-cloud", "a template 2 cloud rank table (group_list, no version)", "older HCCL and ModelArts")
LAB = Dialect("template2-lab", "a template 2 lab rank table (board_id, group_list)", "HCCL of 2019 to 2021")
ROLES = Dialect(
    "roles",
    "a parameter-server role table",
    "HCCL heterogeneous groups",
    "it lists servers and clients and has no ranks; give it to HCCL as it is",
)
VOLCANO_JOB = Dialect("volcano-job", "a Volcano job table (version 1.3)", "the configmap1980 plugin of Volcano")
VOLCANO_GLOBAL = Dialect("volcano-global", "a Volcano global table (version 1.4)", "HyperJob over several clusters")
CROSS_CLUSTER = Dialect(
    "cross-cluster", "a rank table over several clusters (version 1.0 with cluster_list)", "MindSpore on Ascend"
)
MINDIE = Dialect("mindie-global", "a MindIE global table", "MindIE-Motor, for inference")
VLLM = Dialect(
    "vllm-pd",
    "a vLLM-Ascend prefill and decode table",
    "the LLMDataDist connector, for inference",
    "it is no rank table of HCCL's: keep it for vLLM, and make a table for training with ranktable generate",
)
LOCAL_RES = Dialect(
    "local-comm-res",
    "a LocalCommRes description of one server",
    "llm_datadist and HIXL, for inference",
    "it is no rank table: pass it as the option of that name, and make a table for training with ranktable generate",
)
TOR = Dialect(
    "tor-list",
    "a TOR list",
    "ModelArts, beside jobstart_hccl.json",
    "it names switches, not ranks: use the file jobstart_hccl.json that stands beside it",
)
CONFIG_MAP = Dialect(
    "configmap",
    "a Kubernetes ConfigMap",
    "kubectl; a pod sees each of its keys as a file",
    "write the value of that key to a file of its own",
)
COMPRESSED = Dialect(
    "compressed",
    "compressed text",
    "the sidecar or script that unpacks it before the job starts",
    "unpack it first (base64 -d where it is in base64, then gunzip or unzstd)",
)


def detect_dialect(value: Members) -> Detection | None:
    """Return the dialect of the object with the evidence, or None when no key of any known dialect is there."""
    for dialect, find_evidence in _TESTS:
        evidence = find_evidence(value)
        if evidence:
            return Detection(dialect, evidence)
    return None


def find_near_keys(value: Members) -> dict[str, str]:
    """Return the keys at the top that look like telling keys of a dialect, each with the key that may be meant."""
    near = ((name, find_near(name, TELLING_KEYS)) for name in islice(value, _MAX_KEYS))
    return {name: meant for name, meant in near if meant}


def _is_config_map(value: Members) -> str:
    if value.get("kind") != "ConfigMap":
        return ""
    for section in ("data", "binaryData"):
        entries = value.get(section)
        for key, text in islice(entries.items() if isinstance(entries, dict) else (), _MAX_KEYS):
            found = _name_payload(text)
            if found:
                return f'{section}["{key[:_MAX_KEY]}"], {found}'
    return ""


def _name_payload(text: object) -> str:
    """Return what a value of a ConfigMap is, empty when it has to do with no rank table."""
    if not isinstance(text, str):
        return ""
    compression = name_compression(text[:1024].encode("utf-8", "surrogatepass"))
    if compression:
        return f"which is compressed ({compression})"
    try:
        detection = detect_dialect(parse_document(text.encode("utf-8", "surrogatepass")).value)
    except JsonTextError:
        return ""
    return f"which holds {detection.dialect.title}" if detection and detection.dialect is not CONFIG_MAP else ""


def _is_offline(value: Members) -> str:
    keys = {key for node in list_objects(value, "node_list") for key in node}
    return next((f"node_list with {key}" for key in ("rank_list", "node_id") if key in keys), "")


def _has(*keys: str) -> Callable[[Members], str]:
    def find_evidence(value: Members) -> str:
        return next((key for key in keys if key in value), "")

    return find_evidence


def _is_lab(value: Members) -> str:
    telling = [key for key in ("board_id", "chip_info", "deploy_mode", "para_plane_nic_location") if key in value]
    if "group_list" not in value or (telling and "deploy_mode" in telling):
        return " and ".join(telling) if "group_list" in value else ""
    # Without deploy_mode HCCL would take the table for the cloud form, which has pods in place of ranks.
    instances = [each for group in list_objects(value, "group_list") for each in list_objects(group, "instance_list")]
    has_ranks = any("rank_id" in each for each in instances) and not any("pod_name" in each for each in instances)
    return "group_list with rank_id in its instances" if has_ranks else ""


def _is_draft(value: Members) -> str:
    keys = {
        key for rank in list_objects(value, "rank_list") for level in list_objects(rank, "level_list") for key in level
    }
    return next((key for key in ("rank_addrs", "fabric_type", "rank_addr_type") if key in keys), "")


def _is_oxc(value: Members) -> str:
    if "oxc_group_list" in value:
        return "oxc_group_list"
    return 'server_list with version "2.0"' if "server_list" in value and value.get("version") == "2.0" else ""


def _is_tor(value: Members) -> str:
    if "version" in value or "rank_id" in _device_keys(value):
        return ""
    return "tor_ip in its devices and no rank_id" if "tor_ip" in _device_keys(value) else ""


def _is_local(value: Members) -> str:
    if "endpoint_list" in value:
        return "endpoint_list"
    keys = {key.replace("_", "").lower() for key in _device_keys(value)}  # `rankId` is a misspelt rank_id
    is_local = len(list_objects(value, "server_list")) == 1 and keys and "rankid" not in keys
    return "one server and no rank_id" if is_local and value.get("version") in ("1.2", "1.3") else ""


def _has_version(version: str) -> Callable[[Members], str]:
    def find_evidence(value: Members) -> str:
        is_it = "server_list" in value and value.get("version") == version
        return f'server_list with version "{version}"' if is_it else ""

    return find_evidence


def _is_super_pod(value: Members) -> str:
    """Version 1.2, or a super pod list without a version. Version 1.0 with one stays 1.0: HCCL goes by the version."""
    found = _has_version("1.2")(value)
    return found or ("super_pod_list and no version" if "super_pod_list" in value and "version" not in value else "")


def _is_cross_cluster(value: Members) -> str:
    """Version 1.0 with clusters: MindSpore goes by the key, HCCL skips it."""
    is_it = "server_list" in value and "cluster_list" in value and value.get("version", "1.0") == "1.0"
    return 'cluster_list with version "1.0"' if is_it else ""


def _is_concise(value: Members) -> str:
    if "server_list" in value:
        return "server_list"
    return 'version "1.0"' if value.get("version") == V1_0.name else ""


def _device_keys(value: Members) -> set[str]:
    return {
        key
        for server in list_objects(value, "server_list")
        for device in list_objects(server, "device")
        for key in device
    }


# In this order: the rarer and more telling keys first.
_TESTS: tuple[tuple[Dialect, Callable[[Members], str]], ...] = (
    (CONFIG_MAP, _is_config_map),
    (MINDIE, _has("server_group_list")),
    (VLLM, _has("prefill_device_list", "decode_device_list")),
    (V2_0_DRAFT, _is_draft),
    (V2_0, _has("rank_list", "rank_count")),
    (V2_0_OXC, _is_oxc),
    (LOCAL_RES, _is_local),
    (V1_1_OFFLINE, _is_offline),
    (V1_1, _has("node_list", "collective_id")),
    (LAB, _is_lab),
    (CLOUD, _has("group_list", "group_count")),
    (ROLES, _has("Servers", "Clients")),
    (TOR, _is_tor),
    (VOLCANO_JOB, _has_version("1.3")),
    (VOLCANO_GLOBAL, _has_version("1.4")),
    (V1_2, _is_super_pod),
    (CROSS_CLUSTER, _is_cross_cluster),
    (V1_0, _is_concise),
)

DIALECT_NAMES = tuple(dialect.name for dialect, _ in _TESTS)
"""The short names of all dialects that are told apart, in the order in which they are looked for."""
