"""What a lowered program notes about operators without a rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msrun.runtime.partition.partition import _Lowering


def test_operator_without_a_rule_is_noted_once() -> None:
    lowering: Any = _Lowering.__new__(_Lowering)
    lowering._program = SimpleNamespace(notes=[])
    for name in ("aten.foo", "aten.foo", "aten.bar"):
        lowering._note_replicated(name)
    assert lowering._program.notes == [
        "aten.foo has no rule: every rank computes all of it",
        "aten.bar has no rule: every rank computes all of it",
    ]
