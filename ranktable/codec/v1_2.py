"""Dialect 1.2: version 1.0 with `super_device_id` and `super_pod_list`. Read by HCCL on A3.

HCCL's parser of versions 1.0 and 1.2 is one; without `super_pod_list` it takes the servers for ones without a super
pod. Source: the A3 rank table page of the HCCL documentation.
"""

from __future__ import annotations

from ranktable.codec.server_list import TableForm
from ranktable.codec.servers import DEVICE_KEYS, SUPER_DEVICE_ID, ServerForm
from ranktable.codec.shape import Key

VERSION = "1.2"

SUPER_POD_SERVERS = ServerForm(device_keys=(*DEVICE_KEYS, Key(SUPER_DEVICE_ID)), has_super_devices=True)
"""Servers whose devices may have a number in their super pod; what is wrong with it is told by rule R24."""

CODEC = TableForm("1.2", VERSION, SUPER_POD_SERVERS, has_super_pods=True).codec()
