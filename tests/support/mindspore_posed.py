"""Programs that import `mindspore`, on ranks where msrun.mindspore takes its place."""

import functools
import importlib
from types import ModuleType

from msrun import contract

AS_MINDSPORE = {contract.MSRUN_MINDSPORE_SEMANTICS: ""}
"""The variables of such ranks: MindSpore's meaning of all words."""


@functools.cache
def posed(name: str) -> ModuleType:
    """Return a module of tests/cases that imports `mindspore`."""
    from msrun.mindspore.import_paths import pose_as_mindspore

    pose_as_mindspore("msrun.mindspore")
    return importlib.import_module(name)
