"""The rules that a rank table is held to, grouped by what they look at.

R1 and R32 (the text), R2, R4, R5 and R31 (the structure) are found while a file is read and only declared here; the
rest is here. Rules with other letters than R are what single readers, chips or kinds of tables ask for beyond them.
"""

from ranktable.rules import (
    addresses,
    declared,
    heterogeneous,
    identity,
    mindie_llm,
    mindie_motor,
    network,
    order,
    readers,
    super_pods,
    template2,
    topology,
    v2_0,
)
from ranktable.rules.registry import Rule, registered_rules

__all__ = [
    "Rule",
    "addresses",
    "declared",
    "heterogeneous",
    "identity",
    "mindie_llm",
    "mindie_motor",
    "network",
    "order",
    "readers",
    "registered_rules",
    "super_pods",
    "template2",
    "topology",
    "v2_0",
]
