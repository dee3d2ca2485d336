"""Networks: deferred initialisation, and a network joined with its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.runtime.public_names import loader, names_below

__all__ = sorted(names_below(__name__))

if TYPE_CHECKING:
    from msrun.runtime.nn.deferred_init import init_parameters as init_parameters
    from msrun.runtime.nn.deferred_init import no_init_parameters as no_init_parameters
    from msrun.runtime.nn.with_loss import SoftmaxCrossEntropyExpand as SoftmaxCrossEntropyExpand
    from msrun.runtime.nn.with_loss import WithLoss as WithLoss

__getattr__ = loader(__name__)


def __dir__() -> list[str]:
    return __all__
