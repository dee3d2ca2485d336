"""Dialect 1.0: `server_list[].device[]`, every scalar a string. Read by HCCL on 910A, A2 and 300I Duo.

On A3 it means servers without a super pod. `super_pod_list` and `super_device_id` are not read: HCCL goes by the
version, so they are reported and kept. Source: rank table pages of the HCCL and MindSpore documentation.
"""

from __future__ import annotations

from ranktable.codec.server_list import TableForm
from ranktable.codec.servers import DEVICE_EXTRAS, SUPER_DEVICE_ID, ServerForm

VERSION = "1.0"

FORM = TableForm("1.0", VERSION, ServerForm(device_extras=DEVICE_EXTRAS | {SUPER_DEVICE_ID}))

CODEC = FORM.codec()
