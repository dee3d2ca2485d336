"""Where the rules and keys of this package can be read up: public files at one commit, and documents."""

from __future__ import annotations

_HCOMM = "https://github.com/libochao-huawei/hcomm/blob/{}/src/legacy/ascend910/framework/common/src/{}"
_RANK_GRAPH = "https://github.com/zstar1003/hccl-hcomm-annotated/blob/{}/hcomm/src/coll_communicator_mgr/rank_graph/{}"
_HCCL_DOCS = "https://github.com/mirror-cann/hccl/blob/{}/docs/zh/user_guide/{}"

VERSIONS = _HCOMM.format("daf00b5242f8a2185194899125eb81f55df3df37", "config.cc")
"""HCCL: which parser reads which version."""
PARSER = _HCOMM.format("3ae48682f295ea273579c70684ff1f98a5114ec1", "topo/topoinfo_ranktableParser.cc")
"""HCCL: what all of its parsers share: file, types, missing keys."""
CONCISE = _HCOMM.format("ff1f359e0a0e5cee94a22b7b75acdfb7f7283dc6", "topo/topoinfo_ranktableConcise.cc")
"""HCCL: versions 1.0 and 1.2."""
STANDARD = _HCOMM.format("93bae2ba6a64c51998a7585e08badb3ccfde1bf6", "topo/topoinfo_ranktableStandard.cc")
"""HCCL: tables without a version (template 2)."""
HETEROGENEOUS = _HCOMM.format("ec149248c2b23356a52759b52cbe1ae5dfeda277", "topo/topoinfo_ranktableHeterog.cc")
OFFLINE = _HCOMM.format("93bae2ba6a64c51998a7585e08badb3ccfde1bf6", "topo/topoinfo_ranktableOffline.cc")
ROLES = _HCOMM.format("3ae48682f295ea273579c70684ff1f98a5114ec1", "topo/topoinfo_roletableParser.cc")
RANK_TABLE_INFO = _RANK_GRAPH.format("efbe1cd23c64f4c62525c81d39812834113f4aa9", "rank_table_info/rank_table_info.cc")
"""HCCL: version 2.0; the files beside it read ranks, levels, addresses and the control plane."""
A3_PAGE = _HCCL_DOCS.format("6e3afc89349ef4dc75a099ef1ae4310df1b04f57", "cluster_info_config/rank_table_config_a3.md")
A5_PAGE = _HCCL_DOCS.format("1a82b58e46c0b638e024db87e0da47aaec145e3d", "cluster_info_config/rank_table_config_a5.md")
VERIFY_PAGE = _HCCL_DOCS.format(
    "0e332712152b9f0d664bd62fe8e99a3be34d5658", "fault_diagnosis/cluster_info_verify_fail.md"
)
"""HCCL: what fails when devices and addresses are not those of the table."""
MINDSPORE = (
    "https://github.com/mindspore-ai/docs/blob/681574d9c77e9cbec3786234da4f1d533094b5e2/"
    "tutorials/source_en/parallel/rank_table.md"
)
MINDIE_MOTOR = "https://github.com/Ascend/MindIE-Motor"
OPERATOR = (
    "https://github.com/Ascend/mind-cluster/blob/b6b2f7d1d39d9c0a792571c794564a26c8389e41/"
    "component/ascend-operator/pkg/ranktable/v1dot2/ranktable.go"
)
"""A producer of versions 1.0, 1.2 and 2.0 in clusters."""
VOLCANO = (
    "https://github.com/liuyuanchun11/volcano/blob/8e5feb44dbdf7339560e78ca1ef3900498e1995a/"
    "pkg/util/plugins/configmap1980/ranktable_define.go"
)
_TORCH_NPU = "https://github.com/Ascend/pytorch/blob/{}/docs/zh/environment_variable_reference/{}.md"
TORCH_NPU = _TORCH_NPU.format("3269e341032608660eca2391fee85162c9263dc8", "RANK_TABLE_FILE")
VLLM_ASCEND = "https://github.com/vllm-project/vllm-ascend"
JSON_NAMES = "https://www.rfc-editor.org/rfc/rfc8259#section-4"
