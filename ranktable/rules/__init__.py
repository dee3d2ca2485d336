"""The rules that a rank table is held to, grouped by what they look at.

R1 and R32 (the text), R2, R4, R5 and R31 (the structure) are found while a file is read; the rest is here.
Every rule says for which dialects it holds.
"""

from ranktable.rules import addresses, heterogeneous, identity, order, ports, template2, topology, v2_0
from ranktable.rules.registry import Rule, registered_rules

__all__ = [
    "Rule",
    "addresses",
    "heterogeneous",
    "identity",
    "order",
    "ports",
    "registered_rules",
    "template2",
    "topology",
    "v2_0",
]
