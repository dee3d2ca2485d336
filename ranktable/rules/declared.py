"""The rules that are looked after while a file is read, and while the structure of its dialect is checked.

Source: HCCL's errors EI0004 (R1), EI0014 (R2) and EI0017 (R4, R5); R31 and R32 are this project's: HCCL skips keys
that it does not know, and JSON parsers keep the last of two equal keys silently.
"""

from __future__ import annotations

from ranktable.rules.registry import CONCISE, declare_rule

_WRITTEN = CONCISE | {"1.1", "2.0", "template2-cloud", "template2-lab"}

declare_rule("R1", "the file is a JSON object in UTF-8 of at most 40 MiB, without comments, named .json", _WRITTEN)
declare_rule("R2", "the version is known for this kind of table", _WRITTEN)
declare_rule("R4", "scalars are strings; in version 2.0 numbers are integers", _WRITTEN)
declare_rule("R5", "the keys that are demanded are there, and no array is empty", _WRITTEN, severity="error or warning")
declare_rule("R31", "every key is known", _WRITTEN, severity="warning")
declare_rule("R32", "no key stands twice in its object", _WRITTEN)
declare_rule("P5", "every group has a group_id of its own", frozenset({"mindie-global"}))
