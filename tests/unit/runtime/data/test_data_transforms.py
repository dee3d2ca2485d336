"""Casts and one-hot labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrun.errors import UsageError
from msrun.runtime.data.transforms import OneHot, TypeCast


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.int32, np.int32),
        (torch.float16, np.float16),
        (torch.bool, np.bool_),
        (np.float64, np.float64),
        (np.dtype("int8"), np.int8),
        ("uint8", np.uint8),
        (float, np.float64),
    ],
)
def test_typecast_takes_torch_and_numpy_dtypes(dtype, expected):
    result = TypeCast(dtype).apply_batch(np.array([0, 1, 2]))
    assert result.dtype == expected
    assert TypeCast(dtype)(np.int64(1)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, "no such type", object, str])
def test_types_that_numpy_or_torch_do_not_have_are_refused(dtype):
    with pytest.raises(UsageError, match=r"TypeCast: .* use one like torch\.float32"):
        TypeCast(dtype)


def test_onehot_keeps_the_dtype():
    result = OneHot(3).apply_batch(np.array([2, 0], np.int32))
    assert result.dtype == np.int32
    assert result.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert OneHot(2)(np.int64(1)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda: OneHot(0), "OneHot: num_classes=0; it must be an integer of at least 1"),
        (lambda: OneHot(3).apply_batch(np.array([1, 3])), "label 3 with num_classes=3; labels must be in 0..2"),
        (lambda: OneHot(3).apply_batch(np.array([-1])), "label -1 with num_classes=3"),
        (lambda: OneHot(3).apply_batch(np.array([1.0])), "labels have dtype float64"),
    ],
)
def test_labels_outside_the_classes_are_refused(misuse, words):
    with pytest.raises(UsageError) as caught:
        misuse()
    assert words in str(caught.value)
