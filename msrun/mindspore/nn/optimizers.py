"""Optimizers with MindSpore's arguments; see `msrun.runtime.optim`."""

from __future__ import annotations

from typing import Any

from msrun.errors import UsageError
from msrun.runtime import optim


class SGD(optim.SGD):
    """w = w - lr v, v = momentum v + g.

    Raises:
        UsageError: a `loss_scale` other than 1.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        _check_scale("SGD", loss_scale)
        super().__init__(
            params, learning_rate, momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )


class Momentum(optim.Momentum):
    """v = momentum v + g, w = w - lr v.

    Raises:
        UsageError: a `loss_scale` other than 1.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float,
        momentum: float,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
    ) -> None:
        _check_scale("Momentum", loss_scale)
        super().__init__(params, learning_rate, momentum, weight_decay=weight_decay, nesterov=use_nesterov)


class Adam(optim.Adam):
    """Adam with bias correction, and epsilon where MindSpore has it; `optim.Adam` has both formulas.

    Raises:
        UsageError: a `loss_scale` other than 1.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
    ) -> None:
        _check_scale("Adam", loss_scale)
        super().__init__(
            params, lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, use_eps_hat=True
        )


class AdamWeightDecay(optim.AdamWeightDecay):
    """Adam without bias correction, with decoupled decay."""

    def __init__(
        self,
        params: Any,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, learning_rate, (beta1, beta2), eps, weight_decay)


class Lamb(optim.Lamb):
    """Adam whose step of each parameter is scaled by the parameter's norm."""

    def __init__(
        self,
        params: Any,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, learning_rate, (beta1, beta2), eps, weight_decay)


class LazyAdam(optim.LazyAdam):
    """Adam; of a sparse gradient its rows alone change.

    Raises:
        UsageError: a `loss_scale` other than 1.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
    ) -> None:
        _check_scale("LazyAdam", loss_scale)
        super().__init__(params, learning_rate, (beta1, beta2), eps, use_locking, use_nesterov, weight_decay)


class FTRL(optim.FTRL):
    """Follow the regularised leader; of a sparse gradient its rows alone change.

    Raises:
        UsageError: a `loss_scale` other than 1.
    """

    def __init__(
        self,
        params: Any,
        initial_accum: float = 0.1,
        learning_rate: float = 1e-3,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        use_locking: bool = False,
        loss_scale: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        _check_scale("FTRL", loss_scale)
        super().__init__(params, initial_accum, learning_rate, lr_power, l1, l2, use_locking, weight_decay)


def _check_scale(name: str, loss_scale: float) -> None:
    if loss_scale != 1.0:
        raise UsageError(
            f"{name}(loss_scale={loss_scale!r}): gradients come out of AutoParallel without their scale; leave it out, "
            'and call .mixed_precision("float16", loss_scale) on the AutoParallel'
        )
