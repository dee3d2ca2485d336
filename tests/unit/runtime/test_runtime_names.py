"""One flat namespace, loaded on first use."""

import importlib
import inspect
import subprocess
import sys

import pytest
from job_runner import REPOSITORY

import msrun.runtime
from msrun.runtime import data, nn, parallel, train
from msrun.runtime.public_names import names_below


def run_python(program):
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_import_of_the_runtime_does_not_import_torch():
    run_python(
        "import sys, msrun.runtime\n"
        "dir(msrun.runtime)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )


def test_help_about_checkpoints_does_not_import_torch():
    run_python(
        "import sys\nfrom msrun.runtime.checkpoint.cli import main\n"
        "assert main(['--help']) == 0 and main(['export', '--help']) == 0 and main(['inspect']) == 2\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )


def test_rooms_hold_the_names_that_are_defined_in_them():
    """Whatever has been imported before: no module of a room has the name of a function."""
    for room in (nn, parallel, train):
        assert room.__all__
        for name, home in names_below(room.__name__).items():
            assert getattr(room, name) is getattr(importlib.import_module(home), name)
            assert name in dir(room)
    with pytest.raises(AttributeError, match=r"train' has no name 'model_'; its names are AUC, Accuracy, CSVLogger, "):
        _ = train.model_


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="has no name 'AutoParalel'; its names are AUC, Accuracy, AutoParallel, "):
        _ = msrun.runtime.AutoParalel
    with pytest.raises(AttributeError, match="no attribute 'MnistDatset'"):
        _ = data.MnistDatset


def test_every_name_loads_and_has_a_docstring():
    assert {*data.__all__} <= {*dir(data)}
    for package in (msrun.runtime, data):
        for name in package.__all__:
            value = getattr(package, name)
            documented = value if inspect.ismodule(value) or inspect.isroutine(value) else type(value)
            assert inspect.getdoc(value if inspect.isclass(value) else documented), name
