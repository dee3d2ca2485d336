"""The package's names."""

from __future__ import annotations

import pytest

import msrun.runtime.data as data


def test_every_public_name_loads():
    for name in data.__all__:
        assert getattr(data, name) is not None
    assert set(data.__all__) <= set(dir(data))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'MnistDatset'"):
        data.MnistDatset  # noqa: B018
