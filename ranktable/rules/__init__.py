"""The register of rules: one function per rule over a table, how bad a breach is, on which chips, and its sources.

A dialect names its rules (`Dialect.rules`); those of `EVERYWHERE` hold for all. Rules without a function are looked
after while a file is read, by the function of another rule, or by `ranktable.local`. A rule that no public source asks
for is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Literal

from ranktable.kinds import all_dialects, dialect_of
from ranktable.model import RankTable
from ranktable.problem import Problem, Severity
from ranktable.profile import CHIPS, Profile
from ranktable.record import Record
from ranktable.rules import citations

EVERYWHERE = frozenset(["R1", "R2", "R3", "R4", "R5", "R31", "R32", "L1", "L2", "L3", "L4", "L5", "L6", "L7"])
"""Rules of every dialect."""
_MODULES = ("identity", "network", "ascend")

Check = Callable[[RankTable, Profile], Iterator[Problem]]
Weight = Literal["error", "warning", "error or warning"]
_RULES: dict[str, Rule] = {}


class Rule(Record):
    """A rule: its stable id, what it asks for in one sentence, and the function that finds what breaks it."""

    rule_id: str
    title: str
    check: Check | None = None
    """None for a rule that is looked after while the file is read, or by the function of another rule."""
    severity: Weight = "error"
    """How bad it is to break the rule, on the chips that it holds for."""
    chips: tuple[str, ...] = ()
    """The chips that the rule holds for; empty for all of them, and for hosts without Ascend devices."""
    readers: tuple[str, ...] = ()
    """The readers that demand it (`Profile.reader`); empty for all of them."""
    is_whole: bool = False
    """True when the rule looks at the whole table even where each group is a rank table of its own."""
    sources: tuple[str, ...] = ()
    """Where it can be read up: URLs of public files and documents."""

    @property
    def dialects(self) -> frozenset[str]:
        """Short names of the dialects that the rule holds for."""
        known = (kind for kind in all_dialects() if kind.schema)
        return frozenset(kind.name for kind in known if self.rule_id in kind.rules | EVERYWHERE)

    def __call__(self, check: Check) -> Check:
        """Register the rule with the decorated function for its check."""
        register(replace(self, check=check))
        return check


def register(entry: Rule) -> None:
    """Add a rule; one without a function is looked after by that of another rule, or while the file is read."""
    assert entry.rule_id not in _RULES, f"{entry.rule_id} is registered twice"
    assert entry.sources or entry.severity == "warning", f"{entry.rule_id} has no source, so it can only warn"
    assert set(entry.chips) <= set(CHIPS), f"{entry.rule_id} names an unknown chip"
    _RULES[entry.rule_id] = entry


def registered_rules() -> tuple[Rule, ...]:
    """Return every registered rule: those of HCCL and of the format (R) by number, then L and P."""
    for name in _MODULES:
        import_module(f"ranktable.rules.{name}")
    all_dialects()  # their modules register rules of their own
    return tuple(sorted(_RULES.values(), key=lambda entry: ("RLP".index(entry.rule_id[0]), int(entry.rule_id[1:]))))


def chip_of(table: RankTable, profile: Profile) -> str | None:
    """Return the chip of the profile, else "a3", the only one with super pods, for a table that has some, else None."""
    if profile.chip:
        return profile.chip
    first = next(table.devices, None)
    has_any = table.has("super_pod_list") or (first is not None and first.has("super_device_id"))
    kind = dialect_of(table.dialect)
    return "a3" if kind.is_for_a3 or (has_any and kind.reads_super_pods) else None


def severity_on(table: RankTable, profile: Profile, *chips: str) -> Severity | None:
    """Return how bad it is to break a rule of `chips` in this table: None when the rule does not hold."""
    chip = chip_of(table, profile)
    if not profile.is_ascend or (chip is not None and chip not in chips):
        return None
    return "error" if chip else "warning"


_PARSED = (citations.PARSER,)
_AT_START = (citations.VERIFY_PAGE,)
for _rule in (
    Rule(
        "R1",
        "the file is a JSON object in UTF-8 of at most 40 MiB, without comments, named .json",
        severity="error or warning",
        sources=_PARSED,
    ),
    Rule("R2", "the version is known for this kind of table", sources=(citations.VERSIONS,)),
    Rule(
        "R4",
        "scalars are strings; in version 2.0 numbers are integers",
        sources=(citations.CONCISE, citations.RANK_TABLE_INFO),
    ),
    Rule(
        "R5",
        "the keys that are demanded are there, and no array is empty",
        severity="error or warning",
        sources=_PARSED,
    ),
    Rule("R31", "every key is known", severity="warning"),
    Rule("R32", "no key stands twice in its object", sources=(citations.JSON_NAMES,)),
    Rule("L1", "with --local: this host is one server of the table, by address or name", sources=_AT_START),
    Rule("L2", "with --local: the device ids of that server are device nodes of this host", sources=_AT_START),
    Rule(
        "L3",
        "with --local: device_ip is what hccn_tool says, or /etc/hccn.conf where there is no hccn_tool",
        severity="error or warning",
        sources=_AT_START,
    ),
    Rule("L4", "with --local: /etc/hccn.conf agrees with hccn_tool", severity="warning", sources=_AT_START),
    Rule(
        "L5",
        "with --local: RANK_TABLE_FILE names this file, and it is no symbolic link",
        severity="error or warning",
        sources=(citations.TORCH_NPU,),
    ),
    Rule("L6", "with --local: super_device_id is what npu-smi says", sources=_AT_START),
    Rule("L7", "with --local: RANK_ID, DEVICE_ID and RANK_SIZE of the environment fit the table", sources=_AT_START),
):
    register(_rule)
