"""Which chip a rule may take for granted: the one asked for, or the one that the kind of table is made for."""

from __future__ import annotations

from dataclasses import replace

from ranktable.problem import Severity
from ranktable.profile import Profile
from ranktable.survey import Survey

_SUPER_POD_DIALECTS = frozenset({"1.2", "volcano-global"})
_FLAT_DIALECTS = frozenset({"1.0", "cross-cluster"})


def chip_of(survey: Survey, profile: Profile) -> str | None:
    """Return the chip of the profile, else "a3" for a table with super pods, else None."""
    return profile.chip or ("a3" if is_super_pod_table(survey) else None)


def is_super_pod_table(survey: Survey) -> bool:
    """True when the kind of table, or what it holds, is for A3: only that chip has super pods in a version 1 table."""
    if survey.dialect in _SUPER_POD_DIALECTS:
        return True
    if survey.dialect in _FLAT_DIALECTS:
        return False
    first = next(survey.devices, None)
    return survey.has("super_pod_list") or (first is not None and first.has("super_device_id"))


def severity_on(survey: Survey, profile: Profile, *chips: str) -> Severity | None:
    """Return how bad it is to break a rule of `chips` in this table: None when the rule does not hold."""
    return replace(profile, chip=chip_of(survey, profile)).severity_on(*chips)
