"""What the document leaves open: an import."""

from mindspore.parallel.auto_parallel import AutoParallel as AutoParallel
