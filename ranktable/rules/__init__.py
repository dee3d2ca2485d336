"""The rules that lists of servers are held to, grouped by what they look at; a dialect's own stand in its module.

Rules with other letters than R are what single readers, chips or kinds of tables ask for beyond them.
"""

from ranktable.rules import identity, network, readers, super_pods, topology  # noqa: F401 (importing registers rules)
from ranktable.rules.registry import Rule as Rule
from ranktable.rules.registry import registered_rules as registered_rules
