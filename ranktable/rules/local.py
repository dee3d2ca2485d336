"""Rules L1 to L7: a table against the host that it is read on, looked after by `ranktable.local.check`.

Source: the checks that HCCL makes at start-up (the local device id and the address of the port must be those of the
table), the RANK_TABLE_FILE page of torch_npu (no link, readable; without the file it goes on without a table,
silently), and the driver's advice that hccn_tool, not hccn.conf, tells the address in use.
"""

from __future__ import annotations

from ranktable.rules.registry import CONCISE, Weight, declare_rule

LOCAL_RULES = {
    "L1": "this host is one server of the table, by address or name",
    "L2": "the device ids of that server are device nodes of this host",
    "L3": "device_ip is what hccn_tool says, or /etc/hccn.conf where there is no hccn_tool",
    "L4": "/etc/hccn.conf agrees with hccn_tool",
    "L5": "RANK_TABLE_FILE names this file, and it is no symbolic link",
    "L6": "super_device_id is what npu-smi says",
    "L7": "RANK_ID, DEVICE_ID and RANK_SIZE of the environment agree with the table",
}
"""What `ranktable check --local` asks for beside the rules of `validate`, by id."""

_WEIGHTS: dict[str, Weight] = {"L3": "error or warning", "L4": "warning", "L5": "error or warning"}
_ALL = CONCISE | {"1.1", "2.0", "template2-cloud", "template2-lab"}
for _rule_id, _title in LOCAL_RULES.items():
    declare_rule(_rule_id, f"{_title} (check --local)", _ALL, severity=_WEIGHTS.get(_rule_id, "error"))
