"""What the document leaves open: an import, and that the losses of copies are added, as MindSpore adds them."""

from mindspore import set_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel as AutoParallel

set_auto_parallel_context(compat="mindspore")
