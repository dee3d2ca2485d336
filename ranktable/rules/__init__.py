"""The rules that a rank table is held to, grouped by what they look at.

R1 and R32 (the text), R2, R4, R5 and R31 (the structure) are found while a file is read; the rest is here. The rules
of other dialects (R24 to R26 super pods, R28 and R29 template 2, R30 version 2.0) do not apply to version 1.0.
"""

from ranktable.rules import addresses, identity, order, ports, topology
from ranktable.rules.registry import Rule, registered_rules

__all__ = ["Rule", "addresses", "identity", "order", "ports", "registered_rules", "topology"]
