"""MindSpore's import paths and words over `msrun.runtime`: scripts written for MindSpore train on torch.

    import msrun.mindspore as ms
    from msrun.mindspore import nn
    from msrun.mindspore.communication import init

`python -m msrun.mindspore train.py`, or `msrun --worker_num 8 -m msrun.mindspore train.py`, runs a script whose imports
still say `mindspore`. Tensors, parameters and modules are torch's own: everything of torch works on them as well, and
torch's tensors have MindSpore's methods in a process that imports this package.
"""

from __future__ import annotations

from typing import Any

from torch import from_numpy, manual_seed

from msrun.mindspore import (
    _checkparam,
    amp,
    communication,
    context,
    dataset,
    dtype,
    initializer,
    log,
    mint,
    nn,
    numpy,
    ops,
    parallel,
    profiler,
    runtime,
    seed,
    train,
)
from msrun.mindspore import (
    jit as _jit,
)
from msrun.mindspore import (
    tensor as _tensor,
)
from msrun.mindspore.amp import *  # noqa: F403
from msrun.mindspore.context import *  # noqa: F403
from msrun.mindspore.dtype import *  # noqa: F403
from msrun.mindspore.import_paths import add_import_paths
from msrun.mindspore.jit import *  # noqa: F403
from msrun.mindspore.missing import missing_name
from msrun.mindspore.ops.higher_order import grad, is_tensor, jacfwd, jacrev, jvp, value_and_grad, vjp, vmap
from msrun.mindspore.parallel import Layout, parameter_broadcast, shard, sync_pipeline_shared_parameters
from msrun.mindspore.profiler import Profiler
from msrun.mindspore.runtime import *  # noqa: F403
from msrun.mindspore.seed import get_seed, set_seed
from msrun.mindspore.tensor import *  # noqa: F403
from msrun.mindspore.tensor import add_parameter_methods
from msrun.mindspore.tensor_methods import add_tensor_methods
from msrun.mindspore.train import *  # noqa: F403
from msrun.runtime import recompute
from msrun.runtime.parallel.scaling import choose_default_compat

__version__ = "2.10.0"
"""The MindSpore whose words these are."""

_MODULES = """
amp communication context dataset dtype initializer log mint nn numpy ops parallel profiler runtime seed train
""".split()
_NAMES = """
Layout Profiler from_numpy get_seed grad is_tensor jacfwd jacrev jvp manual_seed parameter_broadcast recompute run_check
set_seed shard sync_pipeline_shared_parameters value_and_grad vjp vmap
""".split()
__all__ = [
    *_MODULES, *_NAMES, *amp.__all__, *context.__all__, *dtype.__all__, *_jit.__all__, *runtime.__all__,
    *_tensor.__all__, *train.__all__,
]  # fmt: skip

choose_default_compat("mindspore")
add_tensor_methods()
add_parameter_methods()
add_import_paths(__name__)


def run_check() -> None:
    """Say what computes here."""
    log.warning(f"msrun.mindspore on torch, {context.get_current_device()}: MindSpore {__version__}'s words")


def __getattr__(name: str) -> Any:
    raise missing_name("", name, __all__)
