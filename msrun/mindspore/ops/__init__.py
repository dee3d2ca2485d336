"""Operators under MindSpore's names: classes that are made first and called later, and functions."""

from __future__ import annotations

from msrun.mindspore.ops.functions import *  # noqa: F403
from msrun.mindspore.ops.functions import __all__ as _functions
from msrun.mindspore.ops.primitives import *  # noqa: F403
from msrun.mindspore.ops.primitives import __all__ as _primitives

__all__ = [*_functions, *_primitives]
