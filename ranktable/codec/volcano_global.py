"""Dialect "volcano-global": version 1.4, one job over several clusters.

A table of version 1.2 with `cluster_list[].super_pod_list`, which names the super pods of each cluster, and
`data_version`. Source: the global rank table that Volcano makes out of the tables of a HyperJob's parts.
"""

from __future__ import annotations

from ranktable.codec.server_list import TableForm
from ranktable.codec.v1_2 import SUPER_POD_SERVERS

VERSION = "1.4"

CODEC = TableForm(
    "volcano-global",
    VERSION,
    SUPER_POD_SERVERS,
    has_super_pods=True,
    cluster_members="super_pod_list",
    counts_data=True,
).codec()
