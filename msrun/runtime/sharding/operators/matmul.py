"""Rules for matrix products: linear, matmul, mm, bmm, mv, dot, addmm, baddbmm, outer.

MindSpore's MatMul takes ((A, B), (B, C)); with B > 1 the products are partial sums, which an all-reduce makes whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    aligned,
    dimension_labels,
    sizes_of,
    summed_axes,
)

aten = torch.ops.aten


class Linear(Rule):
    """y[.., n] = sum_k x[.., k] w[n, k] + b[n]. The bias is added once, after partial sums are whole."""

    scatters = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels: batch dimensions, k, n."""
        shapes = call.shapes
        batch = dimension_labels("b", len(shapes[0]) - 1)
        inputs = [(*batch, "k"), ("n", "k")] + ([("n",)] if len(shapes) > 2 else [])
        sizes = sizes_of(*zip(inputs, shapes, strict=True))
        return Form(tuple(inputs), (*batch, "n"), sizes, added=frozenset({2}))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Split k: multiply, all-reduce, add the bias."""
        axes = summed_axes(form, split)
        if not axes or len(inputs) < 3:
            return build.sum_over(self.local_call(call, build, inputs), axes)
        product = build.sum_over(build.call(aten.linear.default, *inputs[:2]), axes)
        return build.call(aten.add.Tensor, product, inputs[2])


class AddMatMul(Rule):
    """addmm: y = c + a b with default scales; the first input is added once, after partial sums are whole."""

    scatters = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels m, k, n; the first input is broadcast to (m, n)."""
        added, left, right = call.shapes
        sizes = sizes_of((("m", "k"), left), (("k", "n"), right))
        added_labels = aligned(("m", "n"), call.output_shape, added)
        is_scaled = call.argument("beta") != 1 or call.argument("alpha") != 1
        whole = frozenset({"k"}) if is_scaled else frozenset[str]()
        return Form((added_labels, ("m", "k"), ("k", "n")), ("m", "n"), sizes, whole, added=frozenset({0}))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Split k: multiply, all-reduce, add."""
        axes = summed_axes(form, split)
        if not axes:
            return self.local_call(call, build, inputs)
        product = build.sum_over(build.call(aten.mm.default, *inputs[1:]), axes)
        return build.call(aten.add.Tensor, product, inputs[0])


class AddBatchMatMul(Rule):
    """baddbmm: y = beta c + alpha a b; the first input is added once, after partial sums are whole."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels b, m, k, n; the first input is broadcast to (b, m, n)."""
        added, left, right = call.shapes
        sizes = sizes_of((("b", "m", "k"), left), (("b", "k", "n"), right))
        added_labels = aligned(("b", "m", "n"), call.output_shape, added)
        return Form((added_labels, ("b", "m", "k"), ("b", "k", "n")), ("b", "m", "n"), sizes, added=frozenset({0}))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Split k: multiply, all-reduce, add."""
        axes = summed_axes(form, split)
        if not axes:
            return self.local_call(call, build, inputs)
        product = build.sum_over(build.call(aten.bmm.default, *inputs[1:]), axes)
        beta, alpha = call.argument("beta"), call.argument("alpha")
        if beta == 0:  # then the first input does not count, even where it is not a number
            return build.call(aten.mul.Scalar, product, alpha)
        added = inputs[0] if beta == 1 else build.call(aten.mul.Scalar, inputs[0], beta)
        return build.call(aten.add.Tensor, added, product, alpha=alpha)


class Outer(Rule):
    """outer: y[m, n] = a[m] b[n]."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels m, n."""
        return Form((("m",), ("n",)), ("m", "n"), sizes_of((("m", "n"), call.output_shape)))


class MatMul(Rule):
    """matmul, mm and bmm of tensors with at least two dimensions; batch dimensions broadcast."""

    scatters = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels: batch dimensions, m, k, n; vectors have no m or no n."""
        left, right = call.shapes
        output = call.output_shape
        count = len(output) - (len(left) > 1) - (len(right) > 1)
        batch = dimension_labels("b", count)
        sizes = sizes_of((batch, output[:count]))
        left_labels = (*aligned(batch, output[:count], left[:-2]), *("m", "k")[-len(left) :])
        right_labels = (*aligned(batch, output[:count], right[:-2]), *("k", "n")[: len(right)])
        sizes |= sizes_of((left_labels, left), (right_labels, right))
        tail = (("m",) if len(left) > 1 else ()) + (("n",) if len(right) > 1 else ())
        return Form((left_labels, right_labels), (*batch, *tail), sizes)


RULES: Rules = [
    (Linear(), [aten.linear.default]),
    (AddMatMul(), [aten.addmm.default]),
    (MatMul(), [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default]),
    (AddBatchMatMul(), [aten.baddbmm.default]),
    (Outer(), [aten.outer.default, aten.ger.default]),
]


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
                sizes[label] = max(size, sizes.get(label, size))
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


RULES += [(Einsum(), [aten.einsum.default])]


_SAMPLES = "b"


class Recurrent(Rule):
    """Samples may be cut; steps, features and weights stay whole. With dropout between layers nothing is cut, as the
    operator draws its masks itself."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Label the samples: of the sequence as `batch_first` says, of the states dimension 1."""
        shapes = call.shapes
        is_cut = len(shapes[0]) == 3 and not (call.argument("dropout") and call.argument("train"))
        samples = 0 if call.argument("batch_first") else 1
        hidden = call.node.args[1]
        states = len(hidden) if isinstance(hidden, list | tuple) else 1

        def labels(ndim: int, dim: int) -> Labels:
            return tuple(_SAMPLES if is_cut and i == dim else None for i in range(ndim))

        sequence, state = labels(len(shapes[0]), samples), labels(len(shapes[0]), 1)
        weights: list[Labels] = [(None,) * len(shape) for shape in shapes[1 + states :]]
        return Form(
            (sequence, *(state,) * states, *weights),
            sequence,
            {_SAMPLES: shapes[0][samples]} if is_cut else {},
            others=(state,) * states,
        )


RULES += [(Recurrent(), [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input])]
