"""Dialect "volcano-job": the table of one job that Volcano's plugin configmap1980 writes with version 1.3.

Versions 1.0 or 1.2 with `data_version`, a JSON integer that the plugin counts up, and `tor_ip` and `tor_port` of the
switch above each device. With versions 1.0 and 1.2 the plugin adds the same keys, and they are known there too.
Source: the plugin as CCE and ModelArts use it.
"""

from __future__ import annotations

from ranktable.codec.server_list import TableForm
from ranktable.codec.v1_2 import SUPER_POD_SERVERS

VERSION = "1.3"

CODEC = TableForm("volcano-job", VERSION, SUPER_POD_SERVERS, has_super_pods=True, counts_data=True).codec()
