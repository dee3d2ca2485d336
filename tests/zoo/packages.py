"""The packages that the zoo's models come from: which are missing, and torchvision beside a torch for CPUs."""

import importlib.util
from pathlib import Path

PACKAGES = ("torchvision", "timm", "transformers")

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def missing():
    """Return why the zoo cannot run here; "" when it can."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed: pip install -e '.[test,zoo]'" if absent else ""


def prepare_torchvision():
    """Make `import torchvision` work where its C++ operators cannot be loaded, such as beside a torch for CPUs.

    The package index has torchvision for CUDA only. Without its library the import fails, as it describes two
    operators to torch that the library would have defined. No model of the zoo calls them. Call it before
    transformers is imported, too, which imports torchvision.
    """
    import torch

    if _LIBRARIES:
        return
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema)
        _LIBRARIES.append(library)


_LIBRARIES = []
"""Definitions end with the object that made them."""
