"""Rule for einsum, whose equation is the form itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from msrun.runtime.sharding.operators.rule import Form, Labels, OperatorCall, Rule, dimension_labels

aten = torch.ops.aten


class Einsum(Rule):
    """einsum: letters that are not in the result are summed over; split, they leave partial sums.

    A letter that stands twice in one operand (a diagonal) stays whole; a size of 1 that is broadcast has no label.
    """

    def form(self, call: OperatorCall) -> Form:
        """Return the letters as labels; dimensions behind `...` are named from the right."""
        equation = call.argument("equation").replace(" ", "")
        left, arrow, right = equation.partition("->")
        operands = left.split(",")
        hidden = max(len(s) - len(o.replace("...", "")) for o, s in zip(operands, call.shapes, strict=True))
        names = dimension_labels("...", hidden)
        rows = [_letters(o, names, len(s)) for o, s in zip(operands, call.shapes, strict=True)]
        if arrow:
            output = _letters(right, names, len(call.output_shape))
        else:  # numpy's rule: letters that stand once, in alphabetical order, behind the dimensions of `...`
            letters = left.replace("...", "").replace(",", "")
            once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
            output = (*names, *once) if "..." in left else tuple(once)
        sizes: dict[str, int] = {}
        for row, shape in zip(rows, call.shapes, strict=True):
            for label, size in zip(row, shape, strict=True):
                sizes[label] = max(size, sizes.get(label, 1))
        twice = frozenset(label for row in (*rows, output) for label in row if row.count(label) > 1)
        inputs: list[Labels] = [
            tuple(label if size == sizes[label] else None for label, size in zip(row, shape, strict=True))
            for row, shape in zip(rows, call.shapes, strict=True)
        ]
        return Form(tuple(inputs), output, sizes, twice)


def _letters(text: str, names: Sequence[str], ndim: int) -> tuple[str, ...]:
    head, dots, tail = text.partition("...")
    hidden = ndim - len(head) - len(tail) if dots else 0
    return (*head, *(names[len(names) - hidden :]), *tail)


targets = [torch.ops.aten.einsum.default]


RULES = [(Einsum(), [aten.einsum.default])]
