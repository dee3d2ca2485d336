"""Which rule belongs to which operator: every module of this package lists its own as RULES."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from msrun.runtime.sharding import operators
from msrun.runtime.sharding.operators.elementwise import VALUE_BY_VALUE, is_elementwise
from msrun.runtime.sharding.operators.rule import Form, OperatorCall, Rule


class Replicated(Rule):
    """For operators without a rule of their own: every rank computes the whole. Correct, and reported in the plan."""

    def form(self, call: OperatorCall) -> Form:
        """Return no labels at all."""
        result = getattr(call.node.meta["val"], "shape", ())
        return Form(tuple((None,) * len(shape) for shape in call.shapes), (None,) * len(result), {})


@cache
def _table() -> dict[Any, Rule]:
    modules = [
        import_module(f"{operators.__name__}.{found.name}") for found in pkgutil.iter_modules(operators.__path__)
    ]
    listed = [entry for module in modules for entry in getattr(module, "RULES", ())]
    table = {target: rule for rule, targets in listed for target in targets}
    assert len(table) == sum(len(set(targets)) for _, targets in listed), "two rules list the same operator"
    return table


REPLICATED = Replicated()


def find_rule(target: Any) -> Rule | None:
    """Return the rule of an operator, or None when it has none."""
    found = _table().get(target)
    return VALUE_BY_VALUE if found is None and is_elementwise(target) else found
