"""The register of rules: one function per rule over a survey, for which tables and chips it holds, how bad a breach is.

Rules without a function are looked after elsewhere: while a file is read and its structure is checked (R1, R2, R4, R5,
R31, R32, P5), and by `ranktable.local` against the host that the table is read on (L1 to L7). Source: HCCL's errors
EI0004 (R1), EI0014 (R2) and EI0017 (R4, R5); R31 and R32 are this project's: HCCL skips keys that it does not know, and
JSON parsers keep the last of two equal keys silently. L1 to L7: the checks that HCCL makes at start-up (the local
device id and the address of the port must be those of the table), the RANK_TABLE_FILE page of torch_npu (no link,
readable; without the file it goes on without a table, silently), and the driver's advice that hccn_tool, not hccn.conf,
tells the address in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ranktable.problem import Problem, Severity
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
_RULES: dict[str, Rule] = {}
MADE_FOR_A3 = frozenset({"1.2", "volcano-global"})
"""The dialects whose version says that the table has super pods."""
_FLAT_DIALECTS = frozenset({"1.0", "cross-cluster"})
_EVERY = CONCISE | TEMPLATE2 | HETEROGENEOUS | V2
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


def chip_of(survey: Survey, profile: Profile) -> str | None:
    """Return the chip of the profile, else "a3" for a table with super pods, else None."""
    return profile.chip or ("a3" if is_super_pod_table(survey) else None)


def is_super_pod_table(survey: Survey) -> bool:
    """True when the kind of table, or what it holds, is for A3: only that chip has super pods in a version 1 table."""
    if survey.dialect in MADE_FOR_A3:
        return True
    if survey.dialect in _FLAT_DIALECTS:
        return False
    first = next(survey.devices, None)
    return survey.has("super_pod_list") or (first is not None and first.has("super_device_id"))


def severity_on(survey: Survey, profile: Profile, *chips: str) -> Severity | None:
    """Return how bad it is to break a rule of `chips` in this table: None when the rule does not hold."""
    return replace(profile, chip=chip_of(survey, profile)).severity_on(*chips)


declare_rule("R1", "the file is a JSON object in UTF-8 of at most 40 MiB, without comments, named .json", _EVERY)
declare_rule("R2", "the version is known for this kind of table", _EVERY)
declare_rule("R4", "scalars are strings; in version 2.0 numbers are integers", _EVERY)
declare_rule("R5", "the keys that are demanded are there, and no array is empty", _EVERY, severity="error or warning")
declare_rule("R31", "every key is known", _EVERY, severity="warning")
declare_rule("R32", "no key stands twice in its object", _EVERY)
declare_rule("P5", "every group has a group_id of its own", frozenset({"mindie-global"}))


for _rule_id, _title in LOCAL_RULES.items():
    declare_rule(_rule_id, f"{_title} (check --local)", _EVERY, severity=_WEIGHTS.get(_rule_id, "error"))
