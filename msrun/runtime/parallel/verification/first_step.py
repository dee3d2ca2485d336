"""The first training step of every network checks itself: it is compared with that of one process before it counts.

By default where that is cheap, always with MSRUN_VERIFY=1, never with MSRUN_VERIFY=0 or `check_first_step(False)`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from msrun import contract
from msrun.errors import UnverifiableError
from msrun.runtime import world
from msrun.runtime.execute.phase import is_verifying
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.plan import log
from msrun.runtime.parallel.verification.report import VerificationReport
from msrun.runtime.parallel.verification.verify import Comparison, root_of, verifying

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel  # which calls this module

ELEMENTS, ELEMENTS_OF_ACCELERATOR = 4e6, 64e6
"""Most elements of the parameters of a network that is checked by default."""
PRODUCTS, PRODUCTS_OF_ACCELERATOR = 1.5e8, 1.5e10
"""Most products of a forward pass on the global batch: about 30 ms on one core, beside 80 ms to 5 s of a capture."""

_checked: weakref.WeakKeyDictionary[AutoParallel, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""AutoParallel -> the networks whose first step was checked, or was found too large"""
_functions: weakref.WeakKeyDictionary[AutoParallel, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""AutoParallel -> the code that `value_and_grad` has run for it: finding its networks takes longer"""


def check_first_call(
    parallel: AutoParallel, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Compare the first training call of a module with that of one process; later ones pass by.

    Raises:
        VerificationError: they differ, in a captured network, or with MSRUN_VERIFY=1 in any.
    """
    if is_verifying.get() or not (network.training and torch.is_grad_enabled()):
        return
    if _is_to_be_checked(parallel, network, args, kwargs):
        _check(parallel, lambda comparison: comparison.compare_module(network, args, kwargs))


def check_first_gradients(
    parallel: AutoParallel,
    function: Callable[..., Any],
    differentiate: Callable[..., tuple[Any, Any]],
    positions: Sequence[int],
    weights: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Compare what `value_and_grad` gives in a step function's first step with that of one process.

    Raises:
        VerificationError: they differ, in a captured network, or with MSRUN_VERIFY=1 in any.
    """
    code = getattr(function, "__code__", function)
    known = _functions.setdefault(parallel, weakref.WeakSet())
    if is_verifying.get() or code in known:
        return
    known.add(code)
    if _is_to_be_checked(parallel, root_of(parallel, function), args, kwargs):
        _check(parallel, lambda c: c.compare_function(function, differentiate, positions, weights, args, kwargs))


def _is_to_be_checked(parallel: AutoParallel, root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    known = _checked.get(parallel)
    if known is not None and root in known:
        return False
    settings, ranks = parallel.settings, world.get_group_size()
    if ranks == 1 or settings.is_lone or world.simulation_level() is not None:
        return False
    wanted = os.environ.get(contract.MSRUN_VERIFY, "")
    if wanted == "0" or (not wanted and settings.checks_first_step is False):
        return False
    if parallel.engine.has_waited:
        log.debug("the first step does not check itself: no_sync() adds gradients up that the check would send")
        return False
    _checked.setdefault(parallel, weakref.WeakSet()).add(root)
    if wanted or settings.checks_first_step:
        return True
    on_cpu = world.device().type == "cpu"
    tensors = find_tensors(args, kwargs)
    elements = sum(parameter.numel() for parameter in root.parameters())
    products = count_products(root, tensors) * (ranks if settings.is_replicated else settings.batch_parts(ranks))
    if elements > (ELEMENTS if on_cpu else ELEMENTS_OF_ACCELERATOR):
        log.debug("the first step does not check itself: %.0f parameters; MSRUN_VERIFY=1 checks any network", elements)
        return False
    if products > (PRODUCTS if on_cpu else PRODUCTS_OF_ACCELERATOR):
        log.debug("the first step does not check itself: about %.1e products; MSRUN_VERIFY=1 checks any step", products)
        return False
    return True


def _check(parallel: AutoParallel, compare: Callable[[Comparison], VerificationReport]) -> None:
    """Compare; a captured step that differs is an error, one of whole replicas a warning: torch's users know them."""
    is_asked = bool(os.environ.get(contract.MSRUN_VERIFY))
    is_speaker = world.get_rank() == 0
    try:
        with verifying():
            report = compare(Comparison(parallel, None))
    except UnverifiableError as error:
        if is_speaker and is_asked:
            log.warning("MSRUN_VERIFY: the first step was not verified: %s", error)
        elif is_speaker:
            log.debug("the first step does not check itself: %s", error)
        return
    if is_speaker and is_asked:
        (log.info if report.is_equal else log.error)("%s", report)
    if report.is_captured or is_asked:
        report.raise_if_different()
    elif not report.is_equal and is_speaker:
        log.warning(
            "%s is not one process here: %s: %s",
            parallel.settings.parallel_mode,
            report.describe_difference(),
            report.remedy,
        )


def count_products(root: nn.Module, tensors: Sequence[Tensor]) -> float:
    """Return about how many products a forward pass computes: a weight meets every row, token or pixel of the batch.

    It needs no run. A weight of a convolution meets every pixel, any other one of images every 64th.
    """
    rows = pixels = 1
    for tensor in tensors:
        if tensor.dim() > 3:
            pixels = max(pixels, tensor.numel() // max(1, tensor.shape[1]))
            rows = max(rows, tensor.shape[0], pixels // 64)
        elif tensor.dim() == 3:
            rows = max(rows, tensor.numel() // max(1, min(tensor.shape[1], tensor.shape[2])))
        elif tensor.dim():
            is_tokens = tensor.dim() == 2 and not tensor.is_floating_point()
            rows = max(rows, tensor.numel() if is_tokens else tensor.shape[0])
    looked_up = {id(m.weight) for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    weights = [parameter for parameter in root.parameters() if id(parameter) not in looked_up]
    return float(sum(p.numel() * (max(rows, pixels) if p.dim() > 2 else rows) for p in weights))
