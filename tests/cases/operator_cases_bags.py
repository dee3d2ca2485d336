"""embedding_bag with the strategies that are legal for it, written down apart from the rule."""

import torch.nn.functional as F  # noqa: N812
from operator_cases import OperatorCase

EVERY_CASE_IN = 2
ON_FOUR = ("bags-mean-padding", "bags-weighted", "bags-offsets-mean-padding")
"""In a world of four these run only."""


def _bags(rows=None, **settings):
    """Look up bags of equal length, which a matrix of indices makes, or those that offsets begin."""
    if rows is None:
        return lambda w, i, offsets: F.embedding_bag(i, w, offsets, **settings)
    return lambda w, i, weights=None: F.embedding_bag(
        i.reshape(rows, -1), w, per_sample_weights=None if weights is None else weights.reshape(rows, -1), **settings
    )


def _case_of_bags(name, call, labels, whole="", classes=8):
    kinds = {2: "fc", 3: "fco" if labels.startswith("ve,.") else "fcf"}[labels.count(",") + 1]
    shapes = {"ve,b": ((24,),), "ve,b,.": ((24,), (24,)), "ve,.,b": ((20,), (8,)), "ve,.,.": ((20,), (9,))}[labels]
    return OperatorCase(name, call, ((8, 4), *shapes), labels, whole, (0,), kinds, classes, on_eight=name in ON_FOUR)


BINARY = [
    _case_of_bags("bags-weighted", _bags(8, mode="sum"), "ve,b,."),
    _case_of_bags("bags", _bags(8, mode="sum"), "ve,b"),
    _case_of_bags("bags-mean-padding", _bags(8, padding_idx=2), "ve,b", classes=4),
    _case_of_bags("bags-max", _bags(8, mode="max"), "ve,b", "v"),
    _case_of_bags("bags-by-frequency", _bags(8, mode="sum", scale_grad_by_freq=True), "ve,b", "vb"),
    _case_of_bags("bags-mean", _bags(8), "ve,b"),
    _case_of_bags("bags-offsets-mean-padding", _bags(padding_idx=1), "ve,.,b", classes=4),
    _case_of_bags("bags-offsets", _bags(mode="sum"), "ve,.,b"),
    _case_of_bags("bags-offsets-with-end", _bags(mode="sum", include_last_offset=True), "ve,.,."),
    _case_of_bags("bags-offsets-max", _bags(mode="max"), "ve,.,b", "v"),
    OperatorCase(
        "bags-offsets-weighted-sparse",
        lambda w, i, offsets, weights: F.embedding_bag(
            i, w, offsets, mode="sum", sparse=True, per_sample_weights=weights, padding_idx=1
        ),
        ((8, 4), (20,), (8,), (20,)),
        "ve,.,b,.",
        parameters=(0,),
        kinds="fcof",
        classes=4,
    ),
]
"""Operators that take a strategy."""
UNARY = []
