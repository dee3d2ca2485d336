"""The package's names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import msrun.runtime.data as data


def test_every_public_name_loads():
    for name in data.__all__:
        assert getattr(data, name) is not None
    assert set(data.__all__) <= set(dir(data))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'MnistDatset'"):
        data.MnistDatset  # noqa: B018


def test_importing_the_package_loads_neither_torch_nor_scikit_learn():
    code = (
        "import sys, msrun.runtime; before = set(sys.modules); import msrun.runtime.data;"
        "sys.exit(str({'sklearn', 'torch'} & (set(sys.modules) - before) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""
