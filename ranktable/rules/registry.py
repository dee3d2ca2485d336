"""The register of rules: one function per rule over a survey, and what a list of the rules tells about each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ranktable.problem import Problem
from ranktable.profile import CHIPS, Profile
from ranktable.survey import Survey

CONCISE = frozenset({"1.0", "1.2", "volcano-job", "volcano-global", "cross-cluster", "mindie-global"})
"""The dialects of `server_list[].device[]` whose scalars are strings."""

TEMPLATE2 = frozenset({"template2-cloud", "template2-lab"})
"""The dialects of `group_list[].instance_list[].devices[]`."""
HETEROGENEOUS = frozenset({"1.1", "1.1-offline"})
"""The dialects of `node_list[]`."""
V2 = frozenset({"2.0"})

_ELSEWHERE = {
    "R3": TEMPLATE2 | HETEROGENEOUS | V2,
    "R7": TEMPLATE2 | HETEROGENEOUS,
    "R8": TEMPLATE2 | HETEROGENEOUS,
    "R9": frozenset({"template2-lab"}) | HETEROGENEOUS,
    "R13": TEMPLATE2 | HETEROGENEOUS,
    "R14": TEMPLATE2,
    "R15": TEMPLATE2 | HETEROGENEOUS,
    "R16": TEMPLATE2,
}
"""Rules of the `server_list` dialects that hold for others too, whose surveys name the same things alike."""

Check = Callable[[Survey, Profile], Iterator[Problem]]
Weight = Literal["error", "warning", "error or warning"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its stable id, what it asks for in one sentence, and the function that finds what breaks it."""

    rule_id: str
    title: str
    check: Check | None
    """None for a rule that is looked after while the file is read."""
    dialects: frozenset[str]
    """Short names of the dialects that the rule holds for."""
    severity: Weight = "error"
    """How bad it is to break the rule, on the chips that it holds for."""
    chips: tuple[str, ...] = ()
    """The chips that the rule holds for; empty for all of them, and for hosts without Ascend devices."""
    readers: tuple[str, ...] = ()
    """The readers that demand it (`Profile.reader`); empty for all of them."""
    is_whole: bool = False
    """True when the rule looks at the whole table even where each group is a rank table of its own."""

    @property
    def number(self) -> int:
        """The number in the id."""
        return int(self.rule_id.lstrip("LPR"))

    @property
    def place(self) -> tuple[bool, str, int]:
        """A sort key: R1 to R32 first, then the others by their letter."""
        return not self.rule_id.startswith("R"), self.rule_id[:1], self.number

    def parts_of(self, survey: Survey) -> tuple[Survey, ...]:
        """Return what the check looks at: the table, or group after group."""
        return (survey,) if self.is_whole or not survey.groups else survey.groups


_RULES: dict[str, Rule] = {}


def rule(
    rule_id: str,
    title: str,
    dialects: frozenset[str] = CONCISE,
    *,
    severity: Weight = "error",
    chips: tuple[str, ...] = (),
    readers: tuple[str, ...] = (),
    is_whole: bool = False,
) -> Callable[[Check], Check]:
    """Register the decorated function as the check of `rule_id` in `dialects`; see `Rule` for the rest."""

    def register(check: Check) -> Check:
        everywhere = dialects | _ELSEWHERE.get(rule_id, frozenset())
        _add(Rule(rule_id, title, check, everywhere, severity, chips, readers, is_whole))
        return check

    return register


def declare_rule(
    rule_id: str,
    title: str,
    dialects: frozenset[str] = CONCISE,
    *,
    severity: Weight = "error",
    readers: tuple[str, ...] = (),
) -> None:
    """Register a rule that is looked after while the file is read and its structure checked."""
    _add(Rule(rule_id, title, None, dialects, severity, (), readers))


def _add(entry: Rule) -> None:
    assert entry.rule_id not in _RULES, f"{entry.rule_id} is registered twice"
    assert set(entry.chips) <= set(CHIPS), f"{entry.rule_id} names an unknown chip"
    _RULES[entry.rule_id] = entry


def registered_rules() -> tuple[Rule, ...]:
    """Return every registered rule: R1 to R32 by number, then the others."""
    return tuple(sorted(_RULES.values(), key=lambda entry: entry.place))
