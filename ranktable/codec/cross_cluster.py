"""Dialect "cross-cluster": version 1.0 with `cluster_list[].server_list`, for a job over several clusters.

Servers have a `server_ip`, devices a `dpu_ip` and a `numa_id`, clusters a `network_type`, `az_id` and `region_id`.
MindSpore switches the feature on where `cluster_list` stands. Source: rank table pages of the MindSpore documentation.
"""

from __future__ import annotations

from ranktable.codec.server_list import TableForm
from ranktable.codec.v1_0 import FORM, VERSION

CODEC = TableForm("cross-cluster", VERSION, FORM.servers, cluster_members="server_list").codec()
