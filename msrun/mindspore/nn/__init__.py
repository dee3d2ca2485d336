"""Cells, layers, losses and optimizers under MindSpore's names: torch modules all of them."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from msrun.mindspore.metrics import METRICS, get_metric_fn, rearrange_inputs
from msrun.mindspore.missing import missing_names
from msrun.mindspore.nn import cells, layers, losses, optimizers, table, training
from msrun.mindspore.nn.table import get_activation
from msrun.mindspore.parallel import AutoParallel, MicroBatchInterleaved, PipelineCell
from msrun.mindspore.parallel import GradAccumulation as GradAccumulationCell
from msrun.runtime import no_init_parameters
from msrun.runtime.optim import LARS

if TYPE_CHECKING:  # what follows, for editors and type checkers
    from msrun.mindspore.nn.cells import *  # noqa: F403
    from msrun.mindspore.nn.layers import *  # noqa: F403
    from msrun.mindspore.nn.losses import *  # noqa: F403
    from msrun.mindspore.nn.optimizers import *  # noqa: F403
    from msrun.mindspore.nn.training import *  # noqa: F403


def _made_in(module: ModuleType) -> dict[str, Any]:
    own = vars(module).items()
    return {name: one for name, one in own if name[0] != "_" and getattr(one, "__module__", "") == module.__name__}


_made = {name: one for part in (cells, layers, losses, optimizers, training) for name, one in _made_in(part).items()}
_made |= METRICS | layers.BY_DIMS | table.LAYERS | optimizers.SCHEDULES | optimizers.OPTIMIZER_CLASSES
globals().update(_made)
_Loss = losses.LossBase
for _kind in (AutoParallel, GradAccumulationCell, MicroBatchInterleaved, PipelineCell):
    for _name in "set_train set_grad trainable_params get_parameters parameters_and_names parameters_dict".split():
        setattr(_kind, _name, vars(cells.Cell)[_name])  # MindSpore's are cells


def opt_init_args_register(init: Any) -> Any:
    """Return the `__init__` of an optimizer that it decorates."""
    return init


__all__ = [
    *_made, "get_activation", "GradAccumulationCell",
    "MicroBatchInterleaved", "PipelineCell", "LARS", "no_init_parameters",
    "get_metric_fn", "rearrange_inputs",
]  # fmt: skip
__getattr__ = missing_names("nn", __all__)
