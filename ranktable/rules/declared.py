"""The rules that are looked after while a file is read, and while the structure of its dialect is checked.

Source: HCCL's errors EI0004 (R1), EI0014 (R2) and EI0017 (R4, R5); R31 and R32 are this project's: HCCL skips keys
that it does not know, and JSON parsers keep the last of two equal keys silently.

Rules L1 to L7: a table against the host that it is read on, looked after by `ranktable.local`.

Source: the checks that HCCL makes at start-up (the local device id and the address of the port must be those of the
table), the RANK_TABLE_FILE page of torch_npu (no link, readable; without the file it goes on without a table,
silently), and the driver's advice that hccn_tool, not hccn.conf, tells the address in use.
"""

from __future__ import annotations

from ranktable.rules.registry import CONCISE, Weight, declare_rule

_WRITTEN = CONCISE | {"1.1", "2.0", "template2-cloud", "template2-lab"}

declare_rule("R1", "the file is a JSON object in UTF-8 of at most 40 MiB, without comments, named .json", _WRITTEN)
declare_rule("R2", "the version is known for this kind of table", _WRITTEN)
declare_rule("R4", "scalars are strings; in version 2.0 numbers are integers", _WRITTEN)
declare_rule("R5", "the keys that are demanded are there, and no array is empty", _WRITTEN, severity="error or warning")
declare_rule("R31", "every key is known", _WRITTEN, severity="warning")
declare_rule("R32", "no key stands twice in its object", _WRITTEN)
declare_rule("P5", "every group has a group_id of its own", frozenset({"mindie-global"}))


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
