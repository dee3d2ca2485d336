"""The register of rules over a survey: one function per rule, in the order of their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.survey import Survey

CONCISE = frozenset({"1.0"})
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
}
"""Rules of the `server_list` dialects that hold for others too, whose surveys name the same things alike."""

Check = Callable[[Survey, Profile], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its stable id, what it asks for in one sentence, and the function that finds what breaks it."""

    rule_id: str
    title: str
    check: Check
    dialects: frozenset[str]
    """Short names of the dialects that the rule holds for."""

    @property
    def number(self) -> int:
        """The number in the id, for sorting."""
        return int(self.rule_id.removeprefix("R"))


_RULES: dict[str, Rule] = {}


def rule(rule_id: str, title: str, dialects: frozenset[str] = CONCISE) -> Callable[[Check], Check]:
    """Register the decorated function as the check of `rule_id` in `dialects`."""

    def register(check: Check) -> Check:
        assert rule_id not in _RULES, f"{rule_id} is registered twice"
        _RULES[rule_id] = Rule(rule_id, title, check, dialects | _ELSEWHERE.get(rule_id, frozenset()))
        return check

    return register


def registered_rules() -> tuple[Rule, ...]:
    """Return every registered rule in the order of its number."""
    return tuple(sorted(_RULES.values(), key=lambda entry: entry.number))
