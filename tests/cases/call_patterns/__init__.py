"""Ways in which people call a parallel network, each with what must hold; run on every rank of one process group.

Every function is one pattern; its name is the sentence. It raises AssertionError when the sentence is not true.
"""

from call_patterns import (  # noqa: F401 - each puts its patterns into the table
    agreement,
    calls,
    collectives,
    gradients,
    groups,
    orders,
    overlap,
    parameters,
    refusals,
)
from call_patterns.pattern import PATTERNS, WORLD_SIZE

__all__ = ["PATTERNS", "WORLD_SIZE"]
