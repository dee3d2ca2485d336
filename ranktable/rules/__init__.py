"""The rules that a rank table is held to, grouped by what they look at.

Rules with other letters than R are what single readers, chips or kinds of tables ask for beyond them.
"""

from ranktable.rules import (  # noqa: F401 (importing a module registers its rules)
    heterogeneous,
    identity,
    network,
    readers,
    super_pods,
    template2,
    topology,
    v2_0,
)
from ranktable.rules.registry import Rule as Rule
from ranktable.rules.registry import registered_rules as registered_rules
