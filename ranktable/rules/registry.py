"""The register of rules over a survey: one function per rule, in the order of their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.survey import Survey

CONCISE = frozenset({"1.0"})
"""The dialects of `server_list[].device[]` whose scalars are strings."""

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
        _RULES[rule_id] = Rule(rule_id, title, check, dialects)
        return check

    return register


def registered_rules() -> tuple[Rule, ...]:
    """Return every registered rule in the order of its number."""
    return tuple(sorted(_RULES.values(), key=lambda entry: entry.number))
