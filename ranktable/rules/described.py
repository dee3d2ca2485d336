"""What every rule asks for, in words: those of the register, and those that reading a file applies by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ranktable.rules.registry import registered_rules


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule as documentation: its stable id, what it asks for in one sentence, and what else is to know."""

    rule_id: str
    title: str
    explanation: str


# Source: HCCL's parser (R1: EI0004, R2: EI0014, R4 and R5: EI0017); R31 and R32 are rules of this project, because
# readers skip unknown keys and keep the last of two equal ones without a word.
_WHILE_READING = (
    RuleText(
        "R1",
        "the file is a JSON object in UTF-8, named .json and of at most 40 MiB",
        "JSON has neither comments nor trailing commas. The name and the size are asked for on Ascend only.",
    ),
    RuleText("R2", "the version is one that the kind of table has", "The keys tell the kind; the version is second."),
    RuleText(
        "R4",
        "the scalars have the JSON type of the dialect",
        "Strings in the 1.x dialects, where the parser of HCCL refuses integers.",
    ),
    RuleText("R5", "the required keys are there and the arrays are not empty", "Each is of the right type."),
    RuleText(
        "R31",
        "every key is known",
        "An unknown key is skipped by readers, which hides a misspelt one; a near miss is named.",
    ),
    RuleText("R32", "no key stands twice in one object", "JSON parsers keep the last one without a word."),
)


def described_rules() -> tuple[RuleText, ...]:
    """Return the texts of all rules in the order of their ids."""
    registered = (
        RuleText(entry.rule_id, entry.title, " ".join((entry.check.__doc__ or "").split()))
        for entry in registered_rules()
    )
    return tuple(sorted([*_WHILE_READING, *registered], key=_by_id))


def _by_id(text: RuleText) -> tuple[str, int]:
    letters, number = re.fullmatch(r"([A-Z]+)([0-9]+)", text.rule_id).groups()  # type: ignore[union-attr]
    return letters, int(number)
