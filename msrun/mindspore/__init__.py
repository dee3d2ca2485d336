"""MindSpore's import paths and words over `msrun.runtime`: scripts written for MindSpore train on torch.

    import msrun.mindspore as ms
    from msrun.mindspore import nn
    from msrun.mindspore.communication import init

`python -m msrun.mindspore train.py`, or `msrun --worker_num 8 -m msrun.mindspore train.py`, runs a script whose imports
still say `mindspore`. Tensors, parameters and modules are torch's own: everything of torch works on them as well, and
torch's tensors have MindSpore's methods in a process that imports this package.
"""

from __future__ import annotations

import importlib

from torch import from_numpy, manual_seed

from msrun.mindspore import amp, context, dtype, log, runtime, train
from msrun.mindspore import tensor as _tensor
from msrun.mindspore.amp import *  # noqa: F403
from msrun.mindspore.context import *  # noqa: F403
from msrun.mindspore.dtype import *  # noqa: F403
from msrun.mindspore.import_paths import add_import_paths, take_names
from msrun.mindspore.initializer import get_seed, set_seed
from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops import higher_order, is_tensor, jacfwd, jacrev, vmap
from msrun.mindspore.parallel import Layout, parameter_broadcast, shard, sync_pipeline_shared_parameters
from msrun.mindspore.profiler import Profiler
from msrun.mindspore.runtime import *  # noqa: F403
from msrun.mindspore.tensor import *  # noqa: F403
from msrun.mindspore.tensor import add_parameter_methods
from msrun.mindspore.tensor_methods import add_tensor_methods
from msrun.mindspore.train import *  # noqa: F403
from msrun.runtime import recompute
from msrun.runtime.parallel.precision import choose_default_compat

__version__ = "2.10.0"
"""The MindSpore whose words these are."""

_MODULES = """
amp communication context dataset dtype initializer log mint nn numpy ops parallel profiler runtime train
""".split()
_NAMES = """
Layout Profiler from_numpy get_seed is_tensor jacfwd jacrev manual_seed parameter_broadcast recompute run_check
seed set_seed shard sync_pipeline_shared_parameters vmap
""".split()
_OF_FUNCTIONS = f"{higher_order.JIT} grad jvp value_and_grad vjp"
__all__ = [
    *_MODULES, *_NAMES, *take_names(__name__, higher_order, _OF_FUNCTIONS), *amp.__all__, *context.__all__,
    *dtype.__all__, *runtime.__all__, *_tensor.__all__, *train.__all__,
]  # fmt: skip
__getattr__ = missing_names("", __all__)

for _name in (*_MODULES, "_checkparam"):
    importlib.import_module(f"{__name__}.{_name}")
choose_default_compat("mindspore")
add_tensor_methods()
add_parameter_methods()
add_import_paths(__name__)


def run_check() -> None:
    """Say what computes here."""
    log.warning(f"msrun.mindspore on torch, {context.get_current_device()}: MindSpore {__version__}'s words")
