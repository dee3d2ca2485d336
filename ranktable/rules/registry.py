"""The register of rules: one function per rule over a survey, how bad a breach is, on which chips, and its sources.

A dialect names its rules (`Dialect.rules`); those of `EVERYWHERE` hold for all. Rules without a function are looked
after while a file is read and its structure is checked (R1, R2, R4, R5, R31, R32, P5), and by `ranktable.local` against
the host that the table is read on (L1 to L7). A rule that no public source asks for is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ranktable.kinds import Survey, all_dialects
from ranktable.problem import Problem, Severity
from ranktable.profile import CHIPS, Profile
from ranktable.rules import citations

EVERYWHERE = frozenset({"R1", "R2", "R3", "R4", "R5", "R31", "R32", "L1", "L2", "L3", "L4", "L5", "L6", "L7"})
"""Rules of every dialect."""

Check = Callable[[Survey, Profile], Iterator[Problem]]
Weight = Literal["error", "warning", "error or warning"]
_RULES: dict[str, Rule] = {}
LOCAL_RULES = {
    "L1": "this host is one server of the table, by address or name",
    "L2": "the device ids of that server are device nodes of this host",
    "L3": "device_ip is what hccn_tool says, or /etc/hccn.conf where there is no hccn_tool",
    "L4": "/etc/hccn.conf agrees with hccn_tool",
    "L5": "RANK_TABLE_FILE names this file, and it is no symbolic link",
    "L6": "super_device_id is what npu-smi says",
    "L7": "RANK_ID, DEVICE_ID and RANK_SIZE of the environment agree with the table",
}
"""What `ranktable validate --local` asks for beside the other rules, by id."""
_WEIGHTS: dict[str, Weight] = {"L3": "error or warning", "L4": "warning", "L5": "error or warning"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its stable id, what it asks for in one sentence, and the function that finds what breaks it."""

    rule_id: str
    title: str
    check: Check | None
    """None for a rule that is looked after while the file is read."""
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
        known = (kind for kind in all_dialects() if kind.codec)
        return frozenset(kind.name for kind in known if self.rule_id in kind.rules | EVERYWHERE)

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


def rule(
    rule_id: str,
    title: str,
    *,
    severity: Weight = "error",
    chips: tuple[str, ...] = (),
    readers: tuple[str, ...] = (),
    is_whole: bool = False,
    sources: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Register the decorated function as the check of `rule_id`; see `Rule` for the rest."""

    def register(check: Check) -> Check:
        _add(Rule(rule_id, title, check, severity, chips, readers, is_whole, sources))
        return check

    return register


def declare_rule(
    rule_id: str,
    title: str,
    *,
    severity: Weight = "error",
    readers: tuple[str, ...] = (),
    sources: tuple[str, ...] = (),
) -> None:
    """Register a rule that is looked after while the file is read and its structure checked."""
    _add(Rule(rule_id, title, None, severity, (), readers, sources=sources))


def _add(entry: Rule) -> None:
    assert entry.rule_id not in _RULES, f"{entry.rule_id} is registered twice"
    assert entry.sources or entry.severity == "warning", f"{entry.rule_id} has no source, so it can only warn"
    assert set(entry.chips) <= set(CHIPS), f"{entry.rule_id} names an unknown chip"
    _RULES[entry.rule_id] = entry


def registered_rules() -> tuple[Rule, ...]:
    """Return every registered rule: R1 to R33 by number, then the others."""
    all_dialects()  # their modules register rules of their own
    return tuple(sorted(_RULES.values(), key=lambda entry: entry.place))


def chip_of(survey: Survey, profile: Profile) -> str | None:
    """Return the chip of the profile, else "a3" for a table with super pods, else None."""
    return profile.chip or ("a3" if is_super_pod_table(survey) else None)


def is_super_pod_table(survey: Survey) -> bool:
    """True when the kind of table, or what it holds, is for A3: only that chip has super pods in a version 1 table."""
    said = survey.kind.has_super_pods
    if said is not None:
        return said
    first = next(survey.devices, None)
    return survey.has("super_pod_list") or (first is not None and first.has("super_device_id"))


def severity_on(survey: Survey, profile: Profile, *chips: str) -> Severity | None:
    """Return how bad it is to break a rule of `chips` in this table: None when the rule does not hold."""
    return replace(profile, chip=chip_of(survey, profile)).severity_on(*chips)


_PARSED = (citations.PARSER,)
declare_rule(
    "R1", "the file is a JSON object in UTF-8 of at most 40 MiB, without comments, named .json", sources=_PARSED
)
declare_rule("R2", "the version is known for this kind of table", sources=(citations.VERSIONS,))
declare_rule(
    "R4",
    "scalars are strings; in version 2.0 numbers are integers",
    sources=(citations.CONCISE, citations.RANK_TABLE_INFO),
)
declare_rule(
    "R5",
    "the keys that are demanded are there, and no array is empty",
    severity="error or warning",
    sources=_PARSED,
)
declare_rule("R31", "every key is known", severity="warning")
declare_rule("R32", "no key stands twice in its object", sources=(citations.JSON_NAMES,))

for _rule_id, _title in LOCAL_RULES.items():
    _weight = _WEIGHTS.get(_rule_id, "error")
    _cited = citations.TORCH_NPU if _rule_id == "L5" else citations.VERIFY_PAGE
    declare_rule(_rule_id, f"{_title} (validate --local)", severity=_weight, sources=(_cited,))
